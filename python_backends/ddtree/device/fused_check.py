"""Runs a decoder layer in its own form and in its fused one, and says how they differ.

Kernels are compiled on the machine they run on, so what can go wrong shows at load: no compiler, a card or a
driver they do not fit, a layer that is not what its class promises. Two places with a small tree each, random
rows, random committed keys or states; the model's own form runs over `attention.sdpa`, the reference of all
attention, and over PyTorch's form of a recurrence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ddtree.attention import sdpa
from ddtree.attention.plan import Segment, StepPlan
from ddtree.device.layer_kinds import mixer_of
from ddtree.device.plan import DevicePlan
from ddtree.device.rows import DeviceRows
from ddtree.hybrid_cache import HybridPool
from ddtree.kv_cache import CacheShape, KvPool
from ddtree.recurrent.kernel_choice import kernels_for
from ddtree.recurrent.kernels import TreeKernels
from ddtree.recurrent.state_pool import PoolSize, StatePool, StateShape
from ddtree.recurrent.step import RecurrentStep
from ddtree.tree_mask import ancestor_bits, expand

Fused = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, DevicePlan], torch.Tensor]
_Normal = Callable[..., torch.Tensor]

_PAGE = 16
_ROWS = 4
_STATES = 2  # one for each place
_LENGTHS = (5, 2)
_PARENTS = ((0, 0, 1), (0,))  # of nodes 1, 2, …: the second place has two rows of padding
# Share of what a layer adds to its rows; half precision rounds some ten times on the way.
_ROUNDING = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


def why_not(layer: Any, fused: Fused) -> str | None:
    """Say why a layer's fused form cannot be used here; None if both forms agree.

    Args:
        layer: a decoder layer of a known kind.
        fused: its other form: rows `[1, S * T, H]`, cosines and sines `[S * T, head_dim]`, and the step.
    """
    try:
        off = _Trial.of(layer).difference(layer, fused)
    except Exception as error:  # noqa: BLE001 - whatever a compiler says, there is another way
        return " ".join(str(error).split())[:400]
    # A NaN is no small difference.
    return None if off <= 1 else f"the fused form is off by {off:.3g} times what rounding explains"


@dataclass(frozen=True)
class _Trial:
    """One step, and a pool for each form with the same committed keys and values."""

    hidden: torch.Tensor  # [1, S * T, H]
    cos: torch.Tensor  # [1, S * T, head_dim]
    sin: torch.Tensor  # [1, S * T, head_dim]
    staged: _Staged
    own: KvPool
    other: KvPool

    @classmethod
    def of(cls, layer: Any) -> _Trial:
        """Random rows for a layer, from a fixed seed."""
        mixer, weight = mixer_of(layer), layer.mlp.up_proj.weight
        device, dtype = weight.device, weight.dtype
        generator = torch.Generator().manual_seed(0)

        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=generator)

        make = _paged if hasattr(mixer, "q_proj") else _recurrent
        own, other = make(mixer, dtype, device, None), make(mixer, dtype, device, kernels_for(device))
        staged = _Staged.into(own)
        for ours, theirs in zip(_held(own), _held(other), strict=True):
            ours.copy_(normal(*ours.shape))
            theirs.copy_(ours)
        count = len(_LENGTHS) * _ROWS
        hidden = normal(1, count, weight.shape[1]).to(device, dtype)
        angles = normal(1, count, _turned(mixer)) * 9
        cos, sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
        return cls(hidden, cos, sin, staged, own, other)

    def difference(self, layer: Any, fused: Fused) -> float:
        """The largest difference of outputs, keys and values, in units of what rounding explains."""
        real = self.staged.real
        hidden, angles = self.hidden[:, real], (self.cos[:, real], self.sin[:, real])
        plan = DevicePlan(self.staged.rows, self.other, recurrent=self.staged.step_over(self.other))
        with _own_attention(layer):
            expected = type(layer).forward(
                layer, hidden, attention_mask=None, position_embeddings=angles,
                ddtree_plan=StepPlan.build(self.own, self.staged.segments),
            )  # fmt: skip
        found = fused(self.hidden, self.cos[0], self.sin[0], plan)
        share, step = _ROUNDING[expected.dtype], torch.finfo(expected.dtype).eps
        bound = share * (expected - hidden).abs().max().float() + 2 * step * expected.abs().max().float()
        offs = [(found[:, real].float() - expected.float()).abs().max() / bound]
        packed = torch.arange(len(real), device=real.device)
        pairs = [(self.own.keys_values, self.other.keys_values)]
        pairs += zip(_noted(self.own, packed), _noted(self.other, real), strict=True)
        for wanted, stored in pairs:
            off = (stored.float() - wanted.float()).abs().max()
            offs.append(off / (share * wanted.float().abs().max()))
        offs.append(found.float().sum() * 0)  # padding is not compared, but it must be finite
        return float(torch.stack(offs).max())


@dataclass(frozen=True)
class _Staged:
    """The trees of a step in both forms."""

    rows: DeviceRows
    segments: tuple[Segment, ...]
    real: torch.Tensor  # the packed rows that are no padding, in order

    def step_over(self, pool: KvPool) -> RecurrentStep | None:
        """The recurrent step of the rows, where the pool has states."""
        if pool.states is None:
            return None
        states = [segment.pages.state_index for segment in self.segments]  # type: ignore[attr-defined]
        return RecurrentStep.of_rows(pool.states, self.rows, torch.tensor(states, device=self.real.device))

    @classmethod
    def into(cls, pool: KvPool) -> _Staged:
        """Put each place's tree behind its committed slots."""
        device = pool.features.device
        rows = DeviceRows.empty(len(_LENGTHS), _ROWS, 1, _PAGE, device)
        segments: list[Segment] = []
        real: list[int] = []
        for place, (length, parents) in enumerate(zip(_LENGTHS, _PARENTS, strict=True)):
            pages, count = pool.reserve(_PAGE), len(parents) + 1
            assert pages is not None, "the trial's pool has a page for each place"
            bits = ancestor_bits(torch.tensor([parents]), torch.tensor([count - 1]))[0].to(device)
            sees = expand(bits[None])[0]
            depths = sees.sum(1) - 1
            rows.page_table[place], rows.lengths[place], rows.counts[place] = pages.indices[0], length, count
            rows.depths[place, :count], rows.bits[place, :count] = depths, bits
            rows.slots[place, :count] = pages.slots[length : length + count]
            segments.append(Segment(len(real), count, pages, length, depths, sees))
            real += range(place * _ROWS, place * _ROWS + count)
        return cls(rows, tuple(segments), torch.tensor(real, device=device))


