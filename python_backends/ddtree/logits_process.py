"""What a request's settings do to logits: penalties, then temperature, then the cuts top-k, top-p and min-p.

Everything works on rows of `[R, V]` float32 with settings per row, and no row depends on another one. A cut
is a floor under the logits, so equal logits share their fate and no result hangs on how a sort breaks ties.
The exact rules are in `docs/SAMPLING.md`. This module knows neither sequences nor trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from ddtree.sampling_spec import SamplingSpec

# Almost every nucleus is within so many tokens; a row that needs more is sorted in full.
_NUCLEUS_GUESS: Final = 1024


@dataclass(frozen=True)
class Penalties:
    """Penalties and what they are about, one row each."""

    output_counts: torch.Tensor  # [R, V] int32, how often a token was emitted
    is_in_prompt: torch.Tensor  # [R, V] bool
    repetition: torch.Tensor  # [R, 1] float32
    presence: torch.Tensor  # [R, 1] float32
    frequency: torch.Tensor  # [R, 1] float32


@dataclass(frozen=True)
class Cuts:
    """How the distribution of a row is shaped; the defaults of `SamplingSpec` leave it alone."""

    temperature: torch.Tensor  # [R] float32, 0 = greedy: the logits are not divided
    top_k: torch.Tensor  # [R] int64
    top_p: torch.Tensor  # [R] float64
    min_p: torch.Tensor  # [R] float32
    most_top_k: int  # largest top_k of any row; on the host, as reading it would wait for the device
    has_top_p: bool
    has_min_p: bool

    @classmethod
    def of(cls, specs: Sequence[SamplingSpec], device: torch.device) -> Cuts:
        """Collect the settings of some sequences, a row each."""
        top_k, top_p, min_p = (
            [getattr(spec, name) for spec in specs] for name in ("top_k", "top_p", "min_p")
        )
        return cls(
            temperature=torch.tensor(
                [spec.temperature for spec in specs], dtype=torch.float32, device=device
            ),
            top_k=torch.tensor(top_k, dtype=torch.int64, device=device),
            top_p=torch.tensor(top_p, dtype=torch.float64, device=device),
            min_p=torch.tensor(min_p, dtype=torch.float32, device=device),
            most_top_k=max(top_k),
            has_top_p=min(top_p) < 1,
            has_min_p=max(min_p) > 0,
        )

    def rows(self, index: torch.Tensor) -> Cuts:
        """Give the settings of some rows."""
        return replace(
            self,
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            min_p=self.min_p[index],
        )


def penalise(logits: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    """Apply repetition, frequency and presence penalty, in this order.

    Repetition (Keskar and others, CTRL, arXiv 1909.05858, section 4.1, as transformers and vLLM read it)
    divides a positive logit and multiplies a negative one for tokens of prompt or output. The others
    (OpenAI's) subtract for tokens of the output: frequency once per occurrence, presence once.
    """
    counts = penalties.output_counts
    is_seen = penalties.is_in_prompt | (counts > 0)
    repetition = penalties.repetition
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalised = torch.where(is_seen, repeated, logits)
    return penalised - penalties.frequency * counts - penalties.presence * (counts > 0)


def temper_and_cut(logits: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """Divide by the temperature, then set everything outside the cuts to -inf.

    Args:
        logits: `[R, V]`; every row has a finite value.
        cuts: settings per row.

    Returns:
        `[R, V]` logits of the distribution to draw from, the largest of each row zero.
    """
    # Shifted first: a tiny temperature then sends all but the largest to -inf instead of all to inf.
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    divisor = torch.where(cuts.temperature > 0, cuts.temperature, torch.ones_like(cuts.temperature))
    scaled = scaled / divisor[:, None]
    floors = [_top_k_floor(scaled, cuts)] if cuts.most_top_k else []
    if cuts.has_top_p:
        kept = _cut(scaled, floors[0]) if floors else scaled
        floors.append(_top_p_floor(kept, cuts.top_p))
    if cuts.has_min_p:
        floors.append(cuts.min_p.log())  # relative to the most probable token, whose logit is zero
    for floor in floors:
        scaled = _cut(scaled, floor)
    return scaled


def _cut(scaled: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    return scaled.masked_fill(scaled < floor[:, None], -torch.inf)


def _top_k_floor(scaled: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """Give the k-th largest value of each row, or -inf where top-k is off."""
    most = min(cuts.most_top_k, scaled.shape[1])
    values = scaled.topk(most, dim=-1).values
    floor = values.gather(1, (cuts.top_k.clamp(1, most) - 1)[:, None])[:, 0]
    return torch.where(cuts.top_k > 0, floor, -torch.inf)


def _top_p_floor(scaled: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Give the smallest value inside each row's nucleus, or -inf where top-p is off.

    The nucleus holds the tokens that have less than `top_p` of the mass strictly before them, most probable
    first: the smallest set that reaches `top_p`, and never empty.
    """
    # float64: the sums must not depend on how many rows or threads they are split over.
    mass = scaled.double().exp().sum(dim=-1, keepdim=True)
    width = min(_NUCLEUS_GUESS, scaled.shape[1])
    values = scaled.topk(width, dim=-1).values
    before = _mass_before(values, mass)
    if width < scaled.shape[1] and bool(((before[:, -1] < top_p) & (top_p < 1)).any()):
        values = scaled.sort(dim=-1, descending=True).values
        before = _mass_before(values, mass)
    last = (before < top_p[:, None]).sum(dim=-1, keepdim=True).clamp_min(1) - 1
    return torch.where(top_p < 1, values.gather(1, last)[:, 0], -torch.inf)


def _mass_before(values: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    shares = values.double().exp() / mass
    return shares.cumsum(dim=-1) - shares
