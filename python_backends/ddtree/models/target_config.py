"""What a target's configuration says that trees depend on, and the targets that are refused by it.

Knows values of transformers' configurations; reads no weights and runs nothing (`probe` does).
"""

from __future__ import annotations

from typing import Any

from ddtree.errors import CheckpointError
from ddtree.kv_cache import CacheShape

_LAYER_TYPES = ("full_attention", "sliding_attention")


def check_target_config(config: Any) -> None:
    """Refuse what is known from the configuration alone not to work.

    Args:
        config: the target's transformers configuration.

    Raises:
        CheckpointError: one line with what was expected and what was found, without the file's name.
    """
    text = config.get_text_config()
    kinds = sorted(set(getattr(text, "layer_types", None) or _LAYER_TYPES[:1]) - set(_LAYER_TYPES))
    if kinds:
        raise CheckpointError(
            f"expected layer_types of {', '.join(_LAYER_TYPES)}, found {', '.join(kinds)}; a draft tree can "
            "only be verified where every layer is attention over single tokens"
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
    """Layers, KV heads and head size."""
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    head_dim = getattr(text, "head_dim", None) or int(text.hidden_size) // heads
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    return CacheShape(int(text.num_hidden_layers), kv_heads, int(head_dim))


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
