"""The non-decoupled twin `ddtree_unary`: plain inference, by gRPC and HTTP."""

from __future__ import annotations

import json
import queue
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.triton.gateway.running import wait_until
from tests.triton.oracle_server import OracleServer

pytestmark = pytest.mark.triton

MODEL = "ddtree_unary"


@pytest.fixture
def lasting_rounds(tiny_server: OracleServer) -> Iterator[None]:
    """Rounds with drafts last long enough to be met by who looks, on any machine."""
    tiny_server.set_pause(0.01)
    yield
    tiny_server.set_pause(0.0)


def inputs(kind: Any, **values: Any) -> list[Any]:
    made = []
    for name, value in values.items():
        made.append(kind(name, value.shape, np_to_triton_dtype(value.dtype)))
        made[-1].set_data_from_numpy(value)
    return made


def texts(*rows: str) -> np.ndarray[Any, Any]:
    return np.array([[row.encode()] for row in rows], dtype=np.object_)


def numbers(value: int, rows: int = 1) -> np.ndarray[Any, Any]:
    return np.full((rows, 1), value, dtype=np.int32)


ENDLESS = {"max_tokens": numbers(450), "tree_budget": numbers(1), "ignore_eos": np.array([[True]])}


def expected(server: OracleServer, prompt: str, count: int) -> tuple[list[int], bytes]:
    ids = server.reference(list(server.codec.encode(prompt)), count)
    return ids, server.codec.decode(ids).encode()


def test_one_request_has_one_response(tiny_server: OracleServer) -> None:
    ids, text = expected(tiny_server, "plain", 12)
    values = {"text_input": texts("plain"), "max_tokens": numbers(12)}
    with grpc.InferenceServerClient(tiny_server.triton.grpc_url) as client:
        result = client.infer(MODEL, inputs(grpc.InferInput, **values))
        assert result.as_numpy("text_output").tolist() == [[text]]
        assert result.as_numpy("output_ids").tolist() == [[ids]]
        assert result.as_numpy("finish_reason").tolist() == [[b"length"]]
        assert result.as_numpy("num_output_tokens").tolist() == [[12]]
    with http.InferenceServerClient(tiny_server.triton.http_url) as client:
        wanted = [http.InferRequestedOutput("text_output")]
        result = client.infer(MODEL, inputs(http.InferInput, **values), outputs=wanted)
        assert result.as_numpy("text_output").tolist() == [[text]]
        assert result.as_numpy("batch_index") is None


def test_rows_and_sequences_come_in_order(tiny_server: OracleServer) -> None:
    prompts = ("a", "longer prompt", "x")
    with grpc.InferenceServerClient(tiny_server.triton.grpc_url) as client:
        values = inputs(grpc.InferInput, text_input=texts(*prompts), max_tokens=numbers(8, 3))
        found = client.infer(MODEL, values).as_numpy("text_output").tolist()
        assert found == [[expected(tiny_server, prompt, 8)[1]] for prompt in prompts]
        values = inputs(
            grpc.InferInput,
            text_input=texts("ab"),
            max_tokens=numbers(6),
            num_return_sequences=numbers(3),
            temperature=np.array([[1.0]], dtype=np.float32),
            seed=np.array([[4]], dtype=np.uint64),
            return_log_probs=np.array([[True]]),
            num_top_log_probs=numbers(2),
        )
        result = client.infer(MODEL, values)
        assert len(set(result.as_numpy("text_output").tolist()[0])) == 3
        assert result.as_numpy("sequence_index").tolist() == [[0, 1, 2]]
        assert result.as_numpy("top_log_probs").shape == (1, 3, 6, 2)


def test_errors_are_carried_over(tiny_server: OracleServer) -> None:
    with grpc.InferenceServerClient(tiny_server.triton.grpc_url) as client:
        for values, message, status in (
            ({"max_tokens": numbers(3)}, "text_input", "INVALID_ARGUMENT"),
            ({"text_input": texts("a"), "max_tokens": numbers(-1)}, "max_tokens must be", "INVALID_ARGUMENT"),
        ):
            with pytest.raises(InferenceServerException, match=message) as refused:
                client.infer(MODEL, inputs(grpc.InferInput, **values))
            assert refused.value.status() == f"StatusCode.{status}"


