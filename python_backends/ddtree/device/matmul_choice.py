"""Linear layers that use, for each number of rows, what was fastest for their weight on this device.

The library's product (cuBLAS, through PyTorch) is good with many rows. With one, a step of an 8B target that
was nothing but such products and PyTorch's operators took nearly twice what reading its weights takes on an
H200. Whether a kernel of ours reads faster differs by shape, so every shape is measured once, at load: the
library and a few configs, each checked against the library before it may win. What was found is kept in a
file for this device and these versions, so that the next start has nothing to measure.

Without CUDA, without Triton, or before `tune`, everything is the library's. This module does not know how a
product is computed, nor where in a model it stands.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import nn
from torch.nn import functional

from ddtree.device.graph_timer import GraphTimer
from ddtree.device.matmul_candidates import BUCKETS, Bucket, Config, ProductKind, bucket_of, candidates
from ddtree.device.matmul_file import Choice, ChoiceFile, Choices

_LOG = logging.getLogger(__name__)

_COMPILERS = 4  # threads; most of a compile happens outside of Python's lock
_LAUNCHES = 8  # in one measurement, at least
_MOST_COPIES = 192
_GAIN = 0.99  # of the library's time: what wins by less wins by chance
# How far a right kernel may be from the library, in parts of the largest output: roundings, and the library's
# own where it adds up parts of K in the output's dtype.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 2**-8, torch.bfloat16: 2**-6}

Timer = Callable[[Callable[[], None]], float]  # microseconds of one call
Gate = Callable[[torch.Tensor], torch.Tensor]  # as `eager_gate`
Progress = Callable[[int, int], None]  # measurements done, and in all


class Multiply(Protocol):
    """`kernels.matmul.multiply`."""

    def __call__(
        self,
        rows: torch.Tensor,  # [M, K]
        weight: torch.Tensor,  # [N, K]; [2 * N, K] when gated
        config: Config,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        *,
        gated: bool = False,
    ) -> torch.Tensor:
        """The product, `[M, N]`."""


def eager_gate(product: torch.Tensor) -> torch.Tensor:
    """`silu` of the first half of the columns times the second: `[..., 2 * N]` to `[..., N]`."""
    gate, up = product.chunk(2, dim=-1)
    return functional.silu(gate) * up


def library_product(
    rows: torch.Tensor,  # [..., K]
    weight: torch.Tensor,  # [N, K]; [2 * N, K] when gated
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,  # [..., N]
    *,
    gate: Gate | None = None,
) -> torch.Tensor:
    """What kernels are measured against, `[..., N]`: PyTorch's product, and what follows one by one."""
    product = functional.linear(rows, weight, bias)
    if gate is not None:
        product = gate(product)
    return product if residual is None else residual + product


