"""The synchronous client against a real tritonserver whose model follows a script."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddtree_client import (
    Client,
    DDTreeClientError,
    DeadlineExceededError,
    IncompleteAnswerError,
    InternalServerError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestCancelledError,
    ServerUnavailableError,
    Stream,
)
from tests.triton.client.contract_server import LONG, NEVER, endings, one_cancelled, script

pytestmark = pytest.mark.triton


# --- streaming


def test_chunks_arrive_one_by_one_and_join_to_the_answer(client: Client, tmp_path: Path) -> None:
    gate = tmp_path / "the first was read"
    stream = client.stream(script("Grü", "ße, ", "世界 ✓ 🌳", until=str(gate), until_at=1))
    chunks = []
    for chunk in stream:
        chunks.append(chunk)
        gate.touch()
    assert [chunk.text for chunk in chunks] == ["Grü", "ße, ", "世界 ✓ 🌳"]
    assert [chunk.final for chunk in chunks] == [False, False, True]
    assert 0 < chunks[0].elapsed_s < chunks[2].elapsed_s
    result = stream.result
    assert result.text == "Grüße, 世界 ✓ 🌳"
    assert result.token_ids == tuple(ord(letter) for letter in result.text)
    assert result.finish_reason == "stop"
    assert (result.stats.input_tokens, result.stats.output_tokens, result.stats.rounds) == (7, 13, 2)
    assert (result.stats.draft_tokens, result.stats.accepted_draft_tokens) == (20, 8)
    assert result.stats.acceptance_length == (13 - 1) / 2


def test_the_stream_ends_when_the_final_flag_comes_without_data(client: Client) -> None:
    assert client.generate(script("a", "b", empty_final=True)).text == "ab"


def test_every_option_arrives_under_its_name(client: Client) -> None:
    answer = client.generate(
        messages=[{"role": "user", "content": '"echo"'}],
        max_tokens=5, stop=["a", "ß"], bad_words="bad", draft_mode="chain", tree_budget=16, temperature=0.5,
        top_p=0.25, top_k=3, min_p=0.125, seed=2**64 - 1, repetition_penalty=1.5, presence_penalty=0.5,
        frequency_penalty=-0.5, logit_bias={7: -1.5}, min_tokens=2, ignore_eos=True,
    )  # fmt: skip
    assert json.loads(answer.text) == {
        "messages": ['[{"role": "user", "content": "\\"echo\\""}]'],
        "max_tokens": [5],
        "stop_words": ["a", "ß"],
        "bad_words": ["bad"],
        "draft_mode": ["chain"],
        "tree_budget": [16],
        "temperature": [0.5],
        "top_p": [0.25],
        "top_k": [3],
        "min_p": [0.125],
        "seed": [2**64 - 1],
        "repetition_penalty": [1.5],
        "presence_penalty": [0.5],
        "frequency_penalty": [-0.5],
        "logit_bias": ['{"7": -1.5}'],
        "min_tokens": [2],
        "ignore_eos": [True],
        "stream": [True],
        "exclude_input_in_output": [True],
        "return_num_input_tokens": [True],
        "return_num_output_tokens": [True],
    }


def test_token_ids_are_a_prompt(client: Client) -> None:
    assert client.generate(input_ids=[5, 0, 7]).text == "[5, 0, 7]"


def test_rows_of_one_request_are_told_apart(client: Client) -> None:
    rows = [script("a", "b"), script("é", "ü", "ñandú"), '"echo"']
    results = client.generate_many(rows, stop=["p", "q"])
    assert [result.text for result in results[:2]] == ["ab", "éüñandú"]
    assert json.loads(results[2].text)["stop_words"] == ["p", "q"]
    assert [result.stats.rounds for result in results] == [1, 2, 0]
    conversations = [[{"role": "user", "content": row}] for row in rows[:2]]
    assert [each.text for each in client.generate_many(messages=conversations)] == ["ab", "éüñandú"]


def test_eight_threads_stream_at_the_same_time(client: Client) -> None:
    everybody_streams = threading.Barrier(8)

    def read(number: int) -> str:
        texts: list[str] = []
        for chunk in client.stream(script(*f"thread {number}", delay_s=0.02)):
            if not texts:
                everybody_streams.wait(timeout=60)
            texts.append(chunk.text)
        return "".join(texts)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(8))) == [f"thread {number}" for number in range(8)]


# --- cancelling and deadlines


def test_break_cancels_on_the_server(client: Client) -> None:
    stream = client.stream(LONG)
    with one_cancelled(client):  # while the stream is still held: it is the break that cancels
        for chunk in stream:
            assert chunk.text == "x"
            break
    with pytest.raises(IncompleteAnswerError, match="not complete"):
        _ = stream.result


def test_break_at_the_last_chunk_keeps_the_answer(client: Client) -> None:
    before = endings(client)
    stream = client.stream(script("a", "b"))
    for chunk in stream:
        if chunk.final:
            break
    assert stream.result.text == "ab"
    # The script, and the question before it.
    assert endings(client) == {
        **before, "begun": before["begun"] + 1, "finished": before["finished"] + 2,
    }  # fmt: skip


def test_an_exception_in_the_loop_cancels_on_the_server(client: Client) -> None:
    stream = client.stream(LONG)

    def read() -> None:
        for _ in stream:
            raise LookupError

    with one_cancelled(client), pytest.raises(LookupError):
        read()


def test_leaving_the_with_block_cancels_on_the_server(client: Client) -> None:
    with one_cancelled(client) as server, client.stream(LONG):
        server.wait_for("begun")


def test_a_dropped_stream_is_cancelled_on_the_server(client: Client) -> None:
    with one_cancelled(client) as server:
        stream = client.stream(LONG)
        server.wait_for("begun")
        del stream
        gc.collect()


def read_while(stream: Stream, act: Callable[[], None]) -> list[str]:
    """The texts of a stream; another thread acts once there is one."""
    has_begun, texts = threading.Event(), list[str]()

    def wait_and_act() -> None:
        assert has_begun.wait(30)
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    try:
        for chunk in stream:
            texts.append(chunk.text)
            has_begun.set()
    finally:
        thread.join()
    return texts


def test_cancel_from_another_thread_ends_the_loop_quietly(client: Client) -> None:
    with one_cancelled(client):
        stream = client.stream(LONG)
        texts = read_while(stream, stream.cancel)
    assert 0 < len(texts) < 400


def test_closing_the_client_cancels_what_others_read(client: Client, address: str) -> None:
    with one_cancelled(client):
        other = Client(address)
        with pytest.raises(RequestCancelledError):
            read_while(other.stream(LONG), other.close)


def test_cancel_after_the_end_changes_nothing(client: Client) -> None:
    stream = client.stream(script("a", "b"))
    assert len(list(stream)) == 2
    stream.cancel()
    assert stream.result.text == "ab"


def test_a_missed_deadline_is_an_error_and_stops_the_server(client: Client) -> None:
    started = time.monotonic()
    with one_cancelled(client), pytest.raises(DeadlineExceededError, match=r"within 0\.8 s"):
        client.generate(NEVER, deadline_s=0.8)
    assert time.monotonic() - started < 20.0


def test_the_clients_timeout_is_the_deadline_of_its_requests(client: Client, address: str) -> None:
    with one_cancelled(client), Client(address, timeout_s=0.75) as hasty:  # noqa: SIM117 - two different contexts
        with pytest.raises(DeadlineExceededError, match=r"within 0\.75 s"):
            hasty.generate(NEVER)


# --- errors


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("INVALID_ARGUMENT: max_tokens must be at least 1, got 0; leave it out for 16", InvalidRequestError),
        ("RESOURCE_EXHAUSTED: no free pages", OverloadedError),
        ("UNAVAILABLE: the stage drafter does not answer", ServerUnavailableError),
        ("DEADLINE_EXCEEDED: 3 s are over", DeadlineExceededError),
        ("CANCELLED: stop was asked for", RequestCancelledError),
        ("something unheard of", InternalServerError),
    ],
)
@pytest.mark.parametrize("at", [0, 1])
def test_error_text_becomes_an_exception(client: Client, text: str, kind: type, at: int) -> None:
    with pytest.raises(DDTreeClientError) as caught:
        client.generate(script("a", "b", error=text, error_at=at))
    assert type(caught.value) is kind
    assert caught.value.message == text.removeprefix(f"{caught.value.code}: ")


def test_an_answer_without_an_end_is_an_error(client: Client) -> None:
    with pytest.raises(IncompleteAnswerError, match="closed"):
        client.generate(script("a", "b", truncated=True))


def test_tritons_own_refusals_are_recognised(client: Client, address: str) -> None:
    with pytest.raises(InvalidRequestError, match="batch-size must be <= 8"):
        client.generate_many(['"echo"'] * 9)
    with Client(address, model="nothing") as other, pytest.raises(NotFoundError, match="'nothing'"):
        other.generate("x")


def test_health_names_server_and_models(client: Client) -> None:
    state = client.health()
    assert (state.live, state.ready, state.server_version) == (True, True, "2.51.0")
    assert [(model.name, model.ready) for model in state.models] == [("ddtree", True)]
    assert state.stages == {}
