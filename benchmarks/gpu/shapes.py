"""Pairs of target and drafter with the sizes of public ones and random weights, made on the device itself.

What a step costs does not depend on what the weights say. Nothing is read from disk and nothing passes
through the host's memory, so that even 27 billion parameters are there in seconds. What is drafted is noise,
so nothing here says how many tokens are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3_5TextConfig, Qwen3Config

from ddtree.attention import sdpa
from ddtree.device.matmul_choice import MatmulChooser
from ddtree.models import gated_delta_net
from ddtree.models.dflash import DFlashDraft, FeatureProjection
from ddtree.models.draft_config import DraftConfig
from ddtree.models.rotary import Rotary
from ddtree.models.target import TargetModel
from ddtree.recurrent.state_pool import StateBudget

_STD = 0.02
_STATE_BYTES = 4 << 30
_QWEN3_TAPS = (1, 9, 17, 25, 33)
_QWEN36_TAPS = (1, 16, 31, 46, 61)


@dataclass(frozen=True)
class PairShape:
    """Sizes of a target and its drafter."""

    name: str
    target: PretrainedConfig
    draft_values: Mapping[str, Any]  # the drafter's `config.json`, as z-lab writes it

    @property
    def draft(self) -> DraftConfig:
        """The drafter's configuration."""
        return DraftConfig.from_values(dict(self.draft_values))


@dataclass(frozen=True)
class RandomPair:
    """A target and its drafter on one device."""

    shape: PairShape
    target: TargetModel
    draft: DFlashDraft
    projection: FeatureProjection
    chooser: MatmulChooser  # of products; nothing is chosen before somebody asks it to

    @property
    def plain_bytes(self) -> int:
        """Weights that a step of the target reads, whatever it verifies; of the embedding only some rows."""
        embedding = self.target.embedding
        total = _bytes_of(self.target.model)
        # A tied table is the output head too, which is read whole.
        is_tied = self.target.model.get_output_embeddings().weight.data_ptr() == embedding.data_ptr()
        return total if is_tied else total - embedding.numel() * embedding.element_size()

    @property
    def draft_bytes(self) -> int:
        """Weights that a draft reads: the drafter's, and the target's output head."""
        return _bytes_of(self.draft) + _bytes_of(self.target.head)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one committed token, which every step reads."""
        return self.target.cache_shape(0).bytes_per_slot

    @property
    def state_bytes(self) -> int:
        """States of recurrent layers of one sequence, which every step reads; 0 without such layers."""
        shape = self.target.state_shape()
        return 0 if shape is None else shape.bytes_per_state


def _bytes_of(module: nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in module.parameters())


def qwen3_8b() -> PairShape:
    """Qwen3-8B and z-lab's drafter for it."""
    sizes = _sizes(hidden=4096, inner=12288, heads=32, kv_heads=8, head_dim=128, vocab=151936)
    return _qwen3("Qwen3-8B shape", sizes, layers=36, draft_layers=5, taps=_QWEN3_TAPS)


def tiny_qwen3(vocab: int = 512) -> PairShape:
    """The same kind of pair, small enough for a test on a CPU; `vocab` ids, as many as its tokenizer has."""
    sizes = _sizes(hidden=64, inner=96, heads=4, kv_heads=2, head_dim=16, vocab=vocab)
    return _qwen3("tiny Qwen3 shape", sizes, layers=3, draft_layers=2, taps=(0, 1))


def smollm2_135m() -> PairShape:
    """The demo pair's sizes, with Qwen3's norms of query and key heads besides."""
    sizes = _sizes(hidden=576, inner=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152)
    return _qwen3("SmolLM2-135M sizes", sizes, layers=30, draft_layers=4, taps=(1, 8, 14, 20, 27))


def thin_qwen3_8b(layers: int) -> PairShape:
    """Qwen3-8B's widths with fewer layers: its messages between stages, in a checkpoint that loads sooner."""
    sizes = _sizes(hidden=4096, inner=12288, heads=32, kv_heads=8, head_dim=128, vocab=151936)
    return _qwen3(f"Qwen3-8B widths, {layers} layers", sizes, layers=layers, draft_layers=5, taps=range(5))


