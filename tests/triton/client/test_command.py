"""The command ``ddtree`` against a real tritonserver whose model follows a script."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ddtree_client import Client
from tests.triton.client.contract_server import COMMAND, LONG, SLOW, one_cancelled, run_command, script

pytestmark = pytest.mark.triton


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
    text = script("a", "bcdefghij", "k", "l", "m", delay_s=0.05)
    lines = [json.dumps(text), json.dumps({"prompt": text}), json.dumps({"turns": [text]})]
    prompts.write_text("\n".join(lines), encoding="utf-8")
    arguments = ("bench", "--prompts", str(prompts), "--requests", "5", "--concurrency", "2")
    modes = ("--draft-mode", "tree", "--draft-mode", "off", "--tree-budget", "8", "--tree-budget", "auto")
    done = run_command(address, *arguments, *modes, "--json")
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)["modes"]
    assert [each["label"] for each in reports] == ["tree 8", "tree auto", "off"]
    assert {each["output_tokens"] for each in reports} == {5 * 13}
    assert {each["acceptance_length"] for each in reports} == {3.0}
    # Nine of the twelve tokens shared 50 ms, the other three took 50 ms each.
    assert all(0.003 < each["inter_token_p50_s"] < 0.03 < each["inter_token_p95_s"] for each in reports)
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


def test_ctrl_c_ends_generate_with_a_line(client: Client, address: str) -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", LONG, "--url", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(2) == "xx"
    with one_cancelled(client):
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors.strip()) == (130, "cancelled")


def test_ctrl_c_in_chat_ends_the_answer_not_the_program(client: Client, address: str) -> None:
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
        with one_cancelled(client):
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
