"""Stages that are called directly answer as through Triton, and through Triton where that fails."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from ddtree.errors import Unavailable
from ddtree.stages.direct import DirectCalls
from ddtree.stages.patience import PatienceLimits, PatientCall, StageGone, error_of
from ddtree.stages.server import StageServer
from ddtree.wire import Arrays
from tests.fakes.clock import ManualClock
from tests.fakes.doubler import NUMBERS, Doubler, Triton


def seconds_of(clock: ManualClock) -> Callable[[], float]:
    return lambda: clock() / 1e9


async def doubled(calls: Any) -> list[int]:
    answer = await calls("doubler", "double", NUMBERS)
    numbers: list[int] = answer["doubled"].tolist()
    return numbers


async def call_held(calls: DirectCalls, stage: Doubler) -> asyncio.Future[list[int]]:
    """A direct call that the stage works at until `hold` is set."""
    await doubled(calls)
    stage.hold.clear()
    stage.entered.clear()
    under_way = asyncio.ensure_future(doubled(calls))
    assert await asyncio.to_thread(stage.entered.wait, 10)
    return under_way


async def test_a_stage_is_asked_once_where_it_is_and_then_called_directly(server: StageServer) -> None:
    triton = Triton(server)
    calls = DirectCalls(triton)
    for _ in range(3):
        assert await doubled(calls) == [0, 2, 4, 6, 8]
    assert triton.calls == ["channel"]
    answer = await calls("doubler", "double", NUMBERS)
    assert answer["stage_ms"].dtype == np.float32
    calls.close()


async def test_what_a_stage_refuses_is_told_as_through_triton(server: StageServer) -> None:
    calls = DirectCalls(Triton(server))
    with pytest.raises(Unavailable, match=r"stage doubler failed to refuse: .*numbers must be even"):
        await calls("doubler", "refuse", {})
    with pytest.raises(Unavailable, match="stage doubler failed to break: INTERNAL: of no use"):
        await calls("doubler", "break", {})
    with pytest.raises(Unavailable, match=r"no operation or input 'halve'; operations are .*double"):
        await calls("doubler", "halve", {})
    assert await doubled(calls) == [0, 2, 4, 6, 8], "the stage outlives them"
    calls.close()


async def test_everything_happens_in_one_thread_and_one_by_one(stage: Doubler, server: StageServer) -> None:
    triton = Triton(server)
    calls, others = DirectCalls(triton), DirectCalls(triton)
    answers = [
        *(doubled(calls) for _ in range(10)),
        *(doubled(others) for _ in range(10)),
        *(doubled(triton) for _ in range(10)),
    ]
    assert await asyncio.gather(*answers) == [[0, 2, 4, 6, 8]] * 30
    assert stage.most == 1
    assert len(set(stage.threads)) == 1
    assert threading.get_ident() not in stage.threads
    calls.close()
    others.close()


async def test_a_call_that_was_given_up_disturbs_no_later_one(stage: Doubler, server: StageServer) -> None:
    calls = DirectCalls(Triton(server))
    assert await doubled(calls) == [0, 2, 4, 6, 8]
    stage.hold.clear()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(calls("doubler", "double", {"numbers": np.arange(3)}), 0.05)
    # Its channel was closed with it, so the next one goes another way, behind it.
    later = asyncio.ensure_future(doubled(calls))
    await asyncio.sleep(0.05)
    assert not later.done()
    stage.hold.set()
    assert await later == [0, 2, 4, 6, 8]
    calls.close()


@pytest.mark.parametrize("failure", [Unavailable("no operation 'channel'"), None])
async def test_a_stage_without_a_channel_is_called_through_triton(failure: Exception | None) -> None:
    clock = ManualClock()
    triton = Triton(None)

    async def through(model: str, operation: str, arrays: Arrays) -> Mapping[str, Any]:
        if operation == "channel":
            triton.calls.append(operation)
            if failure is not None:
                raise failure
            return {"info": np.array([b'{"address": "ddtree-nobody-listens"}'], dtype=np.object_)}
        return await triton(model, operation, arrays)

    calls = DirectCalls(through, seconds_of(clock))
    for _ in range(3):
        assert await doubled(calls) == [0, 2, 4, 6, 8]
    assert triton.calls == ["channel", "double", "double", "double"], "asked now and then, not every time"
    clock.advance(6.0)
    await doubled(calls)
    assert triton.calls[-2:] == ["channel", "double"]


async def test_a_stage_is_asked_for_one_channel_however_long_it_takes(
    stage: Doubler, server: StageServer
) -> None:
    clock, triton = ManualClock(), Triton(server)
    calls = DirectCalls(triton, seconds_of(clock))
    stage.hold.clear()
    busy = asyncio.ensure_future(triton("doubler", "double", NUMBERS))  # whoever asks now waits
    await asyncio.to_thread(stage.entered.wait, 10)
    asking = asyncio.ensure_future(doubled(calls))
    await asyncio.sleep(0.02)
    clock.advance(60.0)
    others = [asyncio.ensure_future(doubled(calls)) for _ in range(3)]
    await asyncio.sleep(0.02)
    stage.hold.set()
    assert await asyncio.gather(asking, *others) == [[0, 2, 4, 6, 8]] * 4
    await busy
    assert triton.calls.count("channel") == 1
    calls.close()


async def test_who_ends_while_a_stage_is_asked_keeps_no_channel(server: StageServer) -> None:
    triton = Triton(server)
    calls = DirectCalls(triton)
    asking = asyncio.ensure_future(doubled(calls))
    await asyncio.sleep(0)
    calls.close()
    assert await asking == [0, 2, 4, 6, 8]
    assert triton.calls == ["channel", "double"]
    channel = calls._stages["doubler"].channel
    assert channel is None or channel.is_lost


async def test_a_stage_that_is_gone_is_asked_nothing_more() -> None:
    triton = Triton(None)
    triton.failure = StageGone("its process ended")
    with pytest.raises(StageGone, match="its process ended"):
        await doubled(DirectCalls(triton))
    assert triton.calls == ["channel"], "asking a dead process costs a second"


async def test_a_stage_that_was_loaded_again_is_called_directly_again(stage: Doubler) -> None:
    clock = ManualClock()
    first = StageServer("doubler", stage.load)
    triton = Triton(first)
    calls = DirectCalls(triton, seconds_of(clock))
    await doubled(calls)
    triton.server = second = StageServer("doubler", stage.load)
    first.close()
    clock.advance(6.0)
    assert await doubled(calls) == [0, 2, 4, 6, 8]
    assert await doubled(calls) == [0, 2, 4, 6, 8]
    assert triton.calls[0] == "channel"
    assert triton.calls.count("channel") == 2
    calls.close()
    second.close()


async def test_a_stage_that_hangs_is_left_for_the_copy_that_triton_has() -> None:
    hanging, healthy = Doubler(), Doubler()
    first = StageServer("doubler", hanging.load)
    triton = Triton(first)
    clock = ManualClock()
    calls = PatientCall(DirectCalls(triton, seconds_of(clock)), PatienceLimits(call_s=0.1, recovery_s=0.0))
    assert (await calls("doubler", "double", NUMBERS))["doubled"].tolist() == [0, 2, 4, 6, 8]
    hanging.hold.clear()
    with pytest.raises(StageGone, match=r"did not double within 0.1 s"):
        await calls("doubler", "double", NUMBERS)
    triton.server = second = StageServer("doubler", healthy.load)  # as a watchdog has it loaded
    clock.advance(6.0)
    for _ in range(2):
        assert (await calls("doubler", "double", NUMBERS))["doubled"].tolist() == [0, 2, 4, 6, 8]
    assert triton.calls == ["channel", "channel"]
    hanging.hold.set()
    await asyncio.to_thread(first.close)
    await asyncio.to_thread(second.close)


async def test_a_stage_that_says_its_parts_are_gone_is_gone(stage: Doubler, server: StageServer) -> None:
    """As a target does that lost one of its processes: who insists waits for another copy."""
    calls = DirectCalls(Triton(server))
    stage.says = "a process of this target is not healthy"
    with pytest.raises(StageGone, match=r"failed to refuse: .*is not healthy"):
        await calls("doubler", "refuse", {})
    assert type(error_of("doubler", "refuse", "it is tired")) is Unavailable
    calls.close()


async def test_calls_under_way_at_the_end_fail_and_go_nowhere_else(
    stage: Doubler, server: StageServer
) -> None:
    """Triton answers nothing any more once a model is finalized."""
    triton = Triton(server)
    calls = DirectCalls(triton)
    under_way = await call_held(calls, stage)
    calls.close()
    with pytest.raises(Unavailable, match="the model ends"):
        await under_way
    assert triton.calls == ["channel"]


async def test_the_call_under_way_is_answered_before_a_stage_ends(
    stage: Doubler, server: StageServer
) -> None:
    triton = Triton(server)
    calls = DirectCalls(triton)
    under_way = await call_held(calls, stage)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(server.close)
        await asyncio.sleep(0.05)
        assert not closing.done()
        stage.hold.set()
        assert await under_way == [0, 2, 4, 6, 8]
        closing.result(10)
    assert triton.calls == ["channel"]
    calls.close()


def _serve(pipe: Connection) -> None:
    def hang(_: Mapping[str, Any]) -> Arrays:
        pipe.send("hangs")
        signal.pause()
        return {}

    server = StageServer("doubler", lambda: {"double": lambda a: {"doubled": a["numbers"] * 2}, "hang": hang})
    pipe.send(server.call("channel", {})["info"])
    signal.pause()


async def test_a_killed_process_hands_its_calls_to_triton() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,))
    process.start()
    try:
        info = await asyncio.to_thread(ours.recv)
        heard: list[str] = []

        async def through(_: str, operation: str, __: Arrays) -> Mapping[str, Any]:
            heard.append(operation)
            if operation == "channel":
                return {"info": info}
            raise StageGone("its process is dead")

        calls = DirectCalls(through)
        assert await doubled(calls) == [0, 2, 4, 6, 8]
        hanging = asyncio.ensure_future(calls("doubler", "hang", {}))
        assert await asyncio.to_thread(ours.recv) == "hangs"
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(StageGone, match="its process is dead"):
            await asyncio.wait_for(hanging, 10)
        assert heard == ["channel", "hang"]
    finally:
        process.kill()
        process.join()
