"""A stage that doubles numbers, and its server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddtree.stages.server import StageServer
from tests.fakes.doubler import Doubler


@pytest.fixture
def stage() -> Doubler:
    return Doubler()


@pytest.fixture
def server(stage: Doubler) -> Iterator[StageServer]:
    served = StageServer("doubler", stage.load)
    yield served
    stage.hold.set()
    served.close()
    assert not served._thread.is_alive()
