"""The model `ddtree_unary` as Triton sees it: `ddtree` for tools that know one request and one response.

A request goes on to `ddtree` as it is, never streaming, and its sequences come back as one response. Loads
nothing: no weights, no tokenizer. Knows no meaning of a request's values but of those that stream and stop.
"""

from __future__ import annotations

import json
import logging
import math
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning
from typing import Any, Final

import numpy as np
import triton_python_backend_utils as pb_utils

from ddtree import logs
from ddtree.errors import Cancelled, DDTreeError, InvalidArgument, ResourceExhausted, Unavailable
from ddtree.triton_io.gather import gather
from ddtree.triton_io.tensors import ResponseChannel, read_inputs

_LOG = logging.getLogger(__name__)
_MODEL: Final = "ddtree"
_AT_ONCE: Final = 64  # requests under way, each with a thread that waits and one that reads
_POLL_S: Final = 0.1  # how soon a caller's departure is noticed
_BYTES: Final = frozenset({"output_token_bytes", "top_log_prob_bytes"})
_STREAMING: Final = frozenset({"stream", "streaming"})
_PLACE: Final = ("batch_index", "sequence_index")
_ERRORS: Final = {kind.code: kind for kind in (InvalidArgument, ResourceExhausted, Unavailable, Cancelled)}

Arrays = Mapping[str, np.ndarray[Any, Any]]


class TritonPythonModel:
    """Triton's interface."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Prepare the threads."""
        logs.configure(args["model_name"])
        self._declared = [output["name"] for output in json.loads(args["model_config"])["output"]]
        self._waiting = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ddtree-unary")
        self._reading = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ddtree-unary-read")
        self._under_way: list[_Relay] = []

    def execute(self, requests: Sequence[Any]) -> None:
        """Begin to answer and return, so that Triton hands over the next request."""
        for request in requests:
            # Copied here, as the tensors' memory is Triton's. The configuration may have made [rows] of
            # [rows, 1]; as an input it must be the latter again.
            tensors = read_inputs(request).items()
            inputs = {
                name: array.copy().reshape(len(array), math.prod(array.shape[1:])) for name, array in tensors
            }
            wanted = set(request.requested_output_names()) or set(self._declared)
            if wanted == set(self._declared):  # who lists nothing may want JSON, which holds no bytes
                wanted -= _BYTES
            relay = _Relay(request.request_id() or uuid.uuid4().hex, inputs, wanted, request.timeout())
            self._waiting.submit(self._answer, relay, ResponseChannel(request))

    def finalize(self) -> None:
        """End the threads; no request is left."""
        self._waiting.shutdown()
        self._reading.shutdown()

    def _answer(self, relay: _Relay, channel: ResponseChannel) -> None:
        self._under_way.append(relay)
        try:
            if relay.stops:
                for other in list(self._under_way):
                    if other.request_id == relay.request_id and not other.stops:
                        other.stop()
            outputs = relay.wait(self._reading.submit(relay.read), channel)
            channel.send(outputs, is_final=True)
        except DDTreeError as error:
            channel.fail(error)
        except Exception:  # noqa: BLE001 - a caller must get an answer
            _LOG.exception("a request failed", extra={"request_id": relay.request_id})
            channel.fail(DDTreeError("the server failed on this request; its log says why"))
        finally:
            self._under_way.remove(relay)
            channel.close()


class _Relay:
    """One request on its way to `ddtree` and back."""

    def __init__(self, request_id: str, inputs: Arrays, wanted: Collection[str], timeout_us: int) -> None:
        self.request_id = request_id
        self.stops = "stop" in inputs and bool(inputs["stop"].any())
        # Callers may choose the same id, and who leaves must stop nobody else.
        self._own_id = request_id if self.stops else f"{request_id}-{uuid.uuid4().hex}"
        self._inputs = {name: array for name, array in inputs.items() if name not in _STREAMING}
        self._wanted = wanted
        self._timeout_us = timeout_us

    def read(self) -> dict[str, np.ndarray[Any, Any]]:
        """Send it and gather the answer; blocks.

        Raises:
            DDTreeError: `ddtree` refused it or failed.
        """
        responses = list(self._call(self._inputs, (*_PLACE, *self._wanted)))
        if not responses:
            raise DDTreeError("the model ddtree ended this request without an answer")
        gathered = gather(responses)
        return {name: array for name, array in gathered.items() if name in self._wanted}

    def wait(
        self, reading: Future[dict[str, np.ndarray[Any, Any]]], channel: ResponseChannel
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Wait for `read` while the caller does.

        Raises:
            DDTreeError: what `read` raised, or Cancelled when the caller left.
        """
        while True:
            try:
                return reading.result(timeout=_POLL_S)
            except StillRunning:
                if not channel.is_cancelled():
                    continue
            # A call between models cannot be cancelled before 25.04, but a request can be stopped by its id.
            self.stop()
            reading.result()
            raise Cancelled("the caller left")

    def stop(self) -> None:
        """End it at `ddtree`; `read` then gives the answer so far."""
        for _ in self._call({"stop": np.array([[True]])}, ("finish_reason",)):
            pass

    def _call(self, inputs: Arrays, wanted: Collection[str]) -> Iterator[Arrays]:
        request = pb_utils.InferenceRequest(
            model_name=_MODEL,
            request_id=self._own_id,
            requested_output_names=list(dict.fromkeys(wanted)),
            inputs=[pb_utils.Tensor(name, array) for name, array in inputs.items()],
            timeout=self._timeout_us,
        )
        for response in request.exec(decoupled=True):
            if response.has_error():
                raise _as_error(response.error().message())
            tensors = response.output_tensors()
            if tensors:  # the end may come without any
                yield {tensor.name(): tensor.as_numpy() for tensor in tensors}


def _as_error(text: str) -> DDTreeError:
    """The error behind a text that begins with its status: calls between models lose codes before 25.04."""
    code, _, message = text.partition(": ")
    kind = _ERRORS.get(code)
    return kind(message) if kind is not None else DDTreeError(text.removeprefix("INTERNAL: "))
