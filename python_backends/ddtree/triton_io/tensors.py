"""Triton's request and response objects to arrays and back. Knows no names and no meaning of tensors."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import numpy as np
import triton_python_backend_utils as pb_utils

from ddtree.errors import DDTreeError

_LOG = logging.getLogger(__name__)
_POLL_S: Final = 0.05
# Triton has no code for a full service; the message begins with the exact word anyway.
_CODES: Final = {
    "INVALID_ARGUMENT": "INVALID_ARG",
    "RESOURCE_EXHAUSTED": "UNAVAILABLE",
    "UNAVAILABLE": "UNAVAILABLE",
    "CANCELLED": "CANCELLED",
}


def read_inputs(request: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Give the inputs that the caller sent; the arrays are views that die with the request."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


class ResponseChannel:
    """A request's response sender, which sends the final flag exactly once, whatever Triton says to it."""

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self._is_closed = False
        self._is_cancelled = False
        self._polled_at = 0.0

    def send(self, outputs: Mapping[str, np.ndarray[Any, Any]], *, is_final: bool) -> None:
        """Send one response; raises what Triton raises for an array that is no tensor, and sends nothing."""
        tensors = [pb_utils.Tensor(name, array) for name, array in outputs.items()]
        self._send(pb_utils.InferenceResponse(tensors), is_final=is_final)

    def fail(self, error: DDTreeError) -> None:
        """Send an error as the last response."""
        # The stub fills its module only after a model was imported, so names are looked up late.
        code = getattr(pb_utils.TritonError, _CODES.get(error.code, "INTERNAL"))
        self._send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code)), is_final=True)

    def close(self) -> None:
        """Send the final flag alone if nothing else carried it."""
        self._send(None, is_final=True)

    def is_cancelled(self) -> bool:
        """Tell whether the caller went away, as of the last 50 ms."""
        # Every row asks in every round, and the server takes some 50 µs to answer.
        now = time.monotonic()
        if not self._is_cancelled and now - self._polled_at >= _POLL_S:
            self._polled_at = now
            self._is_cancelled = bool(self._sender.is_cancelled())
        return self._is_cancelled

    def _send(self, response: Any, *, is_final: bool) -> None:
        if self._is_closed:
            return
        self._is_closed = is_final
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_final else 0
        try:
            if response is None:
                self._sender.send(flags=flags)
            else:
                self._sender.send(response, flags)
        except Exception:  # noqa: BLE001 - whatever Triton raises, the others' answers go on
            _LOG.exception("a response could not be sent")
            if is_final and response is not None:
                # A request without its final flag stays in flight for ever and holds up the server's end.
                with suppress(Exception):
                    self._sender.send(flags=flags)
