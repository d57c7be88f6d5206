"""Work that is put off: when it is done, in which order, and what goes wrong beside it."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import pytest
import torch

from ddtree.cores import takes_all_cores
from ddtree.meanwhile import Meanwhile


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
    meanwhile, told = Meanwhile(), list[str]()
    call = Call(told)
    for name in ("first", "second"):
        meanwhile.put_off(partial(told.append, name))
    meanwhile.put_off(partial(call.answer.set_result, 7))  # it cannot be answered before this is done
    assert told == []
    assert await meanwhile.during(call()) == 7
    assert told == ["sent", "first", "second", "ended"]
    assert await meanwhile.during(Answered()()) == 3
    assert told == ["sent", "first", "second", "ended"]


class Answered:
    """A call that is answered at once."""

    async def __call__(self) -> int:
        return 3


async def test_a_call_that_is_answered_at_once_does_not_lose_the_work() -> None:
    meanwhile, told = Meanwhile(), list[str]()
    meanwhile.put_off(partial(told.append, "work"))
    assert await meanwhile.during(Answered()()) == 3
    assert told == ["work"]


async def test_what_puts_off_more_is_followed_by_that() -> None:
    meanwhile, told = Meanwhile(), list[str]()
    meanwhile.put_off(lambda: meanwhile.put_off(partial(told.append, "later")))
    meanwhile.put_off(partial(told.append, "first"))
    meanwhile.do()
    assert told == ["first", "later"]


def fail() -> None:
    """Work that goes wrong."""
    raise ValueError("no such thing")


async def test_work_that_fails_is_logged_and_costs_nobody_else_anything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    meanwhile, told = Meanwhile(), list[str]()
    meanwhile.put_off(fail)
    meanwhile.put_off(partial(told.append, "work"))
    with caplog.at_level(logging.ERROR):
        assert await meanwhile.during(Answered()()) == 3
    assert told == ["work"]
    assert "what was put off failed: no such thing" in caplog.text


async def test_a_call_that_fails_says_so_when_the_work_is_done() -> None:
    async def broken() -> int:
        raise ValueError("no answer")

    meanwhile, told = Meanwhile(), list[str]()
    meanwhile.put_off(partial(told.append, "work"))
    with pytest.raises(ValueError, match="no answer"):
        await meanwhile.during(broken())
    assert told == ["work"]


@pytest.mark.parametrize("ended_at", ["sending", "waiting"])
async def test_who_is_cancelled_ends_the_call(ended_at: str) -> None:
    meanwhile, told = Meanwhile(), list[str]()
    call = Call(told)
    meanwhile.put_off(partial(told.append, "work"))
    task = asyncio.ensure_future(meanwhile.during(call()))
    for _ in range(1_000_000):
        if told == (["sent"] if ended_at == "sending" else ["sent", "work"]):
            break
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert told[-1] == "ended"
    assert call.answer.cancelled()


async def test_where_it_is_not_worthwhile_nothing_is_put_off() -> None:
    meanwhile, told = Meanwhile(), list[str]()
    meanwhile.is_worthwhile = False
    meanwhile.put_off(partial(told.append, "work"))
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
    assert takes_all_cores(torch.device(device)) is takes_all
