"""The client and its command against a real tritonserver whose model follows a script (see tests/fakes)."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ddtree_client import (
    AsyncClient,
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
)
from ddtree_local.server import LocalTriton

pytestmark = pytest.mark.triton

CONTRACT_MODEL = Path(__file__).parents[1] / "fakes" / "contract_model"
COMMAND = [sys.executable, "-c", "from ddtree_client.cli import main; main()"]


def script(*chunks: str, **more: Any) -> str:
    return json.dumps({"chunks": chunks, **more})


LONG = script(*["x"] * 400, delay_s=0.02)
SLOW = script(*["✓✓✓"] * 8, delay_s=0.3)  # json.dumps escapes the marks: a terminal's echo of it has none


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    repository = tmp_path_factory.mktemp("models")
    shutil.copytree(CONTRACT_MODEL, repository / "ddtree", ignore=shutil.ignore_patterns("__pycache__"))
    with LocalTriton(repository, exit_timeout_s=10.0) as server:
        yield server.grpc_url
        # A request that the server still counts as running holds its shutdown up to the exit timeout.
        ended = server.stop()
        assert (ended.exit_code, ended.forced) == (0, False)


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address, timeout_s=30.0) as opened:
        yield opened


def endings(client: Client) -> dict[str, int]:
    """How the requests before this one ended, as the model saw it."""
    counts: dict[str, int] = json.loads(client.generate('"report"').text)
    return counts


@pytest.fixture
def one_is_cancelled(client: Client) -> Iterator[None]:
    """Afterwards the server has seen exactly one request of the test cancelled, and none fail."""
    before = endings(client)
    yield
    deadline = time.monotonic() + 5.0
    while (now := endings(client))["cancelled"] == before["cancelled"] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert now["cancelled"] == before["cancelled"] + 1
    assert now["failed"] == before["failed"]


def run_command(address: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        env={**os.environ, "DDTREE_URL": address},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )


# --- streaming


def test_chunks_arrive_one_by_one_and_join_to_the_answer(client: Client) -> None:
    stream = client.stream(script("Grü", "ße, ", "世界 ✓ 🌳", delay_s=0.1))
    chunks = list(stream)
    assert [chunk.text for chunk in chunks] == ["Grü", "ße, ", "世界 ✓ 🌳"]
    assert [chunk.final for chunk in chunks] == [False, False, True]
    assert chunks[2].elapsed_s - chunks[0].elapsed_s > 0.15  # not all at the end
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
        texts = []
        for chunk in client.stream(script(*f"thread {number}", delay_s=0.02)):
            if not texts:
                everybody_streams.wait(timeout=20)
            texts.append(chunk.text)
        return "".join(texts)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(8))) == [f"thread {number}" for number in range(8)]


# --- cancelling and deadlines


@pytest.mark.usefixtures("one_is_cancelled")
def test_break_cancels_on_the_server(client: Client) -> None:
    stream = client.stream(LONG)  # kept alive: it is the break that cancels
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
    assert endings(client) == {**before, "finished": before["finished"] + 2}


@pytest.mark.usefixtures("one_is_cancelled")
def test_an_exception_in_the_loop_cancels_on_the_server(client: Client) -> None:
    def read() -> None:
        for _ in client.stream(LONG):
            raise LookupError

    with pytest.raises(LookupError):
        read()


@pytest.mark.usefixtures("one_is_cancelled")
def test_leaving_the_with_block_cancels_on_the_server(client: Client) -> None:
    with client.stream(LONG):
        time.sleep(0.1)


@pytest.mark.usefixtures("one_is_cancelled")
def test_a_dropped_stream_is_cancelled_on_the_server(client: Client) -> None:
    stream = client.stream(LONG)
    time.sleep(0.1)
    del stream
    gc.collect()


@pytest.mark.usefixtures("one_is_cancelled")
def test_cancel_from_another_thread_ends_the_loop_quietly(client: Client) -> None:
    stream = client.stream(LONG)
    timer = threading.Timer(0.2, stream.cancel)
    timer.start()
    texts = [chunk.text for chunk in stream]
    timer.join()
    assert 0 < len(texts) < 400


@pytest.mark.usefixtures("one_is_cancelled")
def test_closing_the_client_cancels_what_others_read(address: str) -> None:
    other = Client(address)
    stream = other.stream(LONG)
    timer = threading.Timer(0.2, other.close)
    timer.start()
    with pytest.raises(RequestCancelledError):
        list(stream)
    timer.join()


def test_cancel_after_the_end_changes_nothing(client: Client) -> None:
    stream = client.stream(script("a", "b"))
    assert len(list(stream)) == 2
    stream.cancel()
    assert stream.result.text == "ab"


@pytest.mark.usefixtures("one_is_cancelled")
def test_a_missed_deadline_is_an_error_and_stops_the_server(client: Client) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"within 0\.3 s"):
        client.generate(LONG, deadline_s=0.3)
    assert time.monotonic() - started < 3.0


@pytest.mark.usefixtures("one_is_cancelled")
def test_the_clients_timeout_is_the_deadline_of_its_requests(address: str) -> None:
    with (
        Client(address, timeout_s=0.25) as hasty,
        pytest.raises(DeadlineExceededError, match=r"within 0\.25 s"),
    ):
        hasty.generate(LONG)


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


# --- asyncio


async def test_async_streams_side_by_side(address: str) -> None:
    async with AsyncClient(address, timeout_s=30.0) as client:
        stream = client.stream(script("Grü", "ße", delay_s=0.02))
        assert [chunk.text async for chunk in stream] == ["Grü", "ße"]
        assert stream.result.text == "Grüße"
        several = client.generate_many([script("a", "b"), script("c")])
        many = (client.generate(script(*f"task {number}", delay_s=0.01)) for number in range(16))
        rows, *results = await asyncio.gather(several, *many)
        assert [row.text for row in rows] == ["ab", "c"]  # type: ignore[union-attr]
        assert [each.text for each in results] == [f"task {number}" for number in range(16)]  # type: ignore[union-attr]
        assert (await client.health()).model_ready("ddtree")


@pytest.mark.usefixtures("one_is_cancelled")
async def test_cancelling_the_task_cancels_on_the_server(address: str) -> None:
    async with AsyncClient(address) as client:
        task = asyncio.create_task(client.generate(LONG))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await client.generate(script("fine"))).text == "fine"


@pytest.mark.usefixtures("one_is_cancelled")
async def test_async_break_cancels_on_the_server(address: str) -> None:
    async with AsyncClient(address) as client:
        async with client.stream(LONG) as stream:
            async for _ in stream:
                break
        assert (await client.generate(script("fine"))).text == "fine"


@pytest.mark.usefixtures("one_is_cancelled")
async def test_async_cancel_from_another_task_ends_the_loop_quietly(address: str) -> None:
    async with AsyncClient(address) as client:
        stream = client.stream(LONG)
        asyncio.get_running_loop().call_later(0.2, stream.cancel)
        texts = [chunk.text async for chunk in stream]
        assert 0 < len(texts) < 400


@pytest.mark.usefixtures("one_is_cancelled")
async def test_a_task_cancelled_right_after_its_stream_stays_cancelled(address: str) -> None:
    async with AsyncClient(address) as client:
        stream = client.stream(LONG)

        async def read() -> None:
            async for _ in stream:
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.2)
        stream.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.usefixtures("one_is_cancelled")
async def test_async_deadline(address: str) -> None:
    async with AsyncClient(address) as client:
        with pytest.raises(DeadlineExceededError, match=r"within 0\.3 s"):
            await client.generate(LONG, deadline_s=0.3)


async def test_async_error_text_becomes_an_exception(address: str) -> None:
    async with AsyncClient(address) as client:
        with pytest.raises(OverloadedError, match="no free pages"):
            await client.generate(script("a", "b", error="RESOURCE_EXHAUSTED: no free pages", error_at=1))
        with pytest.raises(IncompleteAnswerError):
            await client.generate(script("a", truncated=True))


# --- the command


def test_generate_prints_the_answer_and_its_numbers(address: str) -> None:
    done = run_command(address, "generate", script("Grü", "ße ✓"), "--stats")
    assert (done.returncode, done.stdout) == (0, "Grüße ✓\n")
    assert "7 tokens in" in done.stderr
    assert "acceptance length 6.00" in done.stderr


def test_generate_json_is_one_object(address: str) -> None:
    done = run_command(address, "generate", "-", "--json", "--raw", "--max-tokens", "3", stdin='"echo"')
    answer = json.loads(done.stdout)
    assert json.loads(answer["text"])["text_input"] == ['"echo"']
    assert json.loads(answer["text"])["max_tokens"] == [3]
    assert answer["stats"]["output_tokens"] == len(answer["text"])
    failed = run_command(address, "generate", "--json", script("a", error="INVALID_ARGUMENT: no", error_at=0))
    assert failed.returncode == 1
    assert json.loads(failed.stdout) == {"error": {"code": "INVALID_ARGUMENT", "message": "no"}}


def test_chat_sends_the_history_and_forgets_it_on_reset(address: str) -> None:
    turns = "\n".join([script("Hi"), '"echo"', "/reset", '"echo"', "/quit", '"never"'])
    done = run_command(address, "chat", "--json", "--system", "Be brief.", stdin=turns)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line)["text"] for line in done.stdout.splitlines()]
    assert len(answers) == 3
    histories = [json.loads(json.loads(answer)["messages"][0]) for answer in answers[1:]]
    assert [message["role"] for message in histories[0]] == ["system", "user", "assistant", "user"]
    assert histories[0][2]["content"] == "Hi"
    assert [message["role"] for message in histories[1]] == ["system", "user"]


def test_bench_compares_modes(address: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    text = script("a", "bcd", "efg", delay_s=0.01)
    lines = [json.dumps(text), json.dumps({"prompt": text}), json.dumps({"turns": [text]})]
    prompts.write_text("\n".join(lines), encoding="utf-8")
    arguments = ("bench", "--prompts", str(prompts), "--requests", "5", "--concurrency", "2")
    modes = ("--draft-mode", "tree", "--draft-mode", "off", "--tree-budget", "8", "--tree-budget", "auto")
    done = run_command(address, *arguments, *modes, "--json")
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)["modes"]
    assert [each["label"] for each in reports] == ["tree 8", "tree auto", "off"]
    assert {each["output_tokens"] for each in reports} == {5 * 7}
    assert {each["acceptance_length"] for each in reports} == {3.0}
    assert all(0.002 < each["inter_token_p50_s"] < 0.1 for each in reports)  # 10 ms for three tokens
    table = run_command(address, *arguments, "--draft-mode", "off").stdout
    assert "acceptance" in table
    assert "1.00 ×" in table


def test_bench_counts_failed_requests(address: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    bad = script("a", error="RESOURCE_EXHAUSTED: full", error_at=0)
    prompts.write_text("\n".join([json.dumps(script("a")), json.dumps(bad)]), encoding="utf-8")
    done = run_command(address, "bench", "--prompts", str(prompts), "--requests", "4", "--draft-mode", "off")
    assert done.returncode == 1
    assert "off: 2 of 4 requests failed, the first with RESOURCE_EXHAUSTED: full" in done.stderr


def test_health_command(address: str) -> None:
    done = run_command(address, "health", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["ok"] is True
    missing = run_command(address, "health", "--model", "nothing")
    assert missing.returncode == 1
    assert "'nothing'" in missing.stderr


@pytest.mark.usefixtures("one_is_cancelled")
def test_ctrl_c_ends_generate_with_a_line(address: str) -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", LONG, "--url", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(2) == "xx"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors.strip()) == (130, "cancelled")


@pytest.mark.usefixtures("one_is_cancelled")
def test_ctrl_c_in_chat_ends_the_answer_not_the_program(address: str) -> None:
    terminal, inside = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "chat", "--url", address],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
    )
    os.close(inside)
    seen = ""

    def read_until(done: Callable[[str], bool]) -> str:
        nonlocal seen
        deadline = time.monotonic() + 20
        while not done(seen):
            assert select.select([terminal], [], [], max(0, deadline - time.monotonic()))[0], seen
            seen += os.read(terminal, 4096).decode("utf-8", errors="replace")
        text, seen = seen, ""
        return text

    try:
        read_until(lambda text: "you> " in text)
        os.write(terminal, SLOW.encode() + b"\n")
        read_until(lambda text: "✓✓✓" in text)
        process.send_signal(signal.SIGINT)
        read_until(lambda text: "stopped" in text and "you> " in text)
        os.write(terminal, b'"echo"\n')
        history = read_until(lambda text: "you> " in text)
        assert "assistant" in history  # what was said before Ctrl-C is part of the conversation
        os.write(terminal, b"/quit\n")
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
