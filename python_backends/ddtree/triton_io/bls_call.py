"""Calls a stage model through business logic scripting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from ddtree.errors import Unavailable
from ddtree.stages.bls import OUTPUTS
from ddtree.stages.patience import StageGone
from ddtree.wire import Arrays

# Triton's own words about a model that did not get the call, or whose process ended (2.51 and 2.73).
_GONE = ("is not healthy", "is not ready", "no available versions", "unknown model", "stub process")


async def call_stage(model: str, operation: str, arrays: Arrays) -> Mapping[str, Any]:
    """Send one operation to a stage model and give its outputs as arrays.

    Raises:
        StageGone: the stage is not loaded or its process is dead.
        Unavailable: it answered with an error.
    """
    op = np.array([operation.encode()], dtype=np.object_)
    inputs = [pb_utils.Tensor("op", op), *(pb_utils.Tensor(name, array) for name, array in arrays.items())]
    request = pb_utils.InferenceRequest(
        model_name=model, requested_output_names=list(OUTPUTS[operation]), inputs=inputs
    )
    response = await request.async_exec()
    if response.has_error():
        said = response.error().message()
        kind = StageGone if any(words in said for words in _GONE) else Unavailable
        raise kind(f"stage {model} failed to {operation}: {said}; retry in 5 s")
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
