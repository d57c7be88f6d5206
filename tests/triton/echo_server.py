"""Ways to talk to the echo model (see tests/fakes/echo_model) as existing clients talk to Triton."""

from __future__ import annotations

import http.client
import json
import queue
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.utils import np_to_triton_dtype

from ddtree.text import TextCodec
from ddtree_local.server import LocalTriton

PATIENCE_S = 60.0
FOX = "The quick brown fox 😀"


@dataclass
class EchoServer:
    """A running server and the ways tests talk to it."""

    triton: LocalTriton
    codec: TextCodec

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        with closing(self.connect()) as connection:
            connection.request("POST", f"/v2/models/ddtree/{path}", json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read().decode()

    def connect(self) -> http.client.HTTPConnection:
        host, port = self.triton.http_url.split(":")
        return http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)

    def report(self) -> dict[str, int]:
        status, body = self.post("generate", {"text_input": "report", "max_tokens": 60})
        assert status == 200, body
        report: dict[str, int] = json.loads(json.loads(body)["text_output"])
        return report

    def wait_for_cancelled(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.report().get("cancelled", 0) < count:
            assert time.monotonic() < deadline, f"the engine saw {self.report()}"
            time.sleep(0.05)


@dataclass(frozen=True)
class Prepared:
    """What a server is started with."""

    repository: Path
    target: Path

    @contextmanager
    def server(self, log: Path) -> Iterator[EchoServer]:
        env = {"DDTREE_TARGET": str(self.target), "DDTREE_DRAFT": str(self.target)}
        with LocalTriton(self.repository, env=env, log_path=log) as triton:
            yield EchoServer(triton, TextCodec.from_folder(self.target))


@dataclass
class Received:
    """One response of a stream."""

    outputs: dict[str, np.ndarray[Any, Any]]
    is_final: bool
    error: str = ""
    status: str = ""  # of the stream, for clients that ask for it


@dataclass
class Stream:
    """A gRPC stream with one request at a time, as existing clients use it."""

    client: Any
    responses: queue.Queue[Received] = field(default_factory=queue.Queue)

    def open(self, **options: Any) -> None:
        self.client.start_stream(callback=self._receive, **options)

    def _receive(self, result: Any, error: Any) -> None:
        if error is not None:
            self.responses.put(Received({}, True, str(error), str(error.status())))
            return
        response = result.get_response()
        outputs = {output.name: result.as_numpy(output.name) for output in response.outputs}
        self.responses.put(Received(outputs, response.parameters["triton_final_response"].bool_param))

    def send(self, tensors: dict[str, np.ndarray[Any, Any]], **options: Any) -> None:
        inputs = []
        for name, array in tensors.items():
            inputs.append(grpc.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
            inputs[-1].set_data_from_numpy(array)
        self.client.async_stream_infer("ddtree", inputs, **options)

    def next(self) -> Received:
        """The next response; fails when none comes."""
        return self.responses.get(timeout=PATIENCE_S)

    def ask(self, tensors: dict[str, np.ndarray[Any, Any]], **options: Any) -> list[Received]:
        """All responses up to the final one; fails when there is none."""
        self.send(tensors, **options)
        received = [self.next()]
        while not received[-1].is_final:
            received.append(self.next())
        assert self.responses.empty()
        return received


def text(*rows: str) -> np.ndarray[Any, Any]:
    return np.array([[row.encode()] for row in rows], dtype=np.object_)


def ints(*rows: int) -> np.ndarray[Any, Any]:
    return np.array([[row] for row in rows], dtype=np.int32)


def floats(*rows: float) -> np.ndarray[Any, Any]:
    return np.array([[row] for row in rows], dtype=np.float32)


def flags(*rows: bool) -> np.ndarray[Any, Any]:
    return np.array([[row] for row in rows])


def one(received: Received, name: str) -> float:
    """The only number of an output."""
    return float(received.outputs[name].item())


def joined(received: list[Received]) -> str:
    return b"".join(
        part for response in received for part in response.outputs["text_output"].tolist()
    ).decode()


EXISTING_CLIENTS = {
    # TensorRT-LLM's end_to_end_grpc_client: text, every optional tensor at its neutral value.
    "end to end": {
        "text_input": text(FOX), "max_tokens": ints(100), "bad_words": text(""), "stop_words": text(""),
        "stream": flags(True), "beam_width": ints(1), "temperature": floats(1.0), "top_k": ints(1),
        "top_p": floats(0.0), "repetition_penalty": floats(1.0), "length_penalty": floats(1.0),
        "return_log_probs": flags(False), "return_context_logits": flags(False), "end_id": ints(1),
        "return_generation_logits": flags(False), "random_seed": np.array([[0]], np.uint64),
        "pad_id": ints(1), "num_return_sequences": ints(1), "use_draft_logits": flags(False),
    },
    # LlamaIndex's NvidiaTriton.
    "llama index": {
        "text_input": text(FOX), "max_tokens": ints(100), "temperature": floats(1.0), "top_k": ints(1),
        "top_p": floats(0.0), "beam_width": ints(1), "repetition_penalty": floats(1.0),
        "length_penalty": floats(1.0), "random_seed": np.array([[0]], np.uint64), "stream": flags(True),
    },
    # Triton's OpenAI front end.
    "openai": {
        "text_input": text(FOX), "stream": flags(True), "max_tokens": ints(100), "temperature": floats(0.0),
        "top_p": floats(1.0), "frequency_penalty": floats(0.0), "presence_penalty": floats(0.0),
        "seed": np.array([[3]], np.uint64), "exclude_input_in_output": flags(True),
        "return_num_input_tokens": flags(True), "return_num_output_tokens": flags(True),
    },
}  # fmt: skip
