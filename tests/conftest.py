"""Fixtures for every test: the demo target, real Triton servers, and a check that nothing is left behind."""

from __future__ import annotations

import os
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, settings

from ddtree_local.command import OWNER_VARIABLE
from ddtree_local.demo_target import ensure_demo_target
from ddtree_local.server import SHM_PREFIX, LocalTriton

ROOT = Path(__file__).resolve().parents[1]

# Before anything imports torch, and inherited by the servers: on small models several OpenMP threads are four
# to eight times slower than one when anything else runs, as another server of the same session does.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read when Triton's language is first imported: without a GPU, kernels run in its interpreter, on the CPU.
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# A shell's background job ignores Ctrl-C, and so would every program that a test starts and then interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Every run tries the same examples, and none is too slow for a machine that does other things as well.
# `--hypothesis-profile=search` looks for new ones.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", parent=_PATIENT)
settings.register_profile("gate", parent=_PATIENT, derandomize=True, database=None)
settings.load_profile("gate")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test's random numbers are its own: they do not depend on which tests ran before it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(zlib.crc32(item.nodeid.encode()))


@dataclass(frozen=True)
class Leftovers:
    """What is left of servers: empty when all is well."""

    processes: tuple[int, ...]  # pids of tritonserver and its stubs
    regions: tuple[str, ...]  # names in /dev/shm

    @property
    def nothing(self) -> bool:
        return not self.processes and not self.regions


def leftovers_of(marker: str) -> Leftovers:
    """What is left of servers whose shared-memory prefix starts with `marker`."""
    regions = sorted(region.name for region in Path("/dev/shm").glob(f"{marker}*"))
    return Leftovers(tuple(_processes_of(marker)), tuple(regions))


def _processes_of(marker: str) -> list[int]:
    wanted = f"{OWNER_VARIABLE}={marker}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue  # ended meanwhile, or another user's
        if any(variable.startswith(wanted) for variable in environment.split(b"\0")):
            found.append(int(folder.name))
    return found


class StartTriton(Protocol):
    """Makes a started server that is stopped when its test (or module, session) ends."""

    def __call__(self, model_repository: Path, **options: Any) -> LocalTriton: ...


@pytest.fixture(scope="session")
def left_behind() -> Callable[[str], Leftovers]:
    """Looks for what servers with a given mark (`LocalTriton.shm_prefix`, or its beginning) left."""
    return leftovers_of


@pytest.fixture(scope="session")
def project_root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def demo_target() -> Path:
    """Checkpoint folder of SmolLM2-135M-Instruct; brought on first use."""
    return ensure_demo_target(ROOT / ".cache" / "demo-target", progress=False)


@pytest.fixture(scope="session")
def demo_draft() -> Path:
    """Checkpoint folder of the demo's drafter."""
    return ROOT / "drafters" / "smollm2-135m-dflash"


def _started_servers() -> Iterator[StartTriton]:
    servers: list[LocalTriton] = []

    def start(model_repository: Path, **options: Any) -> LocalTriton:
        server = LocalTriton(model_repository, **options)
        servers.append(server)
        server.start()
        return server

    try:
        yield start
    finally:
        for server in servers:
            server.stop()


@pytest.fixture
def start_triton() -> Iterator[StartTriton]:
    """Starts servers (arguments of LocalTriton) that live as long as the test."""
    yield from _started_servers()


@pytest.fixture(scope="module")
def start_module_triton() -> Iterator[StartTriton]:
    """Starts servers that live as long as the module's tests: loading the demo pair takes seconds."""
    yield from _started_servers()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After the last test: no process and no shared memory of a server that this run started."""
    yield
    left = leftovers_of(f"{SHM_PREFIX}{os.getpid()}_")
    assert left.nothing, f"this run's servers left {left}"
