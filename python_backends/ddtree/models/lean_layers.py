"""Decoder layers of Llama-like models on a CPU: the same operators with little else around them.

With a few rows each of a layer's operators takes a few dozen microseconds, and calling modules, passing
options on and turning queries and keys one after the other take half as long again. A lean layer calls the
packed products in the order of its class, turns queries and keys together, and goes straight to
`attention.sdpa`. The model's classes, its module names and the hooks on its layers stay.

Nothing is assumed that the exact class of a layer does not say (`layer_kinds`), and the first one of every
kind is run both ways when it is made: one that does not give the same bits is left as it is. Knows no
sessions.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ddtree.attention import sdpa
from ddtree.attention.plan import Segment, StepPlan
from ddtree.device.layer_kinds import LayerKind, has_gates, kind_of
from ddtree.kv_cache import CacheShape, KvPool
from ddtree.tree_mask import ancestor_bits, expand

_LOG = logging.getLogger(__name__)
_COMMITTED = 5  # slots of the trial's one page, before its four rows
_PAGE = 16
_PARENTS, _DEPTHS = (0, 0, 1), (0, 1, 1, 2)  # of nodes 1, 2, 3; of the root and them


class _Angles:
    """A step's cosines and sines as layers use them, worked out by the first one."""

    def __init__(self) -> None:
        self._sines: torch.Tensor | None = None
        self._ready: tuple[torch.Tensor, torch.Tensor] | None = None

    def of(self, cosines: torch.Tensor, sines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both for every head, `[1, R, 1, head_dim]`; sines carry the signs of a rotation."""
        if self._ready is None or self._sines is not sines:
            first, second = sines.chunk(2, dim=-1)
            signed = torch.cat((-first, second), dim=-1)
            self._sines, self._ready = sines, (cosines.unsqueeze(2), signed.unsqueeze(2))
        return self._ready


class LeanLayer:
    """The forward of one decoder layer: lean under a `StepPlan`, the class's own otherwise."""

    def __init__(self, layer: Any, kind: LayerKind, angles: _Angles) -> None:
        """Take a layer of a known kind whose modules were packed since."""
        attention, mlp = layer.self_attn, layer.mlp
        self._layer, self._attention, self._angles = layer, attention, angles
        self._window, self._scaling = kind.window, float(attention.scaling)
        self._size = int(attention.head_dim)
        self._queries = attention.q_proj.columns.stop // self._size
        self._turned = attention.k_proj.columns.stop // self._size  # heads of queries and keys
        # Their forwards and not the modules: nothing hooks them, and a call of a module costs as much as it.
        self._before, self._between = layer.input_layernorm.forward, layer.post_attention_layernorm.forward
        self._inputs, self._output = attention.q_proj.merged.forward, attention.o_proj.forward
        self._gate_up, self._down = mlp.gate_proj.merged.forward, mlp.down_proj.forward
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self._head_norms = [norm.forward for norm in norms if norm is not None]

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Run the layer on `[1, R, H]`; arguments are those of transformers' decoder layers."""
        plan = options.get("ddtree_plan")
        if not isinstance(plan, StepPlan):
            return type(self._layer).forward(self._layer, hidden_states, *args, **options)
        mixed = self._mix(self._inputs(self._before(hidden_states)), options["position_embeddings"], plan)
        hidden = hidden_states + self._output(mixed)
        gates, ups = self._gate_up(self._between(hidden)).chunk(2, dim=-1)
        return hidden + self._down(functional.silu(gates) * ups)

    def _mix(
        self,
        packed: torch.Tensor,  # [1, R, (heads + 2 * kv_heads) * head_dim]
        angles: tuple[torch.Tensor, torch.Tensor],  # cosines and sines, each [1, R, head_dim]
        plan: StepPlan,
    ) -> torch.Tensor:
        """Attention of packed queries, keys and values, `[1, R, heads * head_dim]`."""
        rows = packed.shape[1]
        heads = packed.view(1, rows, -1, self._size)
        turned = heads[:, :, : self._turned]
        if self._head_norms:
            of_queries, of_keys = self._head_norms
            queries, keys = turned[:, :, : self._queries], turned[:, :, self._queries :]
            turned = torch.cat((of_queries(queries), of_keys(keys)), dim=2)
        cosines, sines = self._angles.of(*angles)
        # The halves change places, and the sines have the sign that one of them would get.
        turned = (turned * cosines).add_(turned.roll(self._size // 2, -1).mul_(sines))
        mixed, _ = sdpa.tree_attention(
            self._attention,
            turned[:, :, : self._queries].transpose(1, 2),
            turned[:, :, self._queries :].transpose(1, 2),
            heads[:, :, self._turned :].transpose(1, 2),
            None,
            ddtree_plan=plan,
            scaling=self._scaling,
            sliding_window=self._window,
        )
        return mixed.reshape(1, rows, -1)


def find(layers: nn.ModuleList) -> Mapping[int, LayerKind]:
    """Which layers can become lean, by their place; asked before their modules are packed."""
    found = {place: kind_of(layer) for place, layer in enumerate(layers)}
    return {
        place: kind
        for place, kind in found.items()
        if kind is not None and not kind.is_recurrent and not has_gates(layers[place].self_attn)
    }


def install(layers: nn.ModuleList, found: Mapping[int, LayerKind]) -> int:
    """Make what was found lean, once it was packed; gives how many layers are."""
    angles, is_right, made = _Angles(), dict[LayerKind, bool](), 0
    for place, kind in found.items():
        layer: Any = layers[place]
        if kind not in is_right:
            is_right[kind] = _gives_the_same(layer, kind)
        if is_right[kind]:
            layer.forward = LeanLayer(layer, kind, angles)
            made += 1
    return made


@torch.inference_mode()
def _gives_the_same(layer: Any, kind: LayerKind) -> bool:
    """Whether both forms of a layer give and store the same bits for a small tree."""
    try:
        # Its class's forward, and not a call: who hooks the layer is told of no trial.
        forms = (partial(type(layer).forward, layer), LeanLayer(layer, kind, _Angles()))
        own, other = (_run(layer, form, kind) for form in forms)
        is_same = all(map(torch.equal, own, other))
    except Exception as error:  # noqa: BLE001 - whatever a version of transformers does, there is another way
        _LOG.warning("decoder layers keep their own forward: %s", " ".join(str(error).split())[:400])
        return False
    if not is_same:
        _LOG.warning("decoder layers keep their own forward: %s gives other numbers", type(layer).__name__)
    return is_same


def _run(layer: Any, form: Any, kind: LayerKind) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of a trial step, and the keys and values that it left."""
    attention, generator = layer.self_attn, torch.Generator().manual_seed(0)
    size, rows = int(attention.head_dim), len(_DEPTHS)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(kind.dtype)

    kv_heads = attention.k_proj.columns.stop // size - attention.q_proj.columns.stop // size
    shape = CacheShape(int(attention.layer_idx) + 1, kv_heads, size, feature_size=0, dtype=kind.dtype)
    budget = shape.bytes_per_slot * _PAGE
    pool = KvPool(shape, budget_bytes=budget, page_size=_PAGE, device=kind.device)
    pool.keys_values.copy_(normal(*pool.keys_values.shape))
    pages = pool.reserve(_PAGE)
    assert pages is not None, "the pool is one page and empty"
    parents = torch.tensor([_PARENTS])
    sees = expand(ancestor_bits(parents, torch.tensor([len(_PARENTS)])))[0]
    segment = Segment(0, rows, pages, _COMMITTED, torch.tensor(_DEPTHS), sees)
    plan = StepPlan.build(pool, (segment,))
    hidden = normal(1, rows, attention.o_proj.out_features)
    angles = (normal(1, rows, size), normal(1, rows, size))
    output = form(hidden, position_embeddings=angles, attention_mask=None, use_cache=False, ddtree_plan=plan)
    return output, pool.keys_values
