"""Work that is deferred: when it is done, in which order, and what goes wrong beside it."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path

import pytest
import torch

from ddtree.cores import takes_all_cores
from ddtree.deferred import DeferredWork


class Call:
    """Something that is sent at once and answered when told."""

    def __init__(self, told: list[str]) -> None:
        self.told = told
        self.answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def __call__(self) -> int:
        self.told.append("sent")
        try:
            return await self.answer
        finally:
            self.told.append("ended")


async def test_work_is_done_in_order_while_the_call_is_under_way() -> None:
    deferred, told = DeferredWork(), list[str]()
    call = Call(told)
    for name in ("first", "second"):
        deferred.defer(partial(told.append, name))
    deferred.defer(partial(call.answer.set_result, 7))  # it cannot be answered before this is done
    assert told == []
    assert await deferred.during(call()) == 7
    assert told == ["sent", "first", "second", "ended"]
    assert await deferred.during(Answered()()) == 3
    assert told == ["sent", "first", "second", "ended"]


class Answered:
    """A call that is answered at once."""

    async def __call__(self) -> int:
        return 3


async def test_a_call_that_is_answered_at_once_does_not_lose_the_work() -> None:
    deferred, told = DeferredWork(), list[str]()
    deferred.defer(partial(told.append, "work"))
    assert await deferred.during(Answered()()) == 3
    assert told == []  # the answer waits for nothing
    deferred.run()
    assert told == ["work"]


async def test_what_defers_more_is_followed_by_that() -> None:
    deferred, told = DeferredWork(), list[str]()
    deferred.defer(lambda: deferred.defer(partial(told.append, "later")))
    deferred.defer(partial(told.append, "first"))
    deferred.run()
    assert told == ["first", "later"]


def fail() -> None:
    """Work that goes wrong."""
    raise ValueError("no such thing")


async def test_work_that_fails_is_logged_and_costs_nobody_else_anything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    deferred, told = DeferredWork(), list[str]()
    deferred.defer(fail)
    deferred.defer(partial(told.append, "work"))
    with caplog.at_level(logging.ERROR):
        deferred.run()
    assert told == ["work"]
    assert "deferred work failed: no such thing" in caplog.text


async def test_an_answer_waits_for_no_more_than_one_piece_of_work() -> None:
    deferred, told = DeferredWork(), list[str]()
    call = Call(told)
    deferred.defer(partial(call.answer.set_result, 7))
    for name in ("first", "second", "third"):
        deferred.defer(partial(told.append, name))
    assert await deferred.during(call()) == 7
    assert "third" not in told
    assert await deferred.during(Answered()()) == 3
    deferred.run()
    assert [each for each in told if each not in ("sent", "ended")] == ["first", "second", "third"]


async def test_a_call_that_fails_says_so_and_loses_no_work() -> None:
    async def broken() -> int:
        raise ValueError("no answer")

    deferred, told = DeferredWork(), list[str]()
    deferred.defer(partial(told.append, "work"))
    with pytest.raises(ValueError, match="no answer"):
        await deferred.during(broken())
    deferred.run()
    assert told == ["work"]


@pytest.mark.parametrize("ended_at", ["sending", "waiting"])
async def test_who_is_cancelled_ends_the_call(ended_at: str) -> None:
    deferred, told = DeferredWork(), list[str]()
    call = Call(told)
    deferred.defer(partial(told.append, "work"))
    task = asyncio.ensure_future(deferred.during(call()))
    for _ in range(1_000_000):
        if told == (["sent"] if ended_at == "sending" else ["sent", "work"]):
            break
        await asyncio.sleep(0)
    else:
        raise AssertionError(f"it did not come so far: {told}")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert told[-1] == "ended"
    assert call.answer.cancelled()


async def test_where_it_is_off_nothing_is_deferred() -> None:
    deferred, told = DeferredWork(), list[str]()
    deferred.is_on = False
    deferred.defer(partial(told.append, "work"))
    assert told == ["work"]


@pytest.mark.parametrize(("device", "threads", "cores", "takes_all"), [
    ("cpu", 2, {0, 1}, True),
    ("cpu", 3, {0, 1}, True),
    ("cpu", 1, {0, 1}, False),
    ("cpu", 1, {7}, True),
    ("cuda", 2, {0, 1}, False),
])  # fmt: skip
def test_which_computing_leaves_a_core(
    monkeypatch: pytest.MonkeyPatch, device: str, threads: int, cores: set[int], takes_all: bool
) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: cores)
    monkeypatch.setattr("ddtree.cores._QUOTA", Path("/not/there"))
    assert takes_all_cores(torch.device(device)) is takes_all


@pytest.mark.parametrize(("quota", "takes_all"), [
    ("max 100000", False),
    ("400000 100000", True),
    ("450000 100000", True),
    ("500000 100000", False),
    ("nonsense", False),
])  # fmt: skip
def test_a_container_has_no_more_cores_than_its_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, takes_all: bool
) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr("ddtree.cores._QUOTA", tmp_path / "cpu.max")
    assert takes_all_cores(torch.device("cpu")) is takes_all
