"""A model that keeps the client's contract and says what time it is: a token every few milliseconds.

The prompt is the interval in milliseconds. Each chunk is one token whose text is the monotonic clock when it
was sent, in nanoseconds, which every process of the machine shares.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Tells the time."""

    async def execute(self, requests: list[Any]) -> None:
        """Answer all requests, each at its own pace."""
        await asyncio.gather(*(self._answer(request) for request in requests))

    async def _answer(self, request: Any) -> None:
        sender = request.get_response_sender()
        inputs = {tensor.name(): tensor.as_numpy().reshape(-1)[0] for tensor in request.inputs()}
        count, interval_s = int(inputs["max_tokens"]), float(inputs["text_input"]) / 1000
        begin = time.monotonic()
        for index in range(count):
            # By the clock and not by the time since the last one, so that the pace holds.
            await asyncio.sleep(max(0.0, begin + index * interval_s - time.monotonic()))
            is_last = index == count - 1
            outputs = [
                pb_utils.Tensor("finish_reason", np.array([b"length" if is_last else b""], dtype=np.object_)),
                pb_utils.Tensor("output_ids", np.array([[[7]]], dtype=np.int32)),
                pb_utils.Tensor(
                    "text_output", np.array([f"{time.monotonic_ns()} ".encode()], dtype=np.object_)
                ),
            ]
            sender.send(pb_utils.InferenceResponse(outputs), flags=FINAL if is_last else 0)
