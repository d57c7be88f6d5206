"""Fixtures of the tests through real Triton: the small pair, and one server a topology for the whole run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ddtree.text import TextCodec
from ddtree_local.server import LocalTriton
from tests.fakes.pipeline import GreedyReference
from tests.triton.oracle_server import OracleServer, TinyPair, make_repository

TOPOLOGIES = ("bls", "in_process")


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
    triton = LocalTriton(
        repository,
        # Explicit model control, so that a test can reload a stage.
        load_models=sorted(model.name for model in repository.iterdir()),
        env=tiny_pair.environment(topology),
        log_path=tmp_path_factory.mktemp("log") / "triton.log",
    )
    with triton:
        yield OracleServer(
            triton, topology, repository, TextCodec.from_folder(tiny_pair.target), tiny_reference
        )
        report = triton.stop()
    # A request that the server still counts as running would hold its shutdown up to the exit timeout.
    assert (report.exit_code, report.forced, report.orphans_killed) == (0, False, 0)
