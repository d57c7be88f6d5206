"""A DFlash v1 drafter's configuration, from the values of a z-lab `config.json`.

The file is a Qwen3 configuration whose `dflash_config` holds the drafting values. Those are looked up as the
public `dflash` 0.1.0 does: `dflash_config` first, then the root of the file, then a default. Values of other
formats that would change what a draft computes are refused instead of ignored.

This module knows values, not files: whoever read the file puts its name in front of an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from ddtree.errors import CheckpointError

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_OTHER_FORMATS = (
    "attention_sink_bias",
    "causal_head",
    "conv_kernel_size",
    "sample_from_anchor",
    "selector_rank",
)


@dataclass(frozen=True)
class LayerAttention:
    """What the block's rows of one layer see of the context and of the block."""

    is_causal: bool
    window: int | None  # a row sees what is less than this many positions away; None: everything


@dataclass(frozen=True)
class DraftConfig:
    """What a drafter is.

    Raises:
        CheckpointError: values contradict each other; the message does not name the file.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    max_position_embeddings: int
    rope: Mapping[str, Any]  # rope_type, rope_theta and what the type needs, as transformers names them
    layers: tuple[LayerAttention, ...]
    num_target_layers: int
    target_layer_ids: tuple[int, ...]  # L is the output of the target's decoder layer L, counted from 0
    block_size: int
    mask_token_id: int
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None  # None: logits are not capped

    def __post_init__(self) -> None:
        last_tap = self.num_target_layers - 1
        taps = self.target_layer_ids
        _require("block_size of 2 or more", self.block_size >= 2, self.block_size)
        _require("an even head_dim", self.head_dim % 2 == 0, self.head_dim)
        _require(
            "num_attention_heads to be a multiple of num_key_value_heads",
            self.num_heads % self.num_kv_heads == 0,
            f"{self.num_heads} and {self.num_kv_heads}",
        )
        _require(
            f"target_layer_ids between 0 and {last_tap} (num_target_layers - 1)",
            bool(taps) and all(0 <= tap <= last_tap for tap in taps),
            list(taps),
        )

    @property
    def feature_size(self) -> int:
        """Width of a context feature before its projection: taps times hidden size."""
        return len(self.target_layer_ids) * self.hidden_size

    @classmethod
    def from_values(cls, values: Any) -> DraftConfig:
        """Build the configuration from a parsed `config.json`.

        Raises:
            CheckpointError: one line, what was expected and what was found, without the file's name.
        """
        _require("a JSON object", isinstance(values, dict), type(values).__name__)
        _refuse_other_formats(values)
        num_layers = _whole("num_hidden_layers", values.get("num_hidden_layers"))
        num_target_layers = _whole("num_target_layers", values.get("num_target_layers"))
        taps = drafting_value(values, "target_layer_ids", default_taps(num_target_layers, num_layers))
        _require("target_layer_ids to be a list of numbers", isinstance(taps, list), taps)
        softcap = drafting_value(values, "final_logit_softcapping", None) or 0.0
        hidden_act = values.get("hidden_act", "silu")
        _require("hidden_act 'silu'", hidden_act == "silu", hidden_act)

        def size(name: str) -> int:
            return _whole(name, values.get(name))

        def factor(name: str) -> float:
            return _real(name, drafting_value(values, name, 1.0))

        return cls(
            hidden_size=size("hidden_size"),
            intermediate_size=size("intermediate_size"),
            num_heads=size("num_attention_heads"),
            num_kv_heads=size("num_key_value_heads"),
            head_dim=size("head_dim"),
            rms_norm_eps=_real("rms_norm_eps", values.get("rms_norm_eps", 1e-6)),
            attention_bias=bool(values.get("attention_bias", False)),
            max_position_embeddings=size("max_position_embeddings"),
            rope=_read_rope(values),
            layers=_read_attention(values, num_layers),
            num_target_layers=num_target_layers,
            target_layer_ids=tuple(_whole("target_layer_ids", tap, least=0) for tap in taps),
            block_size=_whole("block_size", drafting_value(values, "block_size", 16)),
            mask_token_id=_whole("mask_token_id", drafting_value(values, "mask_token_id", None), least=0),
            input_embedding_scale=factor("input_embedding_scale"),
            output_multiplier=factor("output_multiplier"),
            final_logit_softcapping=max(0.0, _real("final_logit_softcapping", softcap)) or None,
        )


def drafting_value(values: Mapping[str, Any], name: str, default: Any) -> Any:
    """Look a drafting value up: `dflash_config`, else the root, else the default."""
    return (values.get("dflash_config") or {}).get(name, values.get(name, default))


def default_taps(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """Spread the taps from the second to the fourth last target layer; the middle layer for a single one."""
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + index * span / (num_draft_layers - 1)) for index in range(num_draft_layers)]


def _refuse_other_formats(values: Mapping[str, Any]) -> None:
    if any(name.startswith("speculators_") for name in values):
        raise CheckpointError(
            "expected a DFlash v1 draft in z-lab's format, found the speculators format; "
            "use the original checkpoint it was converted from"
        )
    architectures = values.get("architectures") or []
    if "DFlash2DraftModel" in architectures:
        raise CheckpointError("expected a DFlash v1 draft, found DFlash 2, which is not supported yet")
    if "DFlashDraftModel" not in architectures:
        raise CheckpointError(
            f"expected architectures ['DFlashDraftModel'], found {architectures}: a full model is no draft; "
            "were target and draft swapped?"
        )
    dflash_config = values.get("dflash_config") or {}
    _require("dflash_config to be a JSON object", isinstance(dflash_config, dict), dflash_config)
    for name in _OTHER_FORMATS:
        value = drafting_value(values, name, None)
        _require(f"a DFlash v1 draft without {name}", not value, f"{name} {value!r}")


def _read_attention(values: Mapping[str, Any], num_layers: int) -> tuple[LayerAttention, ...]:
    """Apply the truth table of `dflash` 0.1.0.

    Sliding layers have the window, full layers have none. Without `is_causal`, sliding layers are causal and
    full layers are not; with it, every layer is what it says.
    """
    window = values.get("sliding_window", 4096) if values.get("use_sliding_window", False) else None
    if window is not None:
        window = _whole("sliding_window", window)
    types = values.get("layer_types")
    if types is None:
        first_sliding = values.get("max_window_layers", 28) if window is not None else num_layers
        types = [_LAYER_TYPES[index >= first_sliding] for index in range(num_layers)]
    _require(
        f"layer_types to be {num_layers} of {_LAYER_TYPES}",
        isinstance(types, list) and len(types) == num_layers and all(kind in _LAYER_TYPES for kind in types),
        types,
    )
    # The public package cannot run this either; forcing full attention would only lower acceptance.
    _require(
        "use_sliding_window and sliding_window to be set for sliding layers",
        window is not None or _LAYER_TYPES[1] not in types,
        f"{values.get('use_sliding_window')!r} and {values.get('sliding_window')!r}",
    )
    is_causal = values.get("is_causal")
    layers = []
    for kind in types:
        is_sliding = kind == _LAYER_TYPES[1]
        causal = is_sliding if is_causal is None else bool(is_causal)
        layers.append(LayerAttention(causal, window if is_sliding else None))
    # Other loaders read dflash_config.causal, the public package does not: only agreement is safe.
    said = (values.get("dflash_config") or {}).get("causal")
    _require(
        "dflash_config.causal to agree with is_causal and layer_types",
        said is None or all(layer.is_causal == bool(said) for layer in layers),
        f"{said!r}; set is_causal at the root to what the draft was trained with",
    )
    return tuple(layers)


def _read_rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the places where RoPE has been described over the years; the base must be in one of them.

    A missing base is refused: the usual default of 10000 would only show as low acceptance in long contexts.
    """
    described: dict[str, Any] = {}
    if values.get("rope_theta") is not None:
        described["rope_theta"] = values["rope_theta"]
    for name in ("rope_parameters", "rope_scaling"):
        part = values.get(name) or {}
        _require(f"{name} to be a JSON object", isinstance(part, dict), part)
        _require(
            f"{name} to be the same for all layers",
            not any(kind in part for kind in _LAYER_TYPES),
            f"one per layer type: {sorted(part)}",
        )
        described |= part
    rope = {**described, "rope_type": described.get("rope_type", described.get("type", "default"))}
    _require(f"rope_type to be one of {_ROPE_TYPES}", rope["rope_type"] in _ROPE_TYPES, rope["rope_type"])
    rope["rope_theta"] = _real("rope_theta", rope.get("rope_theta"))
    _require("rope_theta above 0", rope["rope_theta"] > 0, rope["rope_theta"])
    if rope["rope_type"] != "default":
        partial = rope.get("partial_rotary_factor", 1.0)
        _require("partial_rotary_factor 1", partial == 1, partial)
    return rope


def _require(rule: str, holds: bool, found: object) -> None:
    if not holds:
        raise CheckpointError(f"expected {rule}, found {found}")


def _whole(name: str, value: Any, least: int = 1) -> int:
    _require(
        f"{name} to be an integer of {least} or more", type(value) is int and value >= least, repr(value)
    )
    return int(value)


def _real(name: str, value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    _require(f"{name} to be a number", is_number, repr(value))
    return float(value)
