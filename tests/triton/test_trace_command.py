"""`ddtree trace` and `--show-drafts` against a real server; the page is looked at in a real browser."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.chromium import Watched, open_browser
from tests.triton.oracle_server import OracleServer

pytestmark = pytest.mark.triton

# What the command makes of traces; that both topologies send the same is test_trace's matter.
one_topology = pytest.mark.parametrize("oracle_server", ["in_process"], indirect=True)
COMMAND = (sys.executable, "-c", "from ddtree_client.cli import main; main()")


def ddtree(
    server: OracleServer, *arguments: str, stdin: str = "", exit_code: int = 0
) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *arguments, "--url", server.triton.grpc_url]
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, encoding="utf-8", timeout=60, check=False
    )
    assert done.returncode == exit_code, done.stderr
    return done


def test_a_page_and_json_of_one_answer(oracle_server: OracleServer, tmp_path: Path) -> None:
    oracle_server.set_noise(0.4)
    page_file, json_file = tmp_path / "out.html", tmp_path / "out.json"
    done = ddtree(
        oracle_server, "trace", "What <b>grows</b>?", "--raw", "--max-tokens", "40", "--tree-budget", "16",
        "--html", str(page_file), "--json", str(json_file),
    )  # fmt: skip
    values = json.loads(json_file.read_text(encoding="utf-8"))
    with oracle_server.client() as client:
        plain = client.generate("What <b>grows</b>?", max_tokens=40, draft_mode="off")
    assert values["text"] == plain.text
    assert tuple(token for each in values["rounds"] for token in each["emitted"]["ids"]) == plain.token_ids
    summary = values["summary"]
    assert summary["rounds"] == len(values["rounds"]) - 1
    assert summary["accepted_tokens"] + summary["rounds"] + 1 >= len(plain.token_ids)
    assert f"{summary['rounds']} rounds" in done.stderr
    assert f"wrote {page_file}" in done.stderr

    with open_browser() as browser:
        watched = Watched(browser.new_page())
        watched.open(page_file)
        page = watched.page
        assert page.inner_text("#prompt") == "What <b>grows</b>?"
        assert page.inner_text("#round-heading") == f"Round 1 of {summary['rounds']}"
        first = values["rounds"][1]
        assert page.locator("#canvas g.accepted").count() == len(first["accepted_path"])
        assert page.locator("#canvas g.rejected").count() == 16 - len(first["accepted_path"])
        for _ in range(summary["rounds"]):
            page.keyboard.press("ArrowRight")
        assert page.inner_text("#round-heading").startswith(f"Round {summary['rounds']} of")
        assert len(page.screenshot()) > 10_000
        watched.assert_quiet(page_file)


@one_topology
def test_drafts_are_marked_and_the_text_is_the_same(oracle_server: OracleServer) -> None:
    oracle_server.set_noise(0.4)
    options = ("--max-tokens", "30", "--tree-budget", "12")
    plain = ddtree(oracle_server, "generate", "Mark the drafts", *options)
    marked = ddtree(oracle_server, "generate", "Mark the drafts", *options, "--show-drafts")
    assert "«" in marked.stdout
    assert re.sub("[«»]", "", marked.stdout) == plain.stdout
    assert "«…»: drafted and accepted" in marked.stderr
    turns = "Mark the drafts\n/quit\n"
    chat = ddtree(oracle_server, "chat", *options, "--show-drafts", stdin=turns)
    assert "«" in chat.stdout
    assert re.sub("[«»]", "", chat.stdout).rstrip("\n") == plain.stdout.rstrip("\n")


@one_topology
@pytest.mark.parametrize("no_color", ["", "1"], ids=["colour", "no colour"])
def test_chat_at_a_terminal_shows_marks_and_numbers(oracle_server: OracleServer, no_color: str) -> None:
    oracle_server.set_noise(0.0)
    terminal, inside = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": no_color, "PYTHONIOENCODING": "utf-8"}
    arguments = ("chat", "--max-tokens", "24", "--tree-budget", "12", "--show-drafts")
    with subprocess.Popen(
        [*COMMAND, *arguments, "--url", oracle_server.triton.grpc_url],
        stdin=inside, stdout=inside, stderr=inside, env=environment, close_fds=True,
    ) as running:  # fmt: skip
        os.close(inside)
        os.write(terminal, b"Show me\n/quit\n")
        shown = b""
        while chunk := _read(terminal):
            shown += chunk
        assert running.wait(timeout=30) == 0
    os.close(terminal)
    assert b"\x1b[4m" in shown  # underlined: drafted and accepted
    assert (b"\x1b[32m\x1b[4m" in shown) == (not no_color)
    assert (b"\x1b[33m" in shown) == (not no_color)
    assert "tokens/s · first after".encode() in shown
    assert b"acceptance length" in shown


def _read(terminal: int) -> bytes:
    """What comes next; nothing once the program has ended, which Linux tells by an error."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""


@one_topology
def test_a_trace_must_go_somewhere(oracle_server: OracleServer) -> None:
    done = ddtree(oracle_server, "trace", "hi", exit_code=2)
    assert "--html FILE, --json FILE or both" in done.stderr
    for command in (("generate", "hi"), ("chat",)):
        done = ddtree(oracle_server, *command, "--json", "--show-drafts", exit_code=2)
        assert "for programs there is ddtree trace" in done.stderr


@one_topology
def test_tuning_on_a_real_server(oracle_server: OracleServer, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"one"\n{"prompt": "two"}\n{"turns": ["three"]}\n', encoding="utf-8")
    done = ddtree(
        oracle_server, "tune", "--minutes", "0.05", "--prompts", str(prompts), "--raw", "--max-tokens", "8",
        "--draft-mode", "off", "--draft-mode", "tree", "--tree-budget", "4", "--tree-budget", "99999",
        "--concurrency", "1", "--concurrency", "2", "--requests", "2", "--out", str(tmp_path / "found"),
    )  # fmt: skip
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    labels = [each["setting"] for each in found["settings"]]
    assert labels == ["off × 1", "tree 4 × 1", "off × 2", "tree 4 × 2"]
    assert all(each["tokens_per_second"] > 0 and not each["errors"] for each in found["settings"])
    assert len(found["settings"][0]["tokens_per_second_by_pass"]) == found["passes"] >= 1
    assert "tree_budget must be in" in found["refused"]["tree 99999"]
    assert any(each["is_pareto"] for each in found["settings"])
    assert {each["setting"] for each in found["recommendations"]} <= set(labels)
    assert "For both:" in done.stdout
    assert ("of the 3 passes" in done.stdout) == (found["passes"] < 3)
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
