"""What traced rounds add up to, and how a terminal marks whose each token is."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
from click import unstyle

from ddtree_client.cli_drafts import LEGENDS, DraftPainter, Look, look_of_stdout
from ddtree_client.cli_trace import summary_line
from ddtree_client.rounds import pieces, summarise
from ddtree_client.types import Chunk, TracedRound
from tests.fakes.traced_rounds import traced_answer


def told(texts: list[str], accepted: int, drafting: str = "drafted") -> TracedRound:
    """A round whose tree is one line, of which so much was accepted."""
    nodes: dict[str, list[Any]] = {
        "ids": [1, 2, 3], "texts": ["a", "b", "c"], "parents": [0, 1, 2], "depths": [1, 2, 3],
        "path_probabilities": [0.9, 0.6, 0.1],
    }  # fmt: skip
    return {
        "round": 1, "drafting": drafting, "nodes": nodes, "nodes_verified": 3, "sequences": 2,
        "accepted_path": list(range(1, accepted + 1)), "emitted": {"ids": [7] * len(texts), "texts": texts},
        "stage_ms": {"draft": 1.0, "verify": 3.0},
    }  # fmt: skip


PREFILL: TracedRound = {"round": 0, "drafting": "prefill", "emitted": {"ids": [7], "texts": ["I"]}}


def chunk(text: str, *rounds: TracedRound) -> Chunk:
    return Chunk(text, (), row=0, final=False, finish_reason="", elapsed_s=0.0, trace=rounds)


def test_the_last_token_of_a_round_is_the_targets_own() -> None:
    assert [each.origin for each in pieces(told(["a", "b", "x"], accepted=2))] == [
        "accepted", "accepted", "bonus",
    ]  # fmt: skip
    assert [each.origin for each in pieces(told(["x"], accepted=0))] == ["bonus"]
    # A stop inside the path: the bonus token was never emitted.
    assert [each.origin for each in pieces(told(["a"], accepted=2))] == ["accepted"]
    assert [each.origin for each in pieces(PREFILL)] == ["prefill"]


def test_the_sum_of_rounds() -> None:
    found = summarise([PREFILL, told(["a", "b", "x"], 2), told(["x"], 0), told(["a"], 2, "empty_tree")])
    assert (found.rounds, found.emitted_tokens, found.accepted_tokens, found.verified_nodes) == (3, 5, 3, 9)
    assert found.acceptance_length == pytest.approx(5 / 3)
    assert [(each.depth, each.rounds, each.accepted) for each in found.by_depth] == [
        (1, 3, 2), (2, 3, 2), (3, 3, 0),
    ]  # fmt: skip
    assert [each.expected for each in found.by_depth] == pytest.approx([2.7, 1.8, 0.3])
    assert found.tokens_per_round == {1: 2, 3: 1}
    assert found.stage_ms == {"draft": 3.0, "build_tree": 0.0, "verify": 9.0, "commit": 0.0}
    assert found.drafting == {"drafted": 2, "empty_tree": 1}
    assert found.most_sequences == 2
    assert summary_line(found) == (
        "accepted at depth 1, 2, …: 67% 67% 0% · draft 25% build_tree 0% verify 75% commit 0% · "
        "1 round without a tree (empty_tree)"
    )


def test_no_rounds_have_no_numbers() -> None:
    found = summarise([PREFILL])
    assert (found.rounds, found.acceptance_length, found.by_depth) == (0, None, ())
    assert summary_line(found) == ""


@pytest.mark.parametrize(
    ("look", "expected"),
    [
        ("brackets", "I« see the» sky"),
        ("underline", "I\x1b[0m\x1b[4m see the\x1b[0m sky\x1b[0m"),
        ("colour", "\x1b[33mI\x1b[0m\x1b[32m\x1b[4m see the\x1b[0m\x1b[33m sky\x1b[0m"),
    ],
)
def test_marks(look: Look, expected: str) -> None:
    painter = DraftPainter(look)
    shown = painter.paint(chunk("I", PREFILL)) + painter.paint(
        chunk(" see the sky", told([" see", " the", " sky"], accepted=2))
    )
    assert shown == expected
    assert unstyle(shown).translate({ord("«"): None, ord("»"): None}) == "I see the sky"


def test_text_that_was_held_back_keeps_its_marks() -> None:
    painter = DraftPainter("brackets")
    first = painter.paint(chunk("a", told(["ab", "cd"], accepted=1)))
    assert first + painter.paint(chunk("bcd!", told(["!"], accepted=0))) == "«a»«b»cd!"


def test_marks_never_change_an_answer() -> None:
    result = traced_answer(30, seed=3)
    painter = DraftPainter("brackets")
    shown = "".join(painter.paint(chunk("".join(each["emitted"]["texts"]), each)) for each in result.trace)
    assert re.sub("[«»]", "", shown) == result.text
    marked = sum(len(run) for run in re.findall("«([^»]*)»", shown))
    accepted = [piece.text for each in result.trace for piece in pieces(each) if piece.origin == "accepted"]
    assert marked == len("".join(accepted))


def test_what_a_terminal_may_show(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look_of_stdout() == "brackets"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert look_of_stdout() == "colour"
    monkeypatch.setenv("NO_COLOR", "1")
    assert look_of_stdout() == "underline"
    monkeypatch.setenv("TERM", "dumb")
    assert look_of_stdout() == "brackets"
    assert set(LEGENDS) == {"brackets", "colour", "underline"}
