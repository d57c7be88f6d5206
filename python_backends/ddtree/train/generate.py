"""Has the target answer prompts into a corpus, for a number of answer tokens or a time.

This module knows slots and the corpus; which prompts there are is the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ddtree.train.corpus import Corpus, pack
from ddtree.train.prompts import Prompt
from ddtree.train.slots import Generated, SlotGenerator

_SHARD_TOKENS = 4_000_000


@dataclass(frozen=True)
class GenerationGoal:
    """When to stop; at least one is set."""

    answer_tokens: int | None
    deadline: float | None  # of `time.monotonic`


def generate(
    generator: SlotGenerator,
    prompts: Iterator[Prompt],
    corpus: Corpus,
    goal: GenerationGoal,
    *,
    vocab_size: int,
    log: Callable[[dict[str, Any]], None],
) -> int:
    """Fill the corpus and give the number of answer tokens written.

    Answers under way when the goal is reached are kept as far as they go: their beginnings are good data.
    """
    buffer: list[Generated] = []
    started, total, held = time.monotonic(), 0, 0
    for finished in generator.run(prompts):
        buffer += finished
        new = sum(len(one.ids) - one.answer_start for one in finished)
        total, held = total + new, held + sum(len(one.ids) for one in finished)
        if held >= _SHARD_TOKENS:
            _flush(buffer, corpus, vocab_size)
            buffer, held = [], 0
            seconds = time.monotonic() - started
            log({"answer_tokens": total, "seconds": round(seconds, 1), "per_second": round(total / seconds)})
        now = time.monotonic()
        if (goal.answer_tokens is not None and total >= goal.answer_tokens) or (
            goal.deadline is not None and now >= goal.deadline
        ):
            rest = generator.unfinished()
            total += sum(len(one.ids) - one.answer_start for one in rest)
            buffer += rest
            break
    if buffer:
        _flush(buffer, corpus, vocab_size)
    seconds = time.monotonic() - started
    log({"answer_tokens": total, "seconds": round(seconds, 1), "per_second": round(total / seconds)})
    return total


def _flush(buffer: list[Generated], corpus: Corpus, vocab_size: int) -> None:
    corpus.append(
        pack(
            [one.ids.numpy() for one in buffer],
            [one.answer_start for one in buffer],
            [one.prompt.temperature for one in buffer],
            [one.prompt.source for one in buffer],
            [one.is_whole for one in buffer],
            vocab_size,
        )
    )
