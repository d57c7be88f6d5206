"""Log-probabilities of emitted tokens, from the pass that chose them, and their one packed form.

A token's entry is `[2 + 2 n]` float32: its log-probability by the model, its log-probability in the
distribution it was drawn from, the ids of the model's n most probable tokens (exact in float32 up to 2^24)
and their log-probabilities. One tensor instead of four, because every tensor costs a hop time. "By the
model" means log-softmax of the logits as they come, before penalties, temperature or anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ddtree.sampling import Draws
from ddtree.sampling_spec import NO_LOG_PROBS, SamplingSpec


@dataclass(frozen=True)
class TokenLogProbs:
    """One emitted token's log-probabilities, natural logarithm."""

    model: float
    drawn: float  # in the distribution it was drawn from; 0 at temperature 0, where nothing is drawn
    top: tuple[tuple[int, float], ...] = ()  # the model's most probable tokens: id, log-probability


def width_for(specs: Sequence[SamplingSpec]) -> int:
    """How many numbers an entry has when these sequences share a tensor."""
    most = max((spec.top_log_probs for spec in specs), default=NO_LOG_PROBS)
    return 0 if most == NO_LOG_PROBS else 2 + 2 * most


def measure(draws: Draws, places: Sequence[int], specs: Sequence[SamplingSpec], width: int) -> torch.Tensor:
    """Entries of the drawn tokens in some rows, `[len(places), width]` on the draws' device."""
    index = torch.tensor(places, device=draws.tokens.device)
    token = draws.tokens[index, None]
    model = draws.model_logits[index].log_softmax(dim=-1)
    drawn = draws.drawn_logits[index].log_softmax(dim=-1).gather(1, token)
    is_drawn = torch.tensor([[spec.temperature > 0] for spec in specs], device=token.device)
    top = model.topk((width - 2) // 2, dim=-1)
    return torch.cat(
        (model.gather(1, token), drawn.where(is_drawn, 0.0), top.indices.float(), top.values), dim=1
    )


def read(entries: torch.Tensor, spec: SamplingSpec) -> tuple[TokenLogProbs, ...]:
    """The entries `[tokens, width]` of one sequence; none when it did not ask for them."""
    if spec.top_log_probs == NO_LOG_PROBS:
        return ()
    most = (entries.shape[1] - 2) // 2
    found = []
    for model, drawn, *rest in entries.tolist():
        top = zip(rest[: spec.top_log_probs], rest[most : most + spec.top_log_probs], strict=True)
        found.append(TokenLogProbs(model, drawn, tuple((int(token), value) for token, value in top)))
    return tuple(found)
