"""What a target's configuration says that trees depend on, and the targets that are refused by it.

Knows values of transformers' configurations; reads no weights and runs nothing (`probe` does).
"""

from __future__ import annotations

from typing import Any

import torch

from ddtree.errors import CheckpointError
from ddtree.kv_cache import CacheShape
from ddtree.recurrent.state_pool import StateShape

_LAYER_TYPES = ("full_attention", "sliding_attention")
_RECURRENT = "linear_attention"
# Whose linear attention is the Gated DeltaNet that `gated_delta_net` knows; others have the name in common.
_GATED_DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def check_target_config(config: Any) -> None:
    """Refuse what is known from the configuration alone not to work.

    Args:
        config: the target's transformers configuration.

    Raises:
        CheckpointError: one line with what was expected and what was found, without the file's name.
    """
    text = config.get_text_config()
    known = {*_LAYER_TYPES, _RECURRENT} if text.model_type in _GATED_DELTA_NETS else set(_LAYER_TYPES)
    kinds = sorted(set(getattr(text, "layer_types", None) or _LAYER_TYPES[:1]) - known)
    if kinds:
        raise CheckpointError(
            f"expected layer_types of {', '.join(_LAYER_TYPES)}, found {', '.join(kinds)}; a draft tree can "
            "only be verified where every layer is attention over single tokens, or the linear attention of "
            f"{', '.join(_GATED_DELTA_NETS)}"
        )
    try:
        attention_sizes(config)
        context_length(config)
    except (AttributeError, RuntimeError) as error:  # the latter where sizes differ by layer (Gemma 4)
        reason = " ".join(str(error).split())[:160]
        raise CheckpointError(
            f"expected a decoder-only language model with one attention size for all layers ({reason}), "
            f"found {type(text).__name__}"
        ) from None


def attention_sizes(config: Any) -> CacheShape:
    """Layers that have pages, KV heads and head size."""
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    head_dim = getattr(text, "head_dim", None) or int(text.hidden_size) // heads
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    layers = int(text.num_hidden_layers) - len(recurrent_layers(config))
    return CacheShape(layers, kv_heads, int(head_dim))


def recurrent_layers(config: Any) -> tuple[int, ...]:
    """Decoder layers that keep a state instead of pages."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    return tuple(layer for layer, kind in enumerate(kinds) if kind == _RECURRENT)


def state_shape(config: Any, dtype: torch.dtype) -> StateShape | None:
    """What recurrent layers keep of a session of a target served in `dtype`; None where there are none."""
    text, layers = config.get_text_config(), recurrent_layers(config)
    if not layers:
        return None
    return StateShape(
        layers,
        key_heads=int(text.linear_num_key_heads),
        value_heads=int(text.linear_num_value_heads),
        key_dim=int(text.linear_key_head_dim),
        value_dim=int(text.linear_value_head_dim),
        kernel=int(text.linear_conv_kernel_dim),
        dtype=dtype,
    )


def context_length(config: Any) -> int:
    """Most positions the target was made for.

    Beyond `original_max_position_embeddings`, longrope turns all positions differently, those before it too,
    depending on the longest sequence of a batch: sequences would change each other. So it ends there.
    """
    text = config.get_text_config()
    positions = int(text.max_position_embeddings)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return min(positions, int(rope.get("original_max_position_embeddings") or positions))
    return positions


def rope_thetas(config: Any) -> tuple[float, ...]:
    """The RoPE bases of the target's layers: several where layer types differ, none when unsaid."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return tuple(sorted({float(part["rope_theta"]) for part in parts if part.get("rope_theta") is not None}))


def sliding_window(config: Any) -> int | None:
    """The window of the target's sliding layers; None when it has none."""
    text = config.get_text_config()
    has_some = _LAYER_TYPES[1] in (getattr(text, "layer_types", None) or ())
    window = getattr(text, "sliding_window", None)
    is_used = getattr(text, "use_sliding_window", True)
    return int(window) if window and is_used and (has_some or not hasattr(text, "layer_types")) else None
