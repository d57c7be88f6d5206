"""Loads a pair, decodes a few prompts with it, and says whether drafts are accepted as they should be.

A draft that is read wrongly does not fail: its proposals are merely rejected, and decoding is as slow as
without it. So when acceptance looks sick, the known ways of reading a draft wrongly are tried one by one on
what was just decoded, and the one under which the draft suddenly knows the text is named.

This module runs models; what the folders say is `inspection`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ddtree import assembly
from ddtree.config import ServingConfig
from ddtree.engine import Engine
from ddtree.errors import InvalidArgument
from ddtree.models.draft_checkpoint import open_checkpoint
from ddtree.models.target import TargetModel
from ddtree.params import GenerationParams
from ddtree.rehearsal import Decoded, Rehearsal, possible_misreadings
from ddtree.scheduler import Scheduler
from ddtree.sequence import Delta, Stats
from ddtree.stages.in_process import InProcessStages
from ddtree.text import TextCodec

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "What is 17 times 23? Think step by step.",
    "Explain in a few sentences why the sky is blue.",
)
# A draft that knows nothing gives 1 token a round; chance agreement on easy tokens a little more.
_SICK, _LOW = 1.2, 2.0
_CLEAR_GAIN = 0.3  # tokens a round by which a trial must beat what was decoded to be named


@dataclass(frozen=True)
class Trial:
    """One other way of reading the draft, tried on the decoded text."""

    change: str
    acceptance_length: float


@dataclass(frozen=True)
class Diagnosis:
    """How the pair did."""

    acceptance_length: float  # emitted tokens per round of a full chain
    tokens: int
    rounds: int
    finding: str
    trials: tuple[Trial, ...] = ()

    @property
    def is_sick(self) -> bool:
        """Whether the drafts are as good as none."""
        return self.acceptance_length < _SICK

    def render(self) -> str:
        """Lines for people."""
        length = f"acceptance length {self.acceptance_length:.2f}"
        lines = [
            f"decoded {self.tokens} tokens in {self.rounds} rounds: {length}",
            *(f"tried {trial.change}: {trial.acceptance_length:.2f}" for trial in self.trials),
            self.finding,
        ]
        return "\n".join(lines)


def examine(config: ServingConfig, *, prompts: Sequence[str] = PROMPTS, max_tokens: int = 48) -> Diagnosis:
    """Decode the prompts greedily with chains of full depth and judge what was accepted.

    Raises:
        CheckpointError: the pair is refused at load.
    """
    stages = assembly.load_in_process(config)
    decoded = asyncio.run(_decode(stages, config, prompts, max_tokens))
    tokens = sum(len(answer.token_ids) for answer in decoded)
    rounds = sum(answer.rounds for answer in decoded)
    # The prefill's token belongs to no round.
    length = sum(len(answer.token_ids) - 1 for answer in decoded) / max(1, rounds)
    if length >= _LOW:
        return Diagnosis(length, tokens, rounds, "The draft knows what the target will say.")
    if length >= _SICK:
        finding = (
            "The draft works, but little is accepted. Known reasons: it was trained on another language, or "
            "on answers without thinking; or the target was quantised or fine-tuned since."
        )
        return Diagnosis(length, tokens, rounds, finding)
    trials, finding = _find_cause(stages, config, decoded, length)
    return Diagnosis(length, tokens, rounds, finding, trials)


class _Answer:
    """Collects one sequence."""

    trace = None

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.rounds = 0

    def emit(self, delta: Delta, stats: Stats) -> None:
        """Keep the tokens."""
        self.token_ids += delta.token_ids
        self.rounds = stats.rounds

    def is_cancelled(self) -> bool:
        """Never."""
        return False


async def _decode(
    stages: InProcessStages, config: ServingConfig, prompts: Sequence[str], max_tokens: int
) -> list[Decoded]:
    codec = TextCodec.from_folder(config.target)
    scheduler = Scheduler(max_sequences=len(prompts), max_waiting=0, prefill_chunk=config.prefill_chunk)
    engine = Engine(stages, codec, scheduler=scheduler)
    await engine.start()
    try:
        ids = [_prompt_ids(codec, prompt) for prompt in prompts]
        answers = [_Answer() for _ in prompts]
        depth = open_checkpoint(config.draft).config.draft_positions
        for prompt_ids, answer in zip(ids, answers, strict=True):
            params = GenerationParams(
                prompt_ids, max_tokens=max_tokens, draft_mode="chain", tree_budget=depth,
                stop_ids=codec.stop_ids,
            )  # fmt: skip
            await engine.generate(params, answer)
    finally:
        await engine.stop()
    return [
        Decoded(prompt_ids, tuple(answer.token_ids), answer.rounds)
        for prompt_ids, answer in zip(ids, answers, strict=True)
    ]


def _prompt_ids(codec: TextCodec, prompt: str) -> tuple[int, ...]:
    """As a user's message where the target has a chat template, as plain text where it has none."""
    try:
        return tuple(codec.render_messages([{"role": "user", "content": prompt}]))
    except InvalidArgument:
        return tuple(codec.encode(prompt))


@torch.inference_mode()
def _find_cause(
    stages: InProcessStages, config: ServingConfig, decoded: Sequence[Decoded], length: float
) -> tuple[tuple[Trial, ...], str]:
    target = stages.verifier.target
    assert isinstance(target, TargetModel), "the rehearsal reads hidden states of transformers' own model"
    checkpoint = open_checkpoint(config.draft)
    misreadings = possible_misreadings(checkpoint.config, target.model.config, config.target)
    rehearsal = Rehearsal(config, target, decoded, [reading.draft for reading in misreadings])
    trials = []
    best, advice = length + _CLEAR_GAIN, ""
    for reading in misreadings:
        reached = rehearsal.acceptance_length(replace(checkpoint, config=reading.draft))
        trials.append(Trial(reading.change, reached))
        if reached > best:
            best, advice = reached, reading.advice
    if advice:
        return tuple(trials), f"Acceptance is sick, and this would cure it: {advice}."
    return tuple(trials), (
        "Acceptance is sick, and no known misreading explains it: the weights may belong to another target, "
        "or to another fine-tune of it, or be damaged."
    )
