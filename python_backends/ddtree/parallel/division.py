"""What of a target cannot be divided among ranks, said before anything is started.

Knows configurations; loads no weights and starts no process.
"""

from __future__ import annotations

from typing import Any

from ddtree.errors import ConfigError
from ddtree.models import target_config
from ddtree.models.loading import has_quantisation

# Sizes that are divided among the ranks, as configurations name them and as we do.
_DIVIDED = {
    "num_attention_heads": "attention heads",
    "vocab_size": "vocabulary entries",
    "intermediate_size": "MLP columns",
    "moe_intermediate_size": "MLP columns of an expert",
}
_HEADS = ("q_proj", "k_proj", "v_proj")


def check_division(config: Any, world: int) -> None:
    """Refuse a target that `world` ranks cannot share.

    Args:
        config: the target's transformers configuration.
        world: ranks.

    Raises:
        ConfigError: what is in the way, and what `tensor_parallel` may be.
    """
    text = config.get_text_config()
    if target_config.recurrent_layers(config):
        raise _refusal(
            "needs a target whose every layer is attention", world, f"{text.model_type} has others"
        )
    if has_quantisation(config):
        raise _refusal("needs weights that are not quantised", world, "config.json has a quantization_config")
    plan = getattr(text, "base_model_tp_plan", None) or {}
    for name in _HEADS:
        styles = {style for key, style in plan.items() if key.endswith(f".self_attn.{name}")}
        if styles != {"colwise"}:
            found = "has none" if not plan else f"does not divide {name} by heads"
            raise _refusal(
                "needs a target that transformers has a tensor-parallel plan for", world,
                f"its plan for {text.model_type} {found}",
            )  # fmt: skip
    sizes = {"KV heads": target_config.attention_sizes(config).kv_heads}
    for name, words in _DIVIDED.items():
        if isinstance(size := getattr(text, name, None), int):
            sizes[words] = size
    for words, size in sizes.items():
        if size % world:
            possible = [n for n in range(1, sizes["KV heads"] + 1) if not any(s % n for s in sizes.values())]
            raise ConfigError(
                f"tensor_parallel must divide the target's {size} {words}, got {world}; "
                f"set it to {' or '.join(map(str, possible))}"
            )


def _refusal(rule: str, world: int, found: str) -> ConfigError:
    return ConfigError(f"tensor_parallel above 1 {rule}, got {world} where {found}; set it to 1")