class SmallLinear(nn.Module):
    """A linear layer over a weight `[N, K]`; gated, `silu(x @ gate^T) * (x @ up^T)` over `[2 * N, K]`."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        choices: Mapping[int, Choice] | None = None,  # by the most rows of a bucket; may fill up later
        multiply: Multiply | None = None,
        *,
        gate: Gate | None = None,  # for a gated layer: what follows the library's product
    ) -> None:
        super().__init__()
        self.weight = _parameter(weight)
        self.bias = None if bias is None else _parameter(bias)
        self.in_features = weight.shape[1]
        self.out_features = weight.shape[0] // (1 if gate is None else 2)
        self._gate = gate
        self._choices = {} if choices is None else choices
        self._multiply = multiply

    def forward(self, rows: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Apply to rows `[..., K]`, and add a residual `[..., N]` to what comes out."""
        config = self.config_for(rows)
        if config is None or self._multiply is None:
            return library_product(rows, self.weight, self.bias, residual, gate=self._gate)
        flat = rows.reshape(-1, self.in_features)
        beside = None if residual is None else residual.reshape(-1, self.out_features)
        is_gated = self._gate is not None
        product = self._multiply(flat, self.weight, config, self.bias, beside, gated=is_gated)
        return product.view(*rows.shape[:-1], self.out_features)

    def config_for(self, rows: torch.Tensor) -> Config | None:
        """The kernel for rows `[..., K]`; None for the library's product."""
        bucket = bucket_of(rows.numel() // self.in_features)
        choice = None if bucket is None else self._choices.get(bucket.most)
        return None if choice is None else choice.config


@dataclass(frozen=True)
class _Trial:
    """One weight under measurement."""

    kind: ProductKind
    copies: tuple[torch.Tensor, ...]  # more than L2 holds, and used in turn: a step finds no weight there


class MatmulChooser:
    """Makes linear layers, measures what they should use, and remembers it."""

    def __init__(
        self,
        device: torch.device,
        cache_folder: Path | None,  # None: measured at each start
        *,
        timer: Timer | None = None,  # None: CUDA events, and nothing is measured elsewhere
        multiply: Multiply | None = None,  # None: our kernels, where Triton is
    ) -> None:
        self._device = device
        is_cuda = device.type == "cuda"
        self._timer, can_time = timer, timer is not None or is_cuda
        self._multiply, self._gate = multiply, cast(Gate, eager_gate)
        if is_cuda:
            self._use_kernels()
        properties = torch.cuda.get_device_properties(device) if is_cuda else None
        self._processors = 1 if properties is None else int(properties.multi_processor_count)
        self._cold_bytes = 0 if properties is None else 2 * int(properties.L2_cache_size)
        can_choose = can_time and self._multiply is not None
        self._file = ChoiceFile.of(cache_folder, device) if cache_folder and can_choose else None
        self._choices: dict[ProductKind, Choices] = {}
        self._weights: dict[ProductKind, torch.Tensor] = {}

    def _use_kernels(self) -> None:
        try:
            from ddtree.device.kernels.layer import gate
            from ddtree.device.kernels.matmul import multiply
        except ImportError as error:
            _LOG.warning("without Triton, products of few rows stay the library's, however slow: %s", error)
            return
        self._multiply, self._gate = self._multiply or multiply, gate

    def linear(
        self,
        weight: torch.Tensor,  # [N, K]; [2 * N, K], gate first, when gated
        bias: torch.Tensor | None = None,
        *,
        gated: bool = False,
    ) -> SmallLinear:
        """A layer over the weight itself, not a copy; it follows the choices as they are made."""
        gate = self._gate if gated else None
        if not weight.is_contiguous():  # a slice of another, which kernels do not read
            return SmallLinear(weight, bias, gate=gate)
        kind = ProductKind(weight.shape[0], weight.shape[1], weight.dtype, gated)
        if kind not in self._choices:
            self._choices[kind] = {}
            self._weights[kind] = weight.detach()
        return SmallLinear(weight, bias, self._choices[kind], self._multiply, gate=gate)

    def choices(self) -> dict[str, Choices]:
        """What was chosen so far, by the names of kinds and the most rows of buckets."""
        return {kind.name: dict(choices) for kind, choices in self._choices.items()}

    @torch.inference_mode()
    def tune(self, on_progress: Progress | None = None, limit_s: float = 60.0) -> None:
        """Take what is stored, and measure the rest; until then every product is the library's.

        What `limit_s` seconds leave no time for stays with the library until the next start. Takes device
        memory of twice L2 and the outputs of 80 rows while it lasts.
        """
        if self._multiply is None or self._take_stored():
            return
        with nullcontext() if self._file is None else self._file.alone():
            timer = self._timer or (GraphTimer(self._device) if self._device.type == "cuda" else None)
            if timer is not None and not self._take_stored():  # others may have measured meanwhile
                self._fill(timer, self._multiply, on_progress, time.monotonic() + limit_s)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # for those who ask the device what is free

    def _take_stored(self) -> bool:
        """Take what is stored; gives whether that leaves nothing to measure."""
        stored = {} if self._file is None else self._file.read()
        for kind, choices in self._choices.items():
            for most, choice in stored.get(kind.name, {}).items():
                choices.setdefault(most, choice)
        return all(len(BUCKETS) == len(known) for known in self._choices.values())

    def _fill(self, timer: Timer, multiply: Multiply, on_progress: Progress | None, end: float) -> None:
        missing = {
            kind: [bucket for bucket in BUCKETS if bucket.most not in choices]
            for kind, choices in self._choices.items()
        }
        total, done = sum(map(len, missing.values())), 0
        for kind, buckets in missing.items():
            trial = None
            for bucket in buckets:
                if time.monotonic() >= end:
                    break
                trial = trial or _Trial(kind, self._copies(self._weights[kind]))
                try:
                    self._choices[kind][bucket.most] = self._measure(trial, bucket, timer, multiply)
                except Exception as error:  # noqa: BLE001 - no memory, or a compiler that refuses
                    _LOG.warning("%s, %d rows: stays with the library: %s", kind.name, bucket.timed, error)
                done += 1
                if on_progress is not None:
                    on_progress(done, total)
        if done < total:
            _LOG.warning("no time to measure %d of %d products: they stay the library's", total - done, total)
        if done and self._file is not None:
            self._file.write(self.choices())

    def _copies(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = min(-(-self._cold_bytes // weight.nbytes), _MOST_COPIES)
        return (weight, *(weight.clone() for _ in range(count - 1)))

    def _measure(self, trial: _Trial, bucket: Bucket, timer: Timer, multiply: Multiply) -> Choice:
        """Time the library and every config that computes the same."""
        kind, weight = trial.kind, trial.copies[0]
        generator = torch.Generator(self._device).manual_seed(bucket.timed)
        rows = torch.randn((bucket.timed, kind.size), generator=generator, device=self._device).to(kind.dtype)

        def timed(product: Callable[[torch.Tensor], torch.Tensor]) -> float:
            launches = max(len(trial.copies), _LAUNCHES)

            def turn() -> None:
                for launch in range(launches):
                    product(trial.copies[launch % len(trial.copies)])

            return timer(turn) / launches

        usual = partial(library_product, rows, gate=self._gate if kind.gated else None)
        expected, library = usual(weight), timed(usual)
        choice = Choice(None, library, library)
        configs = candidates(kind, bucket, self._processors)
        for config, is_right in zip(
            configs, self._tried(configs, rows, trial, expected, multiply), strict=True
        ):
            if not is_right:
                continue
            micros = timed(partial(multiply, rows, config=config, gated=kind.gated))
            _LOG.debug("%s, %d rows, %s: %.1f us (%.1f)", kind.name, bucket.timed, config, micros, library)
            if micros < min(choice.micros, library * _GAIN):
                choice = Choice(config, micros, library)
        return choice

    def _tried(
        self,
        configs: tuple[Config, ...],
        rows: torch.Tensor,
        trial: _Trial,
        expected: torch.Tensor,
        multiply: Multiply,
    ) -> list[bool]:
        """Whether each config compiles, runs and gives what the library gives."""

        def attempt(config: Config) -> bool:
            try:
                with torch.inference_mode(), torch.cuda.device_of(rows):
                    found = multiply(rows, trial.copies[0], config, gated=trial.kind.gated)
                    far = float((found.float() - expected.float()).abs().max() / expected.float().abs().max())
            except Exception as error:  # noqa: BLE001 - whatever the compiler or driver refuses, others are left
                _LOG.debug("%s cannot run %s: %s", trial.kind.name, config, error)
                return False
            tolerance = _TOLERANCES[trial.kind.dtype] * (2 if trial.kind.gated else 1)  # rounded three times
            is_right = found.dtype == expected.dtype and far <= tolerance
            if not is_right:
                _LOG.warning("%s: %s is off by %.2g of the largest: not used", trial.kind.name, config, far)
            return is_right

        # The interpreter of the tests keeps its place in global variables.
        with ThreadPoolExecutor(_COMPILERS if self._device.type == "cuda" else 1) as pool:
            return list(pool.map(attempt, configs))


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    """The same storage, under the names that a state dict has for a linear layer."""
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
