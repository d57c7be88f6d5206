"""Fixtures of the tests through real Triton: the small pair, and one server a topology for the whole run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from ddtree.text import TextCodec
from ddtree_local.server import LocalTriton
from tests.fakes.pipeline import GreedyReference
from tests.triton.oracle_server import OracleServer, TinyPair, make_repository
from tests.triton.shared_server import SharedServer, shared_servers

TOPOLOGIES = ("bls", "in_process")
_SHARED_SERVERS = {"oracle_server", "tiny_server"}  # fixtures that live as long as the run
_CRASH_S = 5.0  # until a server that writes its stack has ended


def pytest_itemcollected(item: pytest.Item) -> None:
    """A test whose shared server Triton's own crash has ended is run once more; see `shared_server`."""
    is_debugged = item.config.getoption("usepdb")  # which the plugin refuses beside reruns
    if not is_debugged and _SHARED_SERVERS.intersection(getattr(item, "fixturenames", ())):
        item.add_marker(pytest.mark.flaky(reruns=1, condition=_has_lost_a_server))


def _has_lost_a_server(error: BaseException | None) -> bool:
    return error is not None and any(server.is_lost(_CRASH_S) for server in shared_servers)


def pytest_runtest_setup() -> None:
    """No test begins with a server that is lost."""
    for server in shared_servers:
        server.revive()


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return TinyPair.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_reference(tiny_pair: TinyPair) -> GreedyReference:
    # A second thread only spins on matrices this small, and the servers need the cores.
    torch.set_num_threads(1)
    return GreedyReference(tiny_pair.target)


@pytest.fixture(scope="session", params=TOPOLOGIES)
def oracle_server(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    project_root: Path,
    tiny_pair: TinyPair,
    tiny_reference: GreedyReference,
) -> Iterator[OracleServer]:
    """The small pair behind a real server; pytest runs all tests of one topology before those of the next."""
    topology = str(request.param)
    repository = make_repository(
        tmp_path_factory.mktemp("models") / topology, project_root / "model_repository", topology
    )
    make = partial(
        LocalTriton,
        repository,
        # Explicit model control, so that a test can reload a stage.
        load_models=sorted(model.name for model in repository.iterdir()),
        env=tiny_pair.environment(topology),
        log_path=tmp_path_factory.mktemp("log") / "triton.log",
    )
    codec = TextCodec.from_folder(tiny_pair.target)
    with SharedServer(make(), topology, repository, codec, tiny_reference, make=make) as server:
        yield server
        report = server.triton.stop()
    # A request that the server still counts as running would hold its shutdown up to the exit timeout.
    assert (report.exit_code, report.forced, report.orphans_killed) == (0, False, 0)
