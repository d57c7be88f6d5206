"""A stage as Triton runs it, in which thread, over a small stand-in of Triton's module."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest

from ddtree.stages.operations import Operation
from ddtree.wire import Arrays
from tests.fakes.triton_tensor import Tensor


class Response:
    """As Triton's."""

    def __init__(self, tensors: tuple[Tensor, ...] = (), error: Exception | None = None) -> None:
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in tensors}
        self.error = error


class Request:
    """A call of one operation."""

    def __init__(self, operation: str) -> None:
        self._op = np.array([operation.encode()], dtype=np.object_)

    def inputs(self) -> list[Tensor]:
        return [Tensor("op", self._op)]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module under test, which holds the stand-in."""
    triton = cast(Any, ModuleType("triton_python_backend_utils"))
    triton.Tensor, triton.InferenceResponse, triton.TritonError = Tensor, Response, RuntimeError
    monkeypatch.setitem(sys.modules, triton.__name__, triton)
    name = "ddtree.triton_io.stage_model"
    sys.modules.pop(name, None)
    yield importlib.import_module(name)
    del sys.modules[name]


def stage_of(module: Any, **parameters: str) -> Any:
    """A stage that tells the thread it runs in, loaded with these settings."""

    class Stage(module._StageModel):  # type: ignore[misc]
        def _load(self, _: Mapping[str, Any]) -> dict[str, Operation]:
            self.loaded_in = threading.get_ident()
            return {"where": self.where}

        def where(self, _: Mapping[str, Any]) -> Arrays:
            return {"thread": np.array([threading.get_ident()])}

    values = {name: {"string_value": value} for name, value in parameters.items()}
    stage = Stage()
    config = json.dumps({"parameters": values} if values else {})
    stage.initialize({"model_name": "stage", "model_config": config})
    return stage


@pytest.mark.parametrize(
    ("parameters", "is_direct"),
    [
        ({}, True),
        ({"stage_calls": "${DDTREE_STAGE_CALLS}", "engine": "${DDTREE_ENGINE:-torch}"}, True),
        ({"stage_calls": "direct", "engine": "torch"}, True),
        ({"stage_calls": "triton", "engine": "torch"}, False),
        # Engines may set signal handlers, for one, which only the main thread may.
        ({"stage_calls": "direct", "engine": "trtllm"}, False),
    ],
)
def test_a_stage_loads_and_runs_in_one_thread(
    module: Any, parameters: dict[str, str], *, is_direct: bool
) -> None:
    stage = stage_of(module, **parameters)
    where, channel = stage.execute([Request("where"), Request("channel")])
    assert where.error is None
    assert where.tensors["thread"].tolist() == [stage.loaded_in]
    assert (stage.loaded_in != threading.get_ident()) == is_direct
    if is_direct:
        told = json.loads(channel.tensors["info"][0])
        assert told["address"].startswith("ddtree-")
    else:
        assert "no operation or input 'channel'" in str(channel.error)
    stage.finalize()
