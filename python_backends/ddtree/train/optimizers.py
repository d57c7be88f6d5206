"""Two optimizers side by side: Muon for the layers' matrices, AdamW for everything else.

Muon (Keller Jordan, 2024) takes the momentum of a matrix's gradient and makes it nearly orthogonal by five
Newton-Schulz iterations, so that all directions of a matrix learn at one speed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic that pulls singular values towards 1
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum; matrices of one shape are orthogonalised together."""

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(list(matrices), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all matrices from their gradients."""
        assert closure is None, "no closure is ever needed here"
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape.setdefault(tuple(matrix.shape), []).append(matrix)
            for shape, matrices in by_shape.items():
                updates = [self._momentum(matrix, group["momentum"]) for matrix in matrices]
                # A tall matrix's update moves its outputs less: scale it up.
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for matrix, update in zip(matrices, orthogonalised(torch.stack(updates)), strict=True):
                    matrix.add_(update.to(matrix.dtype), alpha=-scale)

    def _momentum(self, matrix: nn.Parameter, factor: float) -> torch.Tensor:
        gradient = matrix.grad
        assert gradient is not None
        state = self.state[matrix]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(matrix)
        state["momentum"].lerp_(gradient, 1 - factor)
        return gradient.lerp(state["momentum"], factor)


def orthogonalised(
    matrices: torch.Tensor,  # [m, rows, columns]
) -> torch.Tensor:
    """Give matrices with the same singular vectors and singular values near 1."""
    turned = matrices.shape[-2] > matrices.shape[-1]
    current = (matrices.mT if turned else matrices).to(torch.bfloat16)
    current = current / (current.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = current @ current.mT
        current = a * current + (b * gram + c * gram @ gram) @ current
    result: torch.Tensor = current.mT if turned else current
    return result


def make_optimizers(
    model: nn.Module, *, matrix_rate: float | None, rate: float
) -> list[torch.optim.Optimizer]:
    """Give Muon (where `matrix_rate` is set) for the layers' matrices and AdamW for the rest."""
    matrices = [
        weight for name, weight in model.named_parameters() if weight.ndim == 2 and name.startswith("layers.")
    ]
    chosen = {id(weight) for weight in matrices} if matrix_rate is not None else set()
    rest = [weight for weight in model.parameters() if id(weight) not in chosen]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=rest[0].is_cuda)
    ]
    if matrix_rate is not None:
        optimizers.append(Muon(matrices, lr=matrix_rate))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_rate"] = group["lr"]
    return optimizers


def set_rates(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """Set every learning rate to `factor` times its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_rate"] * factor