def qwen36_27b(layers: int = 64) -> PairShape:
    """Qwen3.6-27B: three Gated DeltaNet layers to one of attention. Its drafter's heads are assumed."""
    return _hybrid(
        f"Qwen3.6-27B shape, {layers} of 64 layers",
        _sizes(hidden=5120, inner=17408, heads=24, kv_heads=4, head_dim=256, vocab=248320),
        _sizes(hidden=5120, inner=17408, heads=32, kv_heads=8, head_dim=128, vocab=248320),
        layers=layers,
        linear=(16, 48, 128, 128),
        taps=tuple(tap for tap in _QWEN36_TAPS if tap < layers),
    )


def tiny_hybrid() -> PairShape:
    """A hybrid small enough for a test on a CPU."""
    target = _sizes(hidden=64, inner=96, heads=4, kv_heads=2, head_dim=16, vocab=512)
    return _hybrid("tiny hybrid shape", target, target, layers=4, linear=(2, 4, 16, 16), taps=(0, 2))


def make_pair(shape: PairShape, device: torch.device, dtype: torch.dtype) -> RandomPair:
    """Make target, drafter and projection on the device."""
    attention = sdpa.register()
    with torch.device(device):  # transformers' own initialisation then runs there
        model = AutoModelForCausalLM.from_config(shape.target, dtype=dtype, attn_implementation=attention)
    model.eval().requires_grad_(False)
    gated_delta_net.install(model)
    most = StateBudget(budget_bytes=_STATE_BYTES if device.type == "cuda" else 64 << 20)
    target = TargetModel(model, shape.draft.target_layer_ids, most)
    config = shape.draft
    rotary = Rotary(config).to(device)
    with torch.device("meta"):
        draft, projection = DFlashDraft(config, rotary), FeatureProjection(config)
    filled = _filled(draft, device, dtype), _filled(projection, device, dtype)
    return RandomPair(shape, target, *filled, _chooser(device))


def _chooser(device: torch.device) -> MatmulChooser:
    if device.type != "cuda":
        return MatmulChooser(device, None)
    # Kernels: not everywhere installed. What serving measured before on this card is used, and the reverse.
    from ddtree.device.accelerate import chooser_for

    return chooser_for(device)


def random_weights(
    shapes: Mapping[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Tensors of the given shapes: norms are ones, everything else is small noise."""
    return {
        name: torch.ones(size, dtype=dtype, device=device)
        if "norm" in name
        else torch.empty(size, dtype=dtype, device=device).normal_(std=_STD)
        for name, size in shapes.items()
    }


def _filled(module: Any, device: torch.device, dtype: torch.dtype) -> Any:
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    module.load_state_dict(random_weights(shapes, device, dtype), assign=True)
    return module.requires_grad_(False).eval()


def _sizes(
    *, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, vocab: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }


def _qwen3(
    name: str, sizes: dict[str, Any], *, layers: int, draft_layers: int, taps: Sequence[int]
) -> PairShape:
    target = Qwen3Config(
        **sizes, num_hidden_layers=layers, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1
    )
    return PairShape(name, target, _draft(sizes, ["full_attention"] * draft_layers, layers, taps))


def _hybrid(
    name: str,
    sizes: dict[str, Any],
    draft_sizes: dict[str, Any],
    *,
    layers: int,
    linear: tuple[int, int, int, int],  # key heads, value heads, key size, value size
    taps: tuple[int, ...],
) -> PairShape:
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    target = Qwen3_5TextConfig(
        **{**sizes, "rope_parameters": rope},
        num_hidden_layers=layers,
        layer_types=["full_attention" if at % 4 == 3 else "linear_attention" for at in range(layers)],
        linear_num_key_heads=linear[0],
        linear_num_value_heads=linear[1],
        linear_key_head_dim=linear[2],
        linear_value_head_dim=linear[3],
        tie_word_embeddings=False,
        eos_token_id=1,
    )
    kinds = ["sliding_attention"] * 4 + ["full_attention"]
    return PairShape(name, target, _draft(draft_sizes, kinds, layers, taps))


def _draft(
    sizes: dict[str, Any], kinds: Sequence[str], target_layers: int, taps: Sequence[int]
) -> dict[str, Any]:
    is_sliding = "sliding_attention" in kinds
    return {
        **sizes,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": len(kinds),
        "layer_types": list(kinds),
        "use_sliding_window": is_sliding,
        "sliding_window": 2048 if is_sliding else None,
        "attention_bias": False,
        "hidden_act": "silu",
        "num_target_layers": target_layers,
        "block_size": 16,
        "dflash_config": {"mask_token_id": sizes["vocab_size"] - 1, "target_layer_ids": list(taps)},
    }
