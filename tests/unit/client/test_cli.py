"""The command without a server: usage, exit codes, what is shown."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from tritonclient.grpc import service_pb2

from ddtree_client import Client, Health, InvalidRequestError, ModelHealth, ServerUnavailableError, Tls
from ddtree_client.cli import cli
from ddtree_client.cli_chat import Conversation
from ddtree_client.cli_health import health_object, print_health
from ddtree_client.cli_options import result_object, stats_line
from ddtree_client.health import read_description, read_index
from ddtree_client.types import Result as Answer
from ddtree_client.types import Stats

ANSWER = Answer(
    text="Grüße",
    token_ids=(1, 0, 2),
    finish_reason="stop",
    stats=Stats(
        input_tokens=4,
        output_tokens=3,
        rounds=1,
        accepted_draft_tokens=1,
        draft_tokens=16,
        first_chunk_tokens=1,
        time_to_first_token_s=0.25,
        total_s=0.75,
    ),
)


@pytest.fixture
def nobody() -> str:
    """An address at which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


def run(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(cli, arguments, input=stdin)


@pytest.mark.parametrize(
    "arguments",
    [("generate", "hi"), ("chat",), ("bench", "--requests", "1"), ("health",)],
    ids=lambda arguments: arguments[0],
)
def test_an_unreachable_server_is_one_line_and_exit_code_1(nobody: str, arguments: tuple[str, ...]) -> None:
    done = run(*arguments, "--url", nobody, stdin="hi\n")
    assert done.exit_code == 1
    assert done.stdout == ""
    [line] = [line for line in done.stderr.splitlines() if line.startswith("ddtree: ")]
    assert line.startswith(f"ddtree: UNAVAILABLE: no Triton server answers gRPC at {nobody} ")
    assert "`make serve`" in line


@pytest.mark.parametrize("command", ["generate", "chat", "bench", "health"])
def test_json_errors_are_one_object_on_stdout(nobody: str, command: str) -> None:
    prompt = ("hi",) if command == "generate" else ()
    done = run(command, *prompt, "--json", "--url", nobody, stdin="hi\n")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["error"]["code"] == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate",), "Missing argument 'PROMPT'"),
        (("generate", "hi", "--draft-mode", "bush"), "'bush' is not one of 'tree', 'chain', 'off'"),
        (("generate", "hi", "--tree-budget", "some"), "'some' is neither a number of draft nodes nor 'auto'"),
        (("generate", "hi", "--url", "http://here:8001"), "url must be HOST:PORT"),
        (("generate", "hi", "--url", "here"), "url must be HOST:PORT"),
        (("generate", "hi", "--timeout", "0"), "'--timeout'"),
        (("bench", "--prompts", "/nowhere.jsonl"), "does not exist"),
        (("bench", "--concurrency", "0"), "'--concurrency'"),
        (("plant",), "No such command 'plant'"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""


def test_a_bad_prompts_file_is_wrong_usage(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("{}\n", encoding="utf-8")
    done = run("bench", "--prompts", str(path))
    assert done.exit_code == 2
    assert "line 1" in done.stderr


def test_a_value_that_fits_no_tensor_is_a_request_error(nobody: str) -> None:
    done = run("generate", "hi", "--seed", "-1", "--url", nobody)
    assert done.exit_code == 1
    assert done.stderr.startswith("ddtree: INVALID_ARGUMENT: seed must be")


def test_stats_line() -> None:
    assert stats_line(ANSWER) == (
        "3 tokens in 0.75 s · 4.0 tokens/s · first after 250 ms · 1 rounds · acceptance length 2.00 · "
        "ended by stop"
    )


def test_result_for_programs() -> None:
    values = json.loads(json.dumps(result_object(ANSWER)))
    assert (values["text"], values["token_ids"], values["finish_reason"]) == ("Grüße", [1, 0, 2], "stop")
    assert values["stats"]["acceptance_length"] == 2.0
    assert values["stats"]["tokens_per_second"] == 4.0


def test_a_turn_without_an_answer_is_forgotten() -> None:
    conversation = Conversation(system="Be brief.")
    conversation.keep("lost", "")
    conversation.keep("hi", "hello")
    roles = [message["role"] for message in conversation.messages("more")]
    assert roles == ["system", "user", "assistant", "user"]
    conversation.reset()
    assert [message["content"] for message in conversation.messages("again")] == ["Be brief.", "again"]


def health(*, ready: bool = True, reason: str = "", stages: dict[str, Any] | None = None) -> Health:
    state = "READY" if ready else "UNAVAILABLE"
    models = (ModelHealth("ddtree", "1", ready, state, reason),)
    return Health("here:8001", True, True, "2.51.0", models, stages or {})


def shown(state: Health) -> str:
    console = Console(width=100, markup=False, highlight=False)
    with console.capture() as capture:
        print_health(state, console)
    return capture.get()


def test_health_shows_models_and_what_stages_hold() -> None:
    stage = {
        "vocab_size": 49152,
        "cost_ms": [1, 2],
        "fallback": "",
        "load_ms": 54.273392001050524,
        "usage": {"sessions": 3, "pages_used": 12, "pages_total": 512},
    }
    text = shown(health(stages={"target_verifier": stage, "drafter": {"error": "no [op] input"}}))
    assert "Triton 2.51.0 at here:8001: ready" in text
    assert (
        "target_verifier: 3 sessions · 12 of 512 KV pages used · vocab_size 49152 · load_ms 54.27\n" in text
    )
    assert "drafter: error no [op] input" in text


def test_health_shows_recurrent_states_where_there_are_any() -> None:
    usage = {"sessions": 1, "pages_used": 2, "pages_total": 9, "states_used": 1, "states_total": 20}
    text = shown(health(stages={"target_verifier": {"usage": usage}}))
    assert "2 of 9 KV pages used · 1 of 20 recurrent states used\n" in text


def test_health_shows_why_a_model_is_not_ready() -> None:
    state = health(ready=False, reason="[x] checkpoint missing")
    assert "UNAVAILABLE ([x] checkpoint missing)" in shown(state)
    assert health_object(state, "ddtree")["ok"] is False
    assert health_object(health(), "ddtree")["ok"] is True
    assert health_object(health(), "other")["ok"] is False


def test_index_and_descriptions_are_read() -> None:
    index = service_pb2.RepositoryIndexResponse()
    index.models.add(name="b", version="1", state="READY")
    index.models.add(name="a", reason="unloaded")
    first, second = read_index(index)
    assert (first.name, first.ready, first.state, first.reason) == ("a", False, "NOT LOADED", "unloaded")
    assert (second.name, second.ready) == ("b", True)
    response = service_pb2.ModelInferResponse()
    response.outputs.add(name="info", datatype="BYTES", shape=[1])
    response.raw_output_contents.append(b"\x09\0\0\0" + b'{"a": 10}')
    assert read_description(response) == {"a": 10}
    assert read_description(service_pb2.ModelInferResponse()) == {}


def test_the_client_checks_its_address_and_files(tmp_path: Path, nobody: str) -> None:
    with pytest.raises(InvalidRequestError, match="HOST:PORT"):
        Client("grpc://here:8001")
    with pytest.raises(InvalidRequestError, match=r"missing\.pem"):
        Client(nobody, tls=Tls(root_certificates=tmp_path / "missing.pem"))
    with Client(nobody) as client, pytest.raises(ServerUnavailableError):
        client.generate("hi")
