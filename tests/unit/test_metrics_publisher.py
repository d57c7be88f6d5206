"""When numbers are published and when the stages are asked what they hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddtree.errors import Unavailable
from ddtree.events import (
    RequestArrived,
    RequestEnded,
    RequestWatch,
)
from ddtree.metrics import Gauge, Metrics
from ddtree.metrics_publisher import MetricsPublisher
from ddtree.stages.base import StageInfo
from ddtree.stages.in_process import InProcessStages
from tests.fakes.pipeline import make_oracle, make_verifier
from tests.fakes.tiny_models import make_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


# --- publishing


class _Board:
    """An exporter that remembers the last gauges and how often it was asked."""

    def __init__(self, fail_at: int = 0) -> None:
        self.gauges: dict[str, float] = {}
        self.publications = 0
        self._fail_at = fail_at

    def updates(self, metrics: Metrics) -> Iterator[None]:
        self.publications += 1
        if self.publications == self._fail_at:
            raise ZeroDivisionError("the port is gone")
        for family in metrics.families():
            for labels, series in family.items():
                taken = series.take()
                if isinstance(series, Gauge) and taken is not None:
                    self.gauges[".".join([family.name, *labels.values()])] = taken  # type: ignore[assignment]
                yield


class _CountingStages(InProcessStages):
    """Counts how often it is asked what it holds; fails to say at first, if told to."""

    asked = 0
    failures = 0

    async def describe(self) -> StageInfo:
        self.asked += 1
        if self.asked <= self.failures:
            raise Unavailable("not yet")
        return await super().describe()


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen within 30 s")


@pytest.mark.parametrize("failures", [0, 2])
async def test_published_at_once_while_live_and_until_the_stages_are_empty_then_never(
    target: Path, failures: int
) -> None:
    board = _Board()
    publisher = MetricsPublisher(Metrics(), board, interval_s=0.02, usage_s=0.05)
    stages = _CountingStages(make_verifier(target), make_oracle(target, noise=0.5))
    stages.failures = failures
    is_idle = False
    task = asyncio.create_task(publisher.run(stages, lambda: is_idle))
    request = RequestWatch()
    publisher.listener(RequestArrived(request))
    await _until(lambda: board.gauges.get("ddtree_active_requests") == 1)
    publisher.listener(RequestEnded(request, "completed"))
    await _until(lambda: board.gauges["ddtree_active_requests"] == 0)
    is_idle = True
    await _until(lambda: publisher._is_settled)
    assert board.gauges["ddtree_kv_pages_capacity.target_verifier"] > 0
    assert board.gauges["ddtree_sessions.drafter"] == 0
    asked, published = stages.asked, board.publications
    await asyncio.sleep(0.2)
    assert (stages.asked, board.publications) == (asked, published)
    publisher.listener(RequestArrived(request))
    await _until(lambda: board.gauges["ddtree_active_requests"] == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await stages.close()


async def test_a_port_that_fails_ends_the_publishing_and_the_listening(target: Path) -> None:
    board = _Board(fail_at=2)
    publisher = MetricsPublisher(Metrics(), board, interval_s=0.01)
    stages = InProcessStages(make_verifier(target), make_oracle(target, noise=0.5))
    await asyncio.wait_for(publisher.run(stages, lambda: True), 30)
    publisher.listener(RequestArrived(RequestWatch()))
    assert not publisher.listener.has_requests
    await stages.close()
