"""What a machine lacks is said in one line each, by the standard library alone, before any installation."""

from __future__ import annotations

import ctypes
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_local import prerequisites
from ddtree_local.errors import PortInUseError
from ddtree_local.ports import choose_ports

SCRIPT = Path(prerequisites.__file__)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    # -I -S: no packages, no environment: what `make setup` has on a fresh machine.
    command = [sys.executable, "-I", "-S", str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_the_script_is_silent_where_nothing_is_missing() -> None:
    done = run_script()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_script_says_a_taken_port_in_one_line(taken_port: int) -> None:
    done = run_script("--ports", str(taken_port))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"127.0.0.1:{taken_port} is taken" in done.stderr
    assert "HTTP_PORT" in done.stderr


def test_libpython_found_is_the_one_of_this_interpreter() -> None:
    found = prerequisites.shared_libpython()
    assert found is not None
    library = ctypes.CDLL(str(found))
    library.Py_GetVersion.restype = ctypes.c_char_p
    major_minor = f"{sys.version_info[0]}.{sys.version_info[1]}."
    assert library.Py_GetVersion().decode().startswith(major_minor)


@pytest.mark.parametrize(
    ("gap", "wanted"),
    [
        (prerequisites._platform_gap("Darwin", "arm64"), ["Darwin arm64", "deploy/docker"]),
        (prerequisites._platform_gap("Linux", "aarch64"), ["Linux aarch64", "deploy/docker"]),
        (prerequisites._glibc_gap("glibc", "2.31"), ["glibc >= 2.35", "glibc 2.31", "Debian 12"]),
        (prerequisites._glibc_gap("", ""), ["no glibc", "Debian 12"]),
        (prerequisites._python_gap("CPython", (3, 13)), ["CPython 3.13", "make setup PYTHON="]),
        (prerequisites._python_gap("PyPy", (3, 11)), ["PyPy 3.11", "make setup PYTHON="]),
        (prerequisites._libpython_gap(None), ["shared libpython", "apt-get install libpython3."]),
        (prerequisites._venv_gap(False), ["apt-get install python3.", "-venv"]),
        (
            prerequisites._library_gap("libnosuch.so.9", "nosuch"),
            ["libnosuch.so.9", "apt-get install nosuch"],
        ),
        (
            prerequisites._library_gap("libstdc++.so.6", "libstdc++6", b"GLIBCXX_9.9.9"),
            ["lacks GLIBCXX_9.9.9", "apt-get install libstdc++6"],
        ),
        (prerequisites._shm_gap(Path("/no/such/shm"), 1), ["/no/such/shm", "not writable", "tmpfs"]),
        (prerequisites._shm_gap(Path("/dev/shm"), 1 << 60), ["MiB free", "--shm-size"]),
    ],
)
def test_a_gap_is_one_line_with_the_value_found_and_the_way_out(gap: str | None, wanted: list[str]) -> None:
    assert gap is not None
    assert "\n" not in gap
    for part in wanted:
        assert part in gap


@pytest.mark.parametrize("version", ["2.35", "2.36", "2.41", "3.0"])
def test_a_new_enough_glibc_is_no_gap(version: str) -> None:
    assert prerequisites._glibc_gap("glibc", version) is None


def test_ports_left_open_are_filled_with_different_free_ones(taken_port: int) -> None:
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(50):
        ports = choose_ports("127.0.0.1", None, 0, None)
        chosen = {ports.http, ports.grpc, ports.metrics}
        assert len(chosen) == 3
        # The server binds them seconds later: no outgoing connection may have taken one by then.
        assert max(chosen) < first_outgoing
        assert all(prerequisites.port_is_free("127.0.0.1", port) for port in chosen)
    assert not prerequisites.port_is_free("127.0.0.1", taken_port)


@pytest.mark.parametrize("which", ["http", "grpc", "metrics"])
def test_a_taken_port_is_refused_by_name(which: str, taken_port: int) -> None:
    asked: dict[str, int | None] = {"http": None, "grpc": None, "metrics": None, which: taken_port}
    with pytest.raises(PortInUseError, match=rf"^{which} port: 127.0.0.1:{taken_port} is taken; .+$"):
        choose_ports("127.0.0.1", **asked)


def test_a_port_asked_for_twice_is_refused() -> None:
    with pytest.raises(PortInUseError, match="must differ"):
        choose_ports("127.0.0.1", 18123, 18123, None)