@pytest.mark.usefixtures("lasting_rounds")
def test_requests_overlap(tiny_server: OracleServer) -> None:
    """One after the other they would never be together in the engine."""
    together = False

    def ask(number: int) -> bytes:
        asked = {"text_input": texts(f"{number}"), "max_tokens": numbers(200), "tree_budget": numbers(4)}
        values = inputs(grpc.InferInput, **asked)
        with grpc.InferenceServerClient(tiny_server.triton.grpc_url) as client:
            answer = client.infer(MODEL, values, client_timeout=120)
            return bytes(answer.as_numpy("text_output")[0, 0])

    with ThreadPoolExecutor(9) as pool:
        waiting = [pool.submit(ask, number) for number in range(8)]
        while not together and not all(each.done() for each in waiting):
            together = tiny_server.held().sessions >= 8  # two stages, so at least four requests
        assert [each.result() for each in waiting[:2]] == [
            expected(tiny_server, f"{n}", 200)[1] for n in (0, 1)
        ]
    assert together
    tiny_server.assert_quiet()


@pytest.mark.usefixtures("lasting_rounds")
def test_a_caller_who_leaves_stops_the_work(tiny_server: OracleServer) -> None:
    values = inputs(grpc.InferInput, text_input=texts("leave"), **ENDLESS)
    before = cancelled(tiny_server)
    told: queue.Queue[Any] = queue.Queue()

    def note(result: Any, error: Any) -> None:
        del result
        told.put(error)

    with grpc.InferenceServerClient(tiny_server.triton.grpc_url) as client:
        call = client.async_infer(MODEL, values, note)
        wait_until(lambda: tiny_server.held().sessions > 0)
        call.cancel()
        assert told.get(timeout=30).status() == "StatusCode.CANCELLED"
        wait_until(lambda: cancelled(tiny_server) > before)
    tiny_server.assert_quiet()


def cancelled(server: OracleServer) -> int:
    """Requests that ended so, by the log."""
    return server.triton.log_path.read_text(errors="replace").count('"outcome": "cancelled"')


def test_a_caller_who_leaves_stops_nobody_else_with_the_same_id(tiny_server: OracleServer) -> None:
    ids, _ = expected(tiny_server, "stays", 400)
    stays = {"text_input": texts("stays"), "max_tokens": numbers(400), "draft_mode": texts("off")}
    with grpc.InferenceServerClient(tiny_server.triton.grpc_url) as client, ThreadPoolExecutor(1) as pool:
        staying = pool.submit(client.infer, MODEL, inputs(grpc.InferInput, **stays), request_id="1")
        for _ in range(3):
            leaves = {
                "text_input": texts("leaves"),
                "max_tokens": numbers(400),
                "ignore_eos": np.array([[True]]),
            }
            with pytest.raises(InferenceServerException, match="Deadline"):
                client.infer(MODEL, inputs(grpc.InferInput, **leaves), request_id="1", client_timeout=0.1)
        result = staying.result()
    assert result.as_numpy("finish_reason").tolist() != [[b"cancelled"]]
    assert result.as_numpy("output_ids").tolist() == [[ids]]
    tiny_server.assert_quiet()


@pytest.mark.usefixtures("lasting_rounds")
def test_a_request_is_stopped_by_its_id(tiny_server: OracleServer) -> None:
    values = {"text_input": texts("stop"), **ENDLESS}
    with grpc.InferenceServerClient(tiny_server.triton.grpc_url) as client, ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.infer, MODEL, inputs(grpc.InferInput, **values), request_id="mine")
        wait_until(lambda: tiny_server.held().sessions > 0)
        client.infer(MODEL, inputs(grpc.InferInput, stop=np.array([[True]])), request_id="mine")
        assert running.result().as_numpy("finish_reason").tolist() == [[b"cancelled"]]
    tiny_server.assert_quiet()


@pytest.mark.parametrize("path", ["ddtree/generate", "ddtree/generate_stream", "ddtree_unary/generate"])
def test_log_probs_over_http_are_valid_json(tiny_server: OracleServer, path: str) -> None:
    """The small target says bytes that are no text; only who lists outputs is given them."""
    body = {"text_input": "abc", "max_tokens": 8, "return_log_probs": True, "num_top_log_probs": 3}
    url = f"http://{tiny_server.triton.http_url}/v2/models/{path}"
    with urlopen(Request(url, json.dumps(body).encode()), timeout=30) as answer:
        text = answer.read().decode("utf-8")
    assert len(json.loads(text.removeprefix("data: "))["output_log_probs"]) == 8


def test_the_twin_takes_every_input_and_gives_every_output(project_root: Path) -> None:
    def declared(model: str) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
        text = (project_root / model / "config.pbtxt").read_text()
        taken, given = text.split("output [")
        names = re.compile(r'\{ name: "(\w+)" data_type: (\w+)')
        return set(names.findall(taken)), set(names.findall(given))

    inputs_of_both, outputs = declared("model_repository/ddtree")
    twin_inputs, twin_outputs = declared("model_repository_unary/ddtree_unary")
    assert twin_inputs == inputs_of_both
    missing = {name for name, _ in outputs - twin_outputs}
    assert twin_outputs <= outputs
    assert all(name == "trace" or name.startswith("kv_cache_") for name in missing)
