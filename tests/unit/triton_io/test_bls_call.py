"""Calls of stages that nobody waits for any more, over a small stand-in of Triton's module."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest

from tests.fakes.triton_tensor import Tensor


class Response:
    """As Triton's, without an error."""

    def has_error(self) -> bool:
        return False

    def output_tensors(self) -> Sequence[Tensor]:
        return [Tensor("status", np.array([7]))]


class Server:
    """Answers calls when it is told to, as a thread of Triton's does: whoever waits or does not."""

    def __init__(self) -> None:
        self.calls: list[asyncio.Future[Response]] = []

    def request(self, **_: Any) -> Server:
        return self

    def async_exec(self) -> asyncio.Future[Response]:
        self.calls.append(asyncio.get_running_loop().create_future())
        return self.calls[-1]


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def module(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module under test, which holds the stand-in."""
    triton = cast(Any, ModuleType("triton_python_backend_utils"))
    triton.Tensor, triton.InferenceRequest = Tensor, server.request
    monkeypatch.setitem(sys.modules, triton.__name__, triton)
    name = "ddtree.triton_io.bls_call"
    sys.modules.pop(name, None)
    yield importlib.import_module(name)
    del sys.modules[name]


async def given_up(calls: Any) -> None:
    """Begin a call and stop waiting for it."""
    call = asyncio.ensure_future(calls("drafter", "release", {}))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def test_the_end_waits_for_a_call_that_was_given_up(server: Server, module: Any) -> None:
    calls = module.StageCalls()
    await given_up(calls)
    assert not server.calls[0].cancelled(), "its thread goes on"
    ending = asyncio.ensure_future(calls.end())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not ending.done()
    server.calls[0].set_result(Response())
    await ending


async def test_the_end_does_not_wait_for_calls_that_are_over_nor_for_ever(
    server: Server, module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = module.StageCalls()
    call = asyncio.ensure_future(calls("drafter", "release", {}))
    await asyncio.sleep(0)
    server.calls[0].set_result(Response())
    assert {name: array.tolist() for name, array in (await call).items()} == {"status": [7]}
    assert not calls._under_way, "what is over is let go"
    monkeypatch.setattr(module, "_END_S", 0.01)
    await calls.end()
    assert not caplog.text
    await given_up(calls)
    await calls.end()
    assert "1 calls of stages are not answered at the end" in caplog.text
