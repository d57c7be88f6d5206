"""The drafter's pass on the device: no look at the host, and launches that follow from shapes alone.

    begin ─ layers: norm, qkv, turn, attention, output, norm, gate up, gate, down ─ norm ─ head ─ top

It computes what `DFlashDraft` and the drafter stage compute, from the same modules, over the rows of a step
instead of sessions; those are its reference in tests and the path of a CPU. Context is projected once, when
tokens are committed (`extend`), and read from the pool through page tables; the block's own keys and values
stay in the packed rows, where attention finds them.

This module knows no sessions, no requests and no graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddtree.device.kernels.attention import Scoring, tree_attention
from ddtree.device.kernels.draft_rows import Angles, ContextKv, Start, begin, convolve, keep_context
from ddtree.device.kernels.layer import Heads, add_norm, gate, turn
from ddtree.device.kernels.top import TopChoice, top_candidates
from ddtree.device.rows import DeviceRows, Sight
from ddtree.kv_cache import KvPool
from ddtree.models.dflash import DFlashDraft
from ddtree.models.dflash2 import BlockConvolution

if TYPE_CHECKING:
    from ddtree.device.fused_layers import MakeLinear  # imports transformers

# Per position, of captured passes: picking more takes longer. A whole round's trees are made of these; who
# asks a drafter for more gets it launch by launch.
MOST_CANDIDATES = 64

_Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class DeviceCandidates:
    """The best candidates of each drafted position, best first; rows of empty places mean nothing.

    Of equally likely tokens the one that the head names first comes first.
    """

    ids: torch.Tensor  # [S, D, K] int32 tokens of the target
    log_probs: torch.Tensor  # [S, D, K] float32
    edge_log_probs: torch.Tensor | None  # [S, D, K, K] float32, see `DraftResult`


@dataclass(frozen=True)
class _Products:
    """The matrix products of a layer."""

    qkv: _Product
    output: _Product
    gate_up: _Product  # silu of the gate times the other half
    down: _Product

    @classmethod
    def of(cls, layer: Any, linear: MakeLinear | None) -> _Products:
        attention, mlp = layer.self_attn, layer.mlp
        if linear is None:
            return cls(
                attention.qkv_proj, attention.o_proj, lambda rows: gate(mlp.gate_up_proj(rows)), mlp.down_proj
            )
        return cls(
            linear(attention.qkv_proj.weight, attention.qkv_proj.bias),
            linear(attention.o_proj.weight, attention.o_proj.bias),
            linear(mlp.gate_up_proj.weight, None, gated=True),
            linear(mlp.down_proj.weight, None),
        )


@dataclass(frozen=True)
class _Layer:
    """A layer of the drafter and what its kernels must be told."""

    modules: Any  # input_layernorm, post_attention_layernorm, attention_conv, mlp_conv
    products: _Products
    heads: Heads
    sight: Sight
    scoring: Scoring
    keys: torch.Tensor  # [slots, kv_heads, head_dim] of the pool
    values: torch.Tensor


@dataclass(frozen=True)
class _Convolved:
    """A sub-layer's input, and what the convolution of its output needs."""

    rows: torch.Tensor  # [S * B, H]
    convolution: BlockConvolution | None
    kernels: torch.Tensor | None  # [S * B, ...] the rows' part of both kernels


