"""How the orchestrator answers where Triton's own module is not there: a small one stands in for it."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest

from ddtree.errors import Unavailable
from tests.fakes.triton_tensor import Tensor


class TritonError(Exception):
    """As Triton's, with its codes."""

    UNAVAILABLE = "UNAVAILABLE"

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class InferenceResponse:
    """As Triton's."""

    def __init__(self, tensors: Sequence[Tensor] = (), error: TritonError | None = None) -> None:
        self.names = [tensor.name() for tensor in tensors]
        self.error = error


class StopOrder:
    """A request to stop what runs under its id; it is its own sender."""

    def __init__(self) -> None:
        self.responses: list[tuple[InferenceResponse | None, int]] = []

    def inputs(self) -> list[Tensor]:
        return [Tensor("stop", np.array([True]))]

    def requested_output_names(self) -> list[str]:
        return []

    def request_id(self) -> str:
        return "watchdog-1"

    def timeout(self) -> int:
        return 0

    def get_response_sender(self) -> StopOrder:
        return self

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        self.responses.append((response, flags))


class OwnStages:
    """Stages of this process that are lost, or not."""

    def __init__(self, lost: str) -> None:
        self._lost = lost

    async def check(self) -> None:
        if self._lost:
            raise Unavailable(self._lost)


Handle = Callable[[OwnStages | None, StopOrder], Awaitable[None]]


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Handle]:
    triton = cast(Any, ModuleType("triton_python_backend_utils"))
    triton.Tensor, triton.InferenceResponse, triton.TritonError = Tensor, InferenceResponse, TritonError
    triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    known = set(sys.modules)
    monkeypatch.setitem(sys.modules, triton.__name__, triton)
    from ddtree.triton_io.orchestrator import Orchestrator

    async def handle(own: OwnStages | None, order: StopOrder) -> None:
        nothing = cast(Any, None)  # no engine and no text: a stop order needs neither
        await Orchestrator(nothing, nothing, own=own).handle([order])

    yield handle
    for name in set(sys.modules) - known:  # they hold on to the module that stood in
        if name.startswith("ddtree.triton_io"):
            del sys.modules[name]


@pytest.mark.parametrize("own", [None, OwnStages("")])
async def test_a_process_that_is_well_says_so_to_a_watchdog(handle: Handle, own: OwnStages | None) -> None:
    order = StopOrder()
    await handle(own, order)
    ((response, flags),) = order.responses
    assert response is not None
    assert (response.error, flags) == (None, 1)


async def test_a_process_whose_stages_are_lost_says_so_to_a_watchdog(handle: Handle) -> None:
    """In the words by which it knows a process that is to be loaded again."""
    order = StopOrder()
    await handle(OwnStages("the target is not healthy: worker 1 ended"), order)
    ((response, flags),) = order.responses
    assert response is not None
    assert response.error is not None
    assert "is not healthy: worker 1 ended" in str(response.error)
    assert (response.error.code, flags) == ("UNAVAILABLE", 1)
