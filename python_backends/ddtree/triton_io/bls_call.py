"""Calls stage models through business logic scripting or directly, as the deployment's settings say."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import triton_python_backend_utils as pb_utils

from ddtree.config import ServingConfig
from ddtree.events import Observe
from ddtree.stages.bls import OUTPUTS, BlsStages, StageCall
from ddtree.stages.direct import DirectCalls
from ddtree.stages.patience import PatienceLimits, PatientCall, error_of
from ddtree.wire import Arrays

_LOG = logging.getLogger(__name__)
_END_S: Final = 5.0


class StageCalls:
    """Calls stage models, and knows which calls are under way: their threads wait, whoever gives them up."""

    def __init__(self) -> None:
        self._under_way: set[asyncio.Future[Any]] = set()

    async def __call__(self, model: str, operation: str, arrays: Arrays) -> Mapping[str, Any]:
        """Send one operation to a stage model and give its outputs as arrays.

        Raises:
            StageGone: the stage is not loaded or its process is dead.
            Unavailable: it answered with an error.
        """
        answer = _request(model, operation, arrays).async_exec()
        self._under_way.add(answer)
        answer.add_done_callback(self._under_way.discard)
        response = await asyncio.shield(answer)
        if response.has_error():
            raise error_of(model, operation, response.error().message())
        return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}

    async def end(self) -> None:
        """Wait for the calls under way, some seconds at most.

        Triton answers none once the model is finalized: a thread that waits then keeps the process alive
        until it is ended, at which Triton 2.51 crashed.
        """
        if self._under_way:
            _, late = await asyncio.wait(self._under_way, timeout=_END_S)
            if late:
                _LOG.warning("%d calls of stages are not answered at the end", len(late))


def reach_stages(config: ServingConfig, observe: Observe) -> BlsStages:
    """The stages of topology `bls`; none is called yet."""
    through_triton = StageCalls()
    calls: StageCall = through_triton
    end = through_triton.end
    if config.stage_calls == "direct":
        calls = direct = DirectCalls(through_triton)

        async def end() -> None:
            direct.close()
            await through_triton.end()

    limits = PatienceLimits(draft_s=config.draft_timeout_ms / 1e3, recovery_s=float(config.stage_recovery_s))
    builds_trees = config.trees_built_by == "orchestrator"
    return BlsStages(PatientCall(calls, limits), observe, end, builds_trees=builds_trees)


def _request(model: str, operation: str, arrays: Arrays) -> Any:
    op = np.array([operation.encode()], dtype=np.object_)
    inputs = [pb_utils.Tensor("op", op), *(pb_utils.Tensor(name, array) for name, array in arrays.items())]
    return pb_utils.InferenceRequest(
        model_name=model, requested_output_names=list(OUTPUTS[operation]), inputs=inputs
    )
