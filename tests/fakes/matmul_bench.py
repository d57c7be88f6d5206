"""Kernels and a clock for what chooses matrix products: every form takes the time that a test gives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ddtree.device.matmul_candidates import Config
from ddtree.device.matmul_choice import MatmulChooser, eager_gate, library_product

CPU = torch.device("cpu")
BF16 = torch.bfloat16


@dataclass
class Bench:
    """Kernels and a clock: every form takes the time it is given, and some compute nonsense."""

    micros: Callable[[Config | None, int], float]  # of a config, or of the library, for a number of rows
    wrong: Callable[[Config], bool] = lambda _: False
    broken: Callable[[Config], bool] = lambda _: False
    used: list[tuple[Config, int]] = field(default_factory=list)
    measured: int = 0

    def multiply(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        config: Config,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        *,
        gated: bool = False,
    ) -> torch.Tensor:
        self.used.append((config, len(rows)))
        if self.broken(config):
            raise RuntimeError("out of resource: shared memory")
        product = library_product(rows, weight, bias, residual, gate=eager_gate if gated else None)
        if self.wrong(config):
            product[-1, -1] += 1.0 + product.abs().max()
        return product

    def timer(self, run: Callable[[], None]) -> float:
        """The library's time when none of the kernels is launched."""
        self.measured += 1
        before = len(self.used)
        run()
        launched = self.used[before:]
        return 8 * self.micros(launched[-1][0] if launched else None, launched[-1][1] if launched else 0)

    def chooser(self, folder: Path | None = None) -> MatmulChooser:
        return MatmulChooser(CPU, folder, timer=self.timer, multiply=self.multiply)


def weight_of(rows: int = 64, size: int = 64, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn((rows, size), generator=torch.Generator().manual_seed(0)).to(dtype)
