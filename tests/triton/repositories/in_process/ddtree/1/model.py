"""The model `ddtree` with both stages in its process, the drafter being the tests' oracle.

The oracle's file is named by DDTREE_TEST_ORACLE: the tests are no installed package. A request whose text
begins with `stages:` is not decoded but an order to the stages: `describe`, `noise 0.5`, `pause 0.01`,
`lose drafter`, `lose verifier`.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from ddtree import assembly
from ddtree.config import ServingConfig
from ddtree.events import Event, Listeners, Observe, StageCalled
from ddtree.models.draft_checkpoint import draft_hash, open_checkpoint
from ddtree.stages.in_process import InProcessStages
from ddtree.triton_io import orchestrator
from ddtree.verify import TargetVerifier

_ORDER = b"stages:"


class TritonPythonModel(orchestrator.TritonPythonModel):
    """The real model but for the drafter, and for orders."""

    def _load_stages(self, config: ServingConfig, observe: Observe) -> InProcessStages:
        verifier = assembly.load_verifier(config)
        assert isinstance(verifier, TargetVerifier), "in one process the target is run by PyTorch"
        self._verifier = verifier
        self._oracle = _load_oracle(config)
        self._rounds = 0
        self._stages = InProcessStages(self._verifier, self._oracle, Listeners([observe, self._count_round]))
        return self._stages

    async def execute(self, requests: Sequence[Any]) -> None:
        real = []
        for request in requests:
            order = _order_of(request)
            if order is None:
                real.append(request)
            else:
                # On the stages' own thread: between two calls of theirs, never during one.
                said = await self._stages._run(self._obey, order.split())
                text = np.array([said.encode()], dtype=np.object_)
                response = pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)])
                request.get_response_sender().send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        await super().execute(real)

    def _count_round(self, event: Event) -> None:
        self._rounds += isinstance(event, StageCalled) and event.operation == "build_tree"

    def _obey(self, order: list[str]) -> str:
        match order:
            case ["noise", noise]:
                self._oracle.noise = float(noise)
            case ["pause", seconds]:
                self._oracle.pause_s = float(seconds)
            case ["lose", "drafter"]:
                self._oracle.lose_next = True
            case ["lose", "verifier"]:
                self._verifier.release([session.session_id for session in self._verifier.sessions])
            case _:
                assert order == ["describe"], order
        self._verifier.check_integrity()
        return json.dumps(
            [asdict(self._verifier.usage()), asdict(self._oracle.usage()), {"rounds": self._rounds}]
        )


def _order_of(request: Any) -> str | None:
    for tensor in request.inputs():
        if tensor.name() == "text_input":
            value: bytes = tensor.as_numpy().reshape(-1)[0]
            return value.removeprefix(_ORDER).decode() if value.startswith(_ORDER) else None
    return None


def _load_oracle(config: ServingConfig) -> Any:
    spec = importlib.util.spec_from_file_location("oracle_drafter", os.environ["DDTREE_TEST_ORACLE"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    block_size = open_checkpoint(config.draft).config.block_size
    return module.OracleDrafter(
        config.target, block_size=block_size, draft_hash=draft_hash(config.draft), noise=0.6
    )
