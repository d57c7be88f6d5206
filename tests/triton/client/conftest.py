"""One server with the scripted model for all tests of the client."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_client import Client
from ddtree_local.server import LocalTriton

CONTRACT_MODEL = Path(__file__).parents[2] / "fakes" / "contract_model"


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    repository = tmp_path_factory.mktemp("models")
    shutil.copytree(CONTRACT_MODEL, repository / "ddtree", ignore=shutil.ignore_patterns("__pycache__"))
    with LocalTriton(repository, exit_timeout_s=10.0) as server:
        yield server.grpc_url
        # A request that the server still counts as running holds its shutdown up to the exit timeout.
        ended = server.stop()
        assert (ended.exit_code, ended.forced) == (0, False)


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address, timeout_s=30.0) as opened:
        yield opened