class DeviceDraft:
    """The DFlash drafter (v1 and 2) over device rows. One call at a time."""

    def __init__(
        self,
        model: DFlashDraft,
        embedding: torch.Tensor,
        head: nn.Module,
        target_ids: torch.Tensor | None,
        pool: KvPool,
        *,
        top: TopChoice = top_candidates,
        linear: MakeLinear | None = None,
    ) -> None:
        """Look up what stays the same from pass to pass.

        Args:
            model: the drafter's layers, on the device and in the dtype of `embedding`.
            embedding: the target's token embedding `[V, H]`.
            head: the output head, `[n, H]` to `[n, V]`.
            target_ids: `[V]` int64 when the head is the draft's own, the token that each of its outputs is.
            pool: the drafter's context cache.
            top: what picks the candidates.
            linear: makes the matrix products of layers and context; None: the model's own modules.
        """
        config = model.config
        self._model, self._config, self._pool, self._top = model, config, pool, top
        self._embedding, self._head, self._target_ids = embedding.contiguous(), head, target_ids
        at_zero = model.rotary(torch.zeros(1, device=embedding.device), torch.float32)
        # Yarn stretches sine and cosine; the cosine of no turn at all says by how much.
        scale = at_zero.cos.reshape(-1)[:1].contiguous()
        self._angles = Angles(model.rotary.inverse_frequencies, scale)
        projection = model.context_kv_proj
        self._context: _Product = projection if linear is None else linear(projection.weight, projection.bias)
        self._layers = tuple(self._describe(index, linear) for index in range(len(config.layers)))

    def _describe(self, index: int, linear: MakeLinear | None) -> _Layer:
        config, modules = self._config, self._model.layers[index]
        attention = config.layers[index]
        norms: Any = modules.self_attn
        return _Layer(
            modules=modules,
            products=_Products.of(modules, linear),
            heads=Heads(
                config.num_heads, config.num_kv_heads, config.head_dim,
                norms.qk_norm[0], norms.qk_norm[config.num_heads], config.rms_norm_eps,
            ),
            sight=Sight.CAUSAL if attention.is_causal else Sight.BLOCK,
            scoring=Scoring(config.head_dim**-0.5, attention.window),
            keys=self._pool.keys_values[index, 0],
            values=self._pool.keys_values[index, 1],
        )  # fmt: skip

    @property
    def device(self) -> torch.device:
        """Where the pass runs."""
        return self._embedding.device

    @property
    def has_edges(self) -> bool:
        """Whether candidates are scored given their parent."""
        return self._model.candidate_selector is not None

    def width(self, wanted: int) -> int:
        """Candidates per position that `draft` gives when so many are wanted, see `DFlashDraft.width`."""
        return self._model.width(wanted, self._embedding, self._target_ids)

    def room_for_features(self, places: int, rows: int) -> torch.Tensor:
        """Zeros where `extend` can read context features, `[S, M, H]`."""
        return self._embedding.new_zeros((places, rows, self._config.hidden_size))

    @torch.inference_mode()
    def draft(self, roots: torch.Tensor, rows: DeviceRows, width: int) -> DeviceCandidates:
        """Run the pass and pick the best candidates.

        The block always has the trained width: fewer masks would change every proposal of a drafter that is
        not causal.

        Args:
            roots: `[S]` int64 root tokens; those of empty places may be anything.
            rows: blocks of B rows, B the trained block size: `lengths` are those of the context, `counts` B
                or 0 for an empty place, `depths` 0..B-1. Slots and bits are not read.
            width: K, candidates per position wanted, see `width`.
        """
        places, size = rows.places, self._config.block_size
        assert rows.rows == size, f"a block has {size} rows, not {rows.rows}"
        hidden = self._hidden(roots, rows).view(places, size, -1)[:, 1:]
        drafted = hidden.reshape(places * (size - 1), -1)
        logits = self._model.finish_logits(self._head(drafted))
        best = self._top(logits, self.width(width))
        ids = best.ids if self._target_ids is None else self._target_ids[best.ids]
        ids, log_probs = ids.view(places, size - 1, -1), best.log_probs.view(places, size - 1, -1)
        selector = self._model.candidate_selector
        edges = None
        if selector is not None:
            # Scores are normalised over the children, so log-probabilities do as well as logits.
            roots = torch.where(rows.counts > 0, roots, self._config.mask_token_id)
            edges = selector.edge_log_probs(hidden, ids, log_probs, roots)
        return DeviceCandidates(ids.int(), log_probs, edges)

    @torch.inference_mode()
    def extend(self, features: torch.Tensor, counts: torch.Tensor, rows: DeviceRows) -> None:
        """Add new context of each place behind what is there; `lengths` are the caller's to move on.

        Args:
            features: `[S, M, H]` projected context features, in the order of their tokens.
            counts: `[S]` int32, how many of a place's M are new context, the first ones; the rest may be
                anything and is stored nowhere.
            rows: page table, and lengths before these tokens.
        """
        packed = self._context(features.flatten(0, 1))
        norm = self._model.context_k_norm.flatten(0, 1)
        context = ContextKv(packed, norm, self._config.rms_norm_eps, self._angles)
        keep_context(context, counts, rows, self._pool.keys_values)

    def _hidden(self, roots: torch.Tensor, rows: DeviceRows) -> torch.Tensor:
        """The block's hidden states `[S * B, H]` after the final norm."""
        config = self._config
        start = begin(
            roots, self._embedding, rows, self._angles,
            mask_token=config.mask_token_id, scale=config.input_embedding_scale,
        )  # fmt: skip
        eps, hidden, update = config.rms_norm_eps, start.hidden, None
        for layer in self._layers:
            modules = layer.modules
            normed, hidden = add_norm(hidden, update, modules.input_layernorm.weight, eps)
            inner = self._before(modules.attention_conv, normed)
            update = self._after(inner, self._attend(layer, inner.rows, start, rows))
            normed, hidden = add_norm(hidden, update, modules.post_attention_layernorm.weight, eps)
            inner = self._before(modules.mlp_conv, normed)
            gated = layer.products.gate_up(inner.rows)
            update = self._after(inner, layer.products.down(gated))
        normed, _ = add_norm(hidden, update, self._model.norm.weight, eps)
        return normed

    def _attend(self, layer: _Layer, inputs: torch.Tensor, start: Start, rows: DeviceRows) -> torch.Tensor:
        heads = layer.heads
        packed = layer.products.qkv(inputs)
        turn(packed, start.cos, start.sin, heads, layer.keys, layer.values, start.nowhere)
        by_head = packed.view(rows.places, rows.rows, -1, heads.size)
        query, keys, values = by_head.split((heads.queries, heads.keys, heads.keys), 2)
        seen = tree_attention(
            query, keys, values, layer.keys, layer.values, rows, layer.sight, layer.scoring
        )  # fmt: skip
        return layer.products.output(seen.view(len(inputs), -1))

    def _before(self, convolution: BlockConvolution | None, normed: torch.Tensor) -> _Convolved:
        """Pass a sub-layer's input through the first of DFlash 2's convolutions, where there are any."""
        if convolution is None:
            return _Convolved(normed, None, None)
        kernels = convolution.kernel_projection(normed)
        size = self._config.block_size
        return _Convolved(convolve(normed, kernels, convolution.base_kernel, 0, size), convolution, kernels)

    def _after(self, inner: _Convolved, output: torch.Tensor) -> torch.Tensor:
        """Pass its output through the second."""
        if inner.convolution is None or inner.kernels is None:
            return output
        return convolve(output, inner.kernels, inner.convolution.base_kernel, 1, self._config.block_size)
