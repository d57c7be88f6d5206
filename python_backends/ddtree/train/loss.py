"""Cross-entropy through the target's frozen output head, without ever holding all logits.

The head is frozen, so a gradient is wanted for the hidden rows alone. It is computed together with the loss,
some thousand rows at a time, and the logits are thrown away: 30,000 rows of a 49,152-word vocabulary would be
3 GB in bf16 and as much again for their gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ddtree.errors import InvalidArgument

IGNORED = -1  # label of rows that have none


@dataclass(frozen=True)
class HeadLoss:
    """The frozen head and how to go through it."""

    head: torch.Tensor  # [V, H]
    rows_at_once: int = 4096
    compiled: bool = False

    def __call__(
        self,
        hidden: torch.Tensor,  # [R, H]
        labels: torch.Tensor,  # [R] int64, IGNORED where there is none
        weights: torch.Tensor,  # [R] float32; the loss is the weighted mean
    ) -> torch.Tensor:
        """Give the loss, float32; its gradient reaches `hidden`."""
        weights = torch.where(labels == IGNORED, 0.0, weights)
        weights = weights / weights.sum().clamp(min=1e-6)
        grade = torch.compile(_grade, dynamic=False) if self.compiled else _grade
        loss: torch.Tensor = _FrozenHeadLoss.apply(  # type: ignore[no-untyped-call]
            hidden, self.head, labels, weights, self.rows_at_once, grade
        )
        return loss


def position_weights(
    positions: int,
    decay: float,
    device: torch.device,
) -> torch.Tensor:
    """Weight exp(-(k - 1) / decay) of draft position k: it counts only if all positions before it hit.

    A decay of 0 stands for none: all positions count alike.

    Raises:
        InvalidArgument: the decay is negative or no number.
    """
    if not decay >= 0:  # a NaN is not
        raise InvalidArgument.of("decay", "must be 0 or more", decay, "0 weights all positions alike")
    if decay == 0:
        return torch.ones(positions, device=device)
    return torch.exp(-torch.arange(positions, device=device, dtype=torch.float32) / decay)


def _grade(
    logits: torch.Tensor,  # [r, V]
    labels: torch.Tensor,  # [r]
    weights: torch.Tensor,  # [r]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the rows' weighted loss, summed, and the gradient of it with respect to the logits."""
    log_probs = torch.log_softmax(logits.float(), -1)
    is_label = torch.arange(logits.shape[-1], device=logits.device) == labels[:, None]
    loss = -(torch.where(is_label, log_probs, 0.0).sum(-1) * weights).sum()
    gradient = (log_probs.exp() - is_label.float()) * weights[:, None]
    return loss, gradient.to(logits.dtype)


class _FrozenHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        rows_at_once: int,
        grade: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        total = torch.zeros((), device=hidden.device)
        gradients = []
        for rows, some_labels, some_weights in zip(
            hidden.split(rows_at_once), labels.split(rows_at_once), weights.split(rows_at_once), strict=True
        ):
            # Weights sum to 1 over all rows: scaled up so that bf16 gradients keep their small parts.
            loss, gradient = grade(rows @ head.T, some_labels, some_weights * len(hidden))
            total += loss / len(hidden)
            gradients.append(gradient @ head)
        context.save_for_backward(torch.cat(gradients))
        context.scale = 1.0 / len(hidden)
        return total

    @staticmethod
    def backward(context: Any, *upstream: torch.Tensor) -> Any:
        (gradients,) = context.saved_tensors
        return gradients * (upstream[0] * context.scale), None, None, None, None, None