def _paged(attention: Any, dtype: torch.dtype, device: torch.device, _: TreeKernels | None) -> KvPool:
    size = int(attention.head_dim)
    layers, heads = int(attention.layer_idx) + 1, attention.k_proj.out_features // size
    shape = CacheShape(layers, heads, size, dtype=dtype)
    budget = len(_LENGTHS) * _PAGE * shape.bytes_per_slot
    return KvPool(shape, budget_bytes=budget, page_size=_PAGE, device=device)


def _recurrent(
    mixer: Any, dtype: torch.dtype, device: torch.device, kernels: TreeKernels | None
) -> HybridPool:
    """States of this layer alone; what its pages hold matters to nobody."""
    shape = StateShape(
        (int(mixer.layer_idx),), mixer.num_k_heads, mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim,
        mixer.conv_kernel_size, dtype,
    )  # fmt: skip
    states = StatePool(shape, PoolSize(_STATES, len(_LENGTHS) * _ROWS), device, kernels)
    pages = CacheShape(1, 1, 1, dtype=dtype)
    budget = len(_LENGTHS) * _PAGE * pages.bytes_per_slot
    return HybridPool(pages, states, budget_bytes=budget, page_size=_PAGE, device=device)


def _held(pool: KvPool) -> list[torch.Tensor]:
    """What earlier steps left in a pool."""
    states = [] if pool.states is None else [pool.states.matrices, pool.states.tails]
    return [pool.keys_values, *states]


def _noted(pool: KvPool, rows: torch.Tensor) -> list[torch.Tensor]:
    """What a step left for its commit, of some rows."""
    if pool.states is None:
        return []
    stash = pool.states.stash.layer(0)
    return [part[rows] for part in (stash.keys, stash.updates, stash.decays, stash.inputs)]


def _turned(mixer: Any) -> int:
    """Columns of a head that are turned; of a recurrent layer any."""
    rope = getattr(getattr(mixer, "config", None), "rope_parameters", None) or {}
    return int(getattr(mixer, "head_dim", _PAGE) * rope.get("partial_rotary_factor", 1.0))


@contextmanager
def _own_attention(layer: Any) -> Iterator[None]:
    """Let a layer run over `attention.sdpa`, whatever it was loaded with."""
    config = getattr(mixer_of(layer), "config", None)
    if config is None:  # a recurrent layer has none
        yield
        return
    loaded_with = config._attn_implementation  # noqa: SLF001 - transformers has no public name for it
    config._attn_implementation = sdpa.register()  # noqa: SLF001
    try:
        yield
    finally:
        config._attn_implementation = loaded_with  # noqa: SLF001
