"""Decides at load whether the kernels are used: only on a CUDA device, and only if they are right there.

Kernels are compiled on the machine they run on, so what can go wrong shows at load: no compiler, a card or a
driver they do not fit. Then the PyTorch form is used, which is slower and exact. This module knows neither
models nor sessions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ddtree.recurrent.layer import LayerInputs, LayerWeights, run_plainly
from ddtree.recurrent.state_pool import PoolSize, StatePool, StateShape
from ddtree.recurrent.step import RecurrentStep, Span

if TYPE_CHECKING:
    from ddtree.recurrent.kernels import TreeKernels

_LOG = logging.getLogger(__name__)
_ROWS = (20, 1)  # more than one block; and single rows, which have a kernel of their own
_ROUNDING = 1e-4


def kernels_for(device: torch.device) -> TreeKernels | None:
    """The kernels for a device, tried on it; None where PyTorch does the work."""
    return tried(device, _make) if device.type == "cuda" else None


def tried(device: torch.device, make: Callable[[], TreeKernels]) -> TreeKernels | None:
    """Kernels that gave the same numbers as PyTorch; None, and a warning, if they did not."""
    try:
        kernels = make()
        offs = [_difference(device, kernels, rows) for rows in _ROWS]
    except Exception as error:  # noqa: BLE001 - whatever a compiler says, there is another way
        reason = " ".join(str(error).split())[:400]
        _LOG.warning("recurrent layers run without kernels, more slowly: %s", reason)
        return None
    wrong = [off for off in offs if not off <= _ROUNDING]  # a NaN is no small difference
    if wrong:
        _LOG.warning("recurrent layers run without kernels, more slowly: they are off by %.3g here", wrong[0])
        return None
    return kernels


def _make() -> TreeKernels:
    from ddtree.recurrent.kernels import TreeKernels

    return TreeKernels()


def _difference(device: torch.device, kernels: TreeKernels, rows: int) -> float:
    """Run one tree and one commit both ways; gives the largest difference of outputs and states."""
    results = []
    for chosen in (None, kernels):
        shape = StateShape((0,), key_heads=1, value_heads=2, key_dim=32, value_dim=32, kernel=4,
                           dtype=torch.float32)  # fmt: skip
        pool = StatePool(shape, PoolSize(2, rows), device, chosen)
        generator = torch.Generator().manual_seed(0)

        def normal(*sizes: int, source: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(sizes, generator=source).to(device)

        pool.matrices.copy_(normal(*pool.matrices.shape))
        pool.tails.copy_(normal(*pool.tails.shape))
        # Two branches side by side: odd rows see odd ones and the root, even rows see even ones.
        depths = (torch.arange(rows, device=device) + 1) // 2
        sides = torch.arange(rows, device=device) % 2
        sees = (sides[:, None] == sides[None]).tril()
        sees[:, 0] = True
        step = RecurrentStep.build(pool, [Span(0, rows, 1, depths, sees)], keeps=False)
        found = []
        for layer in shape.layers:
            weights = LayerWeights(
                normal(shape.channels, 4), normal(2), normal(2), 0.1 * normal(32), eps=1e-6
            )  # fmt: skip
            inputs = LayerInputs(
                normal(rows, shape.channels), normal(rows, 2, 32), normal(rows, 2), normal(rows, 2)
            )  # fmt: skip
            found.append(run_plainly(step, layer, inputs, weights))
            found.append(found[-1] if chosen is None else step.run_fused(layer, inputs, weights))
        path = torch.tensor([[0, *range(1, rows, 2)]], device=device)
        step.commit(path, path.new_tensor([path.shape[1]]))
        results.append(torch.cat([part.flatten() for part in (*found, pool.matrices, pool.tails.float())]))
    return float((results[0] - results[1]).abs().max())
