"""The demo pair in float32 through the stage models of a real server: every answer is transformers' own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ddtree.text import TextCodec
from ddtree_client import Client, Result
from ddtree_local.server import LocalTriton

pytestmark = [pytest.mark.triton, pytest.mark.demo, pytest.mark.timeout(600)]

MAX_TOKENS = 40
AT_ONCE = 4
BUDGETS = (8, 1, 16, 4, -1, 6, 32, 12, 2, 64)  # -1: the server chooses
QUESTIONS = (
    "What is a tree in computer science?",
    "Write a haiku about the sea.",
    "List five fruits and their colours.",
    "Explain photosynthesis to a child.",
    "def fibonacci(n):",
    "Translate to French: good morning, my friend.",
    "What is 17 times 23? Show the steps.",
    "Name the planets of the solar system in order.",
    "Why is the sky blue?",
    "Write a short story about a lost dog.",
    "Give me a recipe for pancakes.",
    "What does the word 'serendipity' mean?",
    "Count from one to twenty.",
    "Who wrote Romeo and Juliet?",
    "Write an email that asks for a day off.",
    "Repeat after me: the cat sat on the mat. The cat sat on the mat.",
    "Wie heißt die Hauptstadt von Österreich? 🇦🇹",
    "Write a Python function that reverses a string.",
    "What are the primary colours?",
    "Complete the rhyme: roses are red,",
)


@dataclass(frozen=True)
class Ask:
    """One question and how it is drafted."""

    question: str
    mode: str
    budget: int


ASKS = tuple(
    Ask(question, "off" if n in (5, 13) else "chain" if n in (8, 16) else "tree", BUDGETS[n % len(BUDGETS)])
    for n, question in enumerate(QUESTIONS)
)


class Reference:
    """transformers.generate in float32: all prompts at once, padded; alone where that gives other tokens."""

    def __init__(self, folder: Path, codec: TextCodec) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._end = min(codec.stop_ids)
        self._prompts = [codec.render_messages([{"role": "user", "content": ask.question}]) for ask in ASKS]
        width = max(len(prompt) for prompt in self._prompts)
        padded = [[self._end] * (width - len(prompt)) + prompt for prompt in self._prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in self._prompts]
        self._together = self._generate(padded, mask)

    def alone(self, index: int) -> list[int]:
        """What the model says to one prompt."""
        prompt = self._prompts[index]
        return self._generate([prompt], [[1] * len(prompt)])[0]

    def agrees(self, index: int, ids: list[int]) -> bool:
        """Whether the ids are what `generate` gives; padding's last bits may tip a close choice."""
        return ids == self._together[index] or ids == self.alone(index)

    def _generate(self, ids: list[list[int]], mask: list[list[int]]) -> list[list[int]]:
        output = self._model.generate(
            torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            pad_token_id=self._end,
        )
        answers = output[:, len(ids[0]) :].tolist()
        return [
            answer[: answer.index(self._end) + 1] if self._end in answer else answer for answer in answers
        ]


@pytest.fixture(scope="module")
def codec(demo_target: Path) -> TextCodec:
    return TextCodec.from_folder(demo_target)


@pytest.fixture(scope="module")
def reference(demo_target: Path, codec: TextCodec) -> Reference:
    """Before the server starts: they would take each other's cores."""
    # A second thread waits more than it works where the cores are shared.
    torch.set_num_threads(1)
    return Reference(demo_target, codec)


@pytest.fixture(scope="module")
def address(reference: Reference, demo_target: Path, demo_draft: Path, project_root: Path) -> Iterator[str]:
    del reference
    env = {
        "DDTREE_TARGET": str(demo_target),
        "DDTREE_DRAFT": str(demo_draft),
        "DDTREE_DTYPE": "float32",
        "DDTREE_THREADS": "1",  # as above: half the time when others work, too
    }
    with LocalTriton(project_root / "model_repository", env=env) as server:
        yield server.grpc_url
        report = server.stop()
    assert (report.exit_code, report.forced, report.orphans_killed) == (0, False, 0)


def test_twenty_answers_streamed_four_at_a_time(address: str, codec: TextCodec, reference: Reference) -> None:
    def read(ask: Ask) -> tuple[str, Result]:
        with Client(address, timeout_s=300.0) as client:
            stream = client.stream(
                messages=[{"role": "user", "content": ask.question}],
                max_tokens=MAX_TOKENS,
                draft_mode=ask.mode,
                tree_budget=None if ask.mode == "chain" else ask.budget,
            )
            text = "".join(chunk.text for chunk in stream)
            return text, stream.result

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(read, ASKS))
    wrong = [
        f"{ASKS[index]}: {result.text!r}"
        for index, (_, result) in enumerate(answers)
        if not reference.agrees(index, list(result.token_ids))
    ]
    assert not wrong, "\n".join(wrong)
    for ask, (text, result) in zip(ASKS, answers, strict=True):
        assert text == codec.decode(result.token_ids)
        assert (result.stats.draft_tokens == 0) == (ask.mode == "off")
        assert result.stats.accepted_draft_tokens <= result.stats.draft_tokens
    accepted = sum(result.stats.accepted_draft_tokens for _, result in answers)
    assert accepted > 100, "a trained drafter must be right now and then"
    # The last answer is out before both stages were told that its sequence has ended.
    deadline = time.monotonic() + 10
    while (held := usage_of(address)) != [(0, 0), (0, 0)] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert held == [(0, 0), (0, 0)]


def usage_of(address: str) -> list[tuple[int, int]]:
    """Sessions and pages that each stage holds."""
    with Client(address) as client:
        usages = [stage["usage"] for stage in client.health().stages.values() if "usage" in stage]
    return [(usage["sessions"], usage["pages_used"]) for usage in usages]
