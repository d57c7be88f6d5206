"""Acceptance lengths per prompt set, temperature and way of drafting.

The target answers each prompt once per temperature; every budget is replayed against the same answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ddtree.train.prompts import ChatFrame, Prompt
from ddtree.train.replay import Answer, draft_everywhere, replay
from ddtree.train.slots import SlotGenerator, SlotLimits
from ddtree.train.train import Trainer


def answer_prompts(
    model: PreTrainedModel,
    frame: ChatFrame,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_answer: int,
    seed: int = 0,
) -> list[Answer]:
    """Have the target answer, all prompts side by side; in the order of `prompts`."""
    length = max(len(ids) for ids in prompts) + max_answer + 1
    limits = SlotLimits(len(prompts), length, length - 1, max_answer)
    generator = SlotGenerator(model, frame, limits, seed=seed)
    asked = [Prompt(tuple(ids), len(ids), temperature, number) for number, ids in enumerate(prompts)]
    results = [one for some in generator.run(iter(asked)) for one in some]
    results.sort(key=lambda one: one.prompt.source)
    return [Answer(one.ids, one.answer_start) for one in results]


def evaluate(
    trainer: Trainer,
    answers: Mapping[tuple[str, float], Sequence[Answer]],  # (prompt set, temperature)
    budgets: Sequence[int],
) -> dict[str, Any]:
    """Give acceptance lengths by set and temperature: `{"gsm8k": {"T=0": {"chain": 3.2, "tree64": 4.7}}}`."""
    table: dict[str, Any] = {}
    for (name, temperature), some in answers.items():
        drafts = [draft_everywhere(trainer, answer, max(budgets)) for answer in some]
        row: dict[str, Any] = {"chain": round(replay(some, drafts, None).length, 3)}
        for budget in budgets:
            row[f"tree{budget}"] = round(replay(some, drafts, budget).length, 3)
        row["answers"] = len(some)
        row["answer_tokens"] = sum(len(one.ids) - one.answer_start for one in some)
        table.setdefault(name, {})[f"T={temperature:g}"] = row
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return table
