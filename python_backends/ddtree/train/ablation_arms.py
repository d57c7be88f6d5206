"""The arms of an ablation: one way to train a drafter, and the same with one thing changed at a time.

This module knows what is changed and how it is called; it neither trains nor measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddtree.errors import InvalidArgument
from ddtree.models.draft_config import default_taps

BASELINE = "baseline"
SEED = "seed"
HALF = "data-1/2"
_WIDTH_STEP = 32  # a thinner MLP's width is a multiple of this, unless it is less


@dataclass(frozen=True)
class Choices:
    """Everything that an arm may choose."""

    taps: tuple[int, ...]  # layers of the target
    layers: int = 4
    intermediate_size: int | None = None  # None: the target's
    block_size: int = 16
    share: float = 1.0  # of the corpus' answer tokens
    answers: str = "all"  # `ddtree.train.corpus.ANSWERS`
    decay: float = 7.0  # of the loss over draft positions; 0: none
    muon_rate: float = 0.02  # 0: AdamW for all
    seed: int = 0  # of weights, order and anchors

    def __post_init__(self) -> None:
        for name in ("decay", "muon_rate"):
            if not getattr(self, name) >= 0:  # a NaN is not
                raise InvalidArgument.of(name, "must be 0 or more", getattr(self, name), "0 is for none")


@dataclass(frozen=True)
class Arm:
    """One training of an ablation."""

    name: str
    question: str  # what it is about, for grouping
    change: str  # in words
    choices: Choices
    reference: str = BASELINE  # the arm that differs from this one in the change alone

    def folder_in(self, output: Path) -> Path:
        """Where it is trained, within an ablation's folder."""
        return output / "arms" / self.name.replace("/", "-of-")


@dataclass(frozen=True)
class TargetSizes:
    """What arms are made of on the target's side."""

    layers: int
    hidden_size: int
    intermediate_size: int
    attention_size: int  # weights of one layer's attention


@dataclass
class _Arms:
    """Arms in order, without those that change nothing on this target."""

    base: Choices
    listed: list[Arm] = field(default_factory=list)

    def add(self, name: str, question: str, change: str, choices: Choices, reference: str = BASELINE) -> None:
        if all(choices != arm.choices for arm in self.listed):
            self.listed.append(Arm(name, question, change, choices, reference))


def make_arms(base: Choices, sizes: TargetSizes) -> list[Arm]:
    """Give the baseline and every arm; those that would repeat another one are left out.

    The arms of one kind of answer have half of the corpus' tokens at most, so they stand beside `data-1/2`.
    """
    arms = _Arms(base)
    arms.add(BASELINE, BASELINE, "what the others change", base)
    arms.add(SEED, "noise", "another seed: what a difference must exceed", replace(base, seed=base.seed + 1))
    for parts in (2, 4, 8):
        change = f"1/{parts} of the answer tokens"
        arms.add(f"data-1/{parts}", "data amount", change, replace(base, share=base.share / parts))
    for how, words in (("greedy", "greedy answers only"), ("drawn", "drawn answers only")):
        choices = replace(base, answers=how, share=base.share / 2)
        arms.add(f"answers-{how}", "temperature mix", f"{words}, half the tokens", choices, HALF)
    arms.add("decay-none", "loss weighting", "all draft positions alike", replace(base, decay=0.0))
    arms.add("decay-3", "loss weighting", "decay 3", replace(base, decay=3.0))
    _add_layers(arms, sizes)
    _add_taps(arms, sizes)
    half = max(2, base.block_size // 2)
    arms.add(f"block-{half}", "block size", f"blocks of {half}", replace(base, block_size=half))
    arms.add("adamw", "optimizer", "AdamW for all weights", replace(base, muon_rate=0.0))
    return arms.listed


def choose_arms(arms: Sequence[Arm], names: Sequence[str]) -> list[Arm]:
    """Give the named arms, and those they are compared with, in the order of `arms`; all for no names.

    Raises:
        InvalidArgument: there is no such arm.
    """
    by_name = {arm.name: arm for arm in arms}
    for name in names:
        if name not in by_name:
            raise InvalidArgument.of("--arms", "must name arms", name, f"choose from {', '.join(by_name)}")
    wanted = set(names or by_name)
    while more := {by_name[name].reference for name in wanted} - wanted:
        wanted |= more
    return [arm for arm in arms if arm.name in wanted]


def _add_layers(arms: _Arms, sizes: TargetSizes) -> None:
    base = arms.base
    half = max(1, base.layers // 2)
    arms.add(f"layers-{half}", "layers", f"half the layers: {half}", replace(base, layers=half))
    more = base.layers * 3 // 2
    width = base.intermediate_size or sizes.intermediate_size
    # As many weights in all: gate, up and down projection give way to the attention of the further layers.
    weights = base.layers * (sizes.attention_size + 3 * sizes.hidden_size * width) // more
    thin = (weights - sizes.attention_size) // (3 * sizes.hidden_size)
    thin = thin // _WIDTH_STEP * _WIDTH_STEP or thin
    if thin > 0:
        change = f"{more} thinner layers (MLPs of {thin}), as many weights"
        choices = replace(base, layers=more, intermediate_size=thin)
        arms.add(f"layers-{more}-thin", "layers", change, choices)


def _add_taps(arms: _Arms, sizes: TargetSizes) -> None:
    base = arms.base
    for count in (1, 2, 3, 5):
        taps = (sizes.layers - 1,) if count == 1 else spread_taps(sizes.layers, count)
        if len(taps) < count:
            continue
        change = f"{'the last layer alone' if count == 1 else f'{count} spread'}: {_words(taps)}"
        arms.add(f"taps-{count}", "taps", change, replace(base, taps=taps))
    count = len(base.taps)
    late = tuple(range(max(0, sizes.layers - count), sizes.layers))
    arms.add("taps-late", "taps", f"the last {count} layers: {_words(late)}", replace(base, taps=late))


def spread_taps(layers: int, count: int) -> tuple[int, ...]:
    """Spread taps over the target's layers; fewer than `count` where it has too few."""
    return tuple(sorted(set(default_taps(layers, count))))


def _words(taps: Sequence[int]) -> str:
    return " ".join(map(str, taps))
