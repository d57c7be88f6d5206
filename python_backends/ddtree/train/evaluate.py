"""Acceptance lengths per prompt set, temperature and way of drafting.

The target answers each prompt once per temperature; every budget is replayed against the same answers. All
anchors of an answer are drafted at once, then the rounds visit those they need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ddtree.train.batches import Batch
from ddtree.train.prompts import ChatFrame, Prompt
from ddtree.train.replay import Answer, Candidates, replay
from ddtree.train.slots import SlotGenerator, SlotLimits
from ddtree.train.train import Trainer

_ROWS_AT_ONCE = 2048  # through the output head
_ANCHORS_AT_ONCE = 128  # of one sequence


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


@torch.no_grad()
def draft_everywhere(trainer: Trainer, answer: Answer, width: int) -> Candidates:
    """Draft at every token of an answer but the last."""
    first, last = answer.answer_start, len(answer.ids) - 1
    anchors = torch.arange(first, last)
    block = trainer.draft.config.block_size
    ids, log_probs = [], []
    for some in anchors.split(_ANCHORS_AT_ONCE):
        labels = torch.zeros(1, len(some), block - 1, dtype=torch.int64)
        hidden = trainer.hidden_of(Batch(answer.ids[None].long(), some[None], labels))
        for rows in hidden[0, :, 1:].reshape(-1, hidden.shape[-1]).split(_ROWS_AT_ONCE):
            logits = (rows @ trainer.head.T).float()
            top, top_ids = logits.topk(min(width, logits.shape[-1]), -1)
            ids.append(top_ids.int().cpu())
            log_probs.append((top - logits.logsumexp(-1, keepdim=True)).cpu())
    shape = (len(anchors), block - 1, -1)
    if not ids:
        empty = torch.zeros(0, block - 1, width)
        return Candidates(empty.int(), empty)
    return Candidates(torch.cat(ids).view(shape), torch.cat(log_probs).view(shape))


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
