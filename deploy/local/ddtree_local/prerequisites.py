"""What a machine must have before the server from the wheel can run, each gap as one line with its fix.

Also a script for a bare system Python (`python3 prerequisites.py`), before there is a virtual environment: it
uses the standard library only and imports nothing of this package. It does not know how the server is started
or whether the wheel is installed.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import importlib.util
import os
import platform
import socket
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

PYTHON_VERSIONS = ((3, 10), (3, 11), (3, 12))
"""CPython versions that have a Python backend stub in the wheel and a numpy older than 2."""

GLIBC = (2, 35)
"""The wheel's own tag, manylinux_2_35: pip refuses it below (the binaries themselves ask for 2.34)."""

LIBSTDCXX_SYMBOLS = b"GLIBCXX_3.4.30"
"""The newest C++ symbols that the server asks for (GCC 12)."""

SHM_FOLDER = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory lives; the stub's queues are there
SHM_BYTES = 32 * 1024 * 1024
"""Room for four models' queues and tensors: a region starts at 1 MiB and grows with its largest messages."""

_LIBRARY_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/lib", "/usr/lib")


def python_name() -> str:
    """The running interpreter as a package manager names it: `python3.11`."""
    return f"python{sys.version_info[0]}.{sys.version_info[1]}"


def shared_libpython() -> Path | None:
    """The running interpreter's shared library, or None when it was built (or packaged) without one."""
    name = f"lib{python_name()}.so.1.0"
    variable = sysconfig.get_config_var
    folders = [variable("LIBDIR"), variable("LIBPL"), str(Path(sys.base_prefix) / "lib")]
    if variable("LIBDIR") and variable("MULTIARCH"):
        folders.insert(1, str(Path(variable("LIBDIR")) / variable("MULTIARCH")))
    for folder in [*folders, *_LIBRARY_FOLDERS]:
        if folder and (Path(folder) / name).is_file():
            return (Path(folder) / name).resolve()
    return None


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen on `host:port` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connections are still closing counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def _platform_gap(system: str, machine: str) -> str | None:
    if system == "Linux" and machine in ("x86_64", "AMD64"):
        return None
    return (
        f"platform: the Triton wheel is for Linux x86-64, this is {system} {machine}; "
        "use the container image in deploy/docker instead"
    )


def _glibc_gap(library: str, version: str) -> str | None:
    wanted = ".".join(map(str, GLIBC))
    if library == "glibc" and tuple(int(part) for part in version.split(".")[:2]) >= GLIBC:
        return None
    found = f"glibc {version}" if library == "glibc" else "no glibc (musl?)"
    return (
        f"C library: the Triton wheel needs glibc >= {wanted}, this system has {found}; "
        "use Debian 12, Ubuntu 22.04 or newer, or the container image in deploy/docker"
    )


def _python_gap(implementation: str, version: tuple[int, int]) -> str | None:
    if implementation == "CPython" and version in PYTHON_VERSIONS:
        return None
    return (
        f"Python: the local server needs CPython 3.10, 3.11 or 3.12, this is {implementation} "
        f"{version[0]}.{version[1]}; install one of them and say `make setup PYTHON=python3.11`"
    )


def _libpython_gap(found: Path | None) -> str | None:
    if found is not None:
        return None
    return (
        f"shared libpython: lib{python_name()}.so.1.0 is missing (Triton's stub links it); Debian, Ubuntu: "
        f"`apt-get install lib{python_name()}`; pyenv: reinstall with PYTHON_CONFIGURE_OPTS=--enable-shared"
    )


def _venv_gap(has_ensurepip: bool) -> str | None:
    if has_ensurepip:
        return None
    return f"venv: this Python cannot make virtual environments; `apt-get install {python_name()}-venv`"


def _library_gap(name: str, package: str, symbols: bytes = b"") -> str | None:
    """Whether the dynamic linker finds `name`, and whether that copy has the `symbols`."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return f"system library: {name} is missing; `apt-get install {package}`"
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    stem = name.split(".so", maxsplit=1)[0]
    loaded = next((line.split()[-1] for line in maps if f"/{stem}.so" in line), None)
    if loaded is None or symbols in Path(loaded).read_bytes():
        return None
    return (
        f"system library: {loaded} lacks {symbols.decode()}; `apt-get install {package}`, version 12 or newer"
    )


def _shm_gap(folder: Path, wanted_bytes: int) -> str | None:
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        return f"shared memory: {folder} is missing or not writable; mount a tmpfs there (mode 1777)"
    state = os.statvfs(folder)
    free = state.f_bavail * state.f_frsize
    if free >= wanted_bytes:
        return None
    return (
        f"shared memory: {folder} has {free >> 20} MiB free, the models need {wanted_bytes >> 20}; "
        "in a container start it with --shm-size=256m"
    )


def _port_gap(host: str, port: int) -> str | None:
    if port_is_free(host, port):
        return None
    return (
        f"port: {host}:{port} is taken; stop what listens there or choose another port "
        "(make serve HTTP_PORT=… GRPC_PORT=… METRICS_PORT=…)"
    )


def missing(host: str = "127.0.0.1", ports: Sequence[int] = ()) -> list[str]:
    """What this machine and the running interpreter lack, one line each; empty when nothing does."""
    fatal = _platform_gap(platform.system(), platform.machine())
    if fatal:
        return [fatal]
    gaps: Iterable[str | None] = (
        _glibc_gap(*platform.libc_ver()),
        _python_gap(platform.python_implementation(), sys.version_info[:2]),
        _libpython_gap(shared_libpython()),
        _venv_gap(importlib.util.find_spec("ensurepip") is not None),
        _library_gap("libstdc++.so.6", "libstdc++6", LIBSTDCXX_SYMBOLS),
        _library_gap("libz.so.1", "zlib1g"),
        _shm_gap(SHM_FOLDER, SHM_BYTES),
        *(_port_gap(host, port) for port in ports),
    )
    return [gap for gap in gaps if gap]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write every gap on its own line of standard error; 0 when there is none."""
    parser = argparse.ArgumentParser(description="Say what this machine lacks for a local Triton server.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--ports", type=int, nargs="*", default=[], help="ports that must be free")
    chosen = parser.parse_args(arguments)
    gaps = missing(chosen.host, chosen.ports)
    for gap in gaps:
        sys.stderr.write(f"missing prerequisite: {gap}\n")
    return 1 if gaps else 0


if __name__ == "__main__":
    sys.exit(main())
