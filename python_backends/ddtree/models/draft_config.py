"""A drafter's configuration (DFlash v1 or 2), from the values of a z-lab `config.json`.

The file is a Qwen3 configuration whose `dflash_config` holds the drafting values. Those are looked up as the
public `dflash` 0.1.0 does: `dflash_config` first, then the root of the file, then a default. The speculators
format is translated first. Values that would change what a draft computes, and are of no format known here,
are refused instead of ignored.

This module knows values, not files: whoever read the file puts its name in front of an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddtree.errors import CheckpointError
from ddtree.models import speculators
from ddtree.models.config_values import real, require, whole

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel")
_DFLASH2_VALUES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# Values of other drafts, with those among them that change nothing.
_OTHER_FORMATS: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("attention_sink_bias", "add_swa_attention_sink_bias", "causal_head"), (None, False)),
    **dict.fromkeys(("sample_from_anchor", "use_swa"), (None, False)),
    **dict.fromkeys(("swa_window_size", "markov_rank"), (None,)),
    "is_neox_style": (None, True),
    "logit_scale": (None, 1.0),
}


@dataclass(frozen=True)
class LayerAttention:
    """What the block's rows of one layer see of the context and of the block."""

    is_causal: bool
    window: int | None  # a row sees what is less than this many positions away; None: everything


@dataclass(frozen=True)
class Dflash2Sizes:
    """What a DFlash 2 draft has on top: convolutions around attention and MLP, and a candidate selector."""

    conv_kernel_size: int  # positions a convolution looks at, its own included
    conv_group_size: int  # neighbouring channels that share a dynamic kernel
    selector_rank: int
    selector_top_k: int  # candidates per position


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
    num_target_layers: int | None  # None: the checkpoint does not say
    target_layer_ids: tuple[int, ...]  # L is the output of the target's decoder layer L, counted from 0
    block_size: int
    mask_token_id: int
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None  # None: logits are not capped
    vocab_size: int  # of the target it was made for
    draft_vocab_size: int  # tokens it can propose; fewer than `vocab_size` come with a map
    dflash2: Dflash2Sizes | None = None
    is_from_speculators: bool = False

    def __post_init__(self) -> None:
        taps = self.target_layer_ids
        require("block_size of 2 or more", self.block_size >= 2, self.block_size)
        require("an even head_dim", self.head_dim % 2 == 0, self.head_dim)
        require(
            "num_attention_heads to be a multiple of num_key_value_heads",
            self.num_heads % self.num_kv_heads == 0,
            f"{self.num_heads} and {self.num_kv_heads}",
        )
        if self.num_target_layers is not None:
            last_tap = self.num_target_layers - 1
            require(
                f"target_layer_ids between 0 and {last_tap} (num_target_layers - 1)",
                bool(taps) and all(0 <= tap <= last_tap for tap in taps),
                list(taps),
            )
        require(
            f"draft_vocab_size of at most the vocab_size {self.vocab_size}",
            self.draft_vocab_size <= self.vocab_size,
            self.draft_vocab_size,
        )
        if self.dflash2 is not None:
            self._check_dflash2(self.dflash2)

    def _check_dflash2(self, sizes: Dflash2Sizes) -> None:
        require(
            f"conv_group_size to divide the hidden_size {self.hidden_size}",
            self.hidden_size % sizes.conv_group_size == 0,
            sizes.conv_group_size,
        )
        require(
            f"conv_kernel_size of at most the block_size {self.block_size}",
            sizes.conv_kernel_size <= self.block_size,
            sizes.conv_kernel_size,
        )
        require(
            f"selector_top_k of at most the vocab_size {self.vocab_size}",
            sizes.selector_top_k <= self.vocab_size,
            sizes.selector_top_k,
        )

    @property
    def draft_positions(self) -> int:
        """Positions after the root that a pass drafts."""
        return self.block_size - 1

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
        require("a JSON object", isinstance(values, dict), type(values).__name__)
        is_translated = speculators.is_speculators(values)
        if is_translated:
            values = speculators.translate(values)
        _refuse_other_formats(values)
        num_layers = whole("num_hidden_layers", values.get("num_hidden_layers"))
        num_target_layers = None
        if not is_translated:
            num_target_layers = whole("num_target_layers", values.get("num_target_layers"))
        default = default_taps(num_target_layers, num_layers) if num_target_layers else None
        taps = drafting_value(values, "target_layer_ids", default)
        require("target_layer_ids to be a list of numbers", isinstance(taps, list), taps)
        softcap = drafting_value(values, "final_logit_softcapping", None) or 0.0
        vocab_size = whole("vocab_size", values.get("vocab_size"))
        hidden_act = values.get("hidden_act", "silu")
        require("hidden_act 'silu'", hidden_act == "silu", hidden_act)

        def size(name: str) -> int:
            return whole(name, values.get(name))

        def factor(name: str) -> float:
            return real(name, drafting_value(values, name, 1.0))

        return cls(
            hidden_size=size("hidden_size"),
            intermediate_size=size("intermediate_size"),
            num_heads=size("num_attention_heads"),
            num_kv_heads=size("num_key_value_heads"),
            head_dim=size("head_dim"),
            rms_norm_eps=real("rms_norm_eps", values.get("rms_norm_eps", 1e-6)),
            attention_bias=bool(values.get("attention_bias", False)),
            max_position_embeddings=size("max_position_embeddings"),
            rope=_read_rope(values),
            layers=_read_attention(values, num_layers),
            num_target_layers=num_target_layers,
            target_layer_ids=tuple(whole("target_layer_ids", tap, least=0) for tap in taps),
            block_size=whole("block_size", drafting_value(values, "block_size", 16)),
            mask_token_id=whole("mask_token_id", drafting_value(values, "mask_token_id", None), least=0),
            input_embedding_scale=factor("input_embedding_scale"),
            output_multiplier=factor("output_multiplier"),
            final_logit_softcapping=max(0.0, real("final_logit_softcapping", softcap)) or None,
            vocab_size=vocab_size,
            draft_vocab_size=whole("draft_vocab_size", values.get("draft_vocab_size", vocab_size)),
            dflash2=_read_dflash2(values),
            is_from_speculators=is_translated,
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
    architectures = values.get("architectures") or []
    if not any(name in architectures for name in _ARCHITECTURES):
        raise CheckpointError(
            f"expected architectures of {list(_ARCHITECTURES)}, found {architectures}: a full model is no "
            "draft; were target and draft swapped?"
        )
    dflash_config = values.get("dflash_config") or {}
    require("dflash_config to be a JSON object", isinstance(dflash_config, dict), dflash_config)
    for name, neutral in _OTHER_FORMATS.items():
        value = drafting_value(values, name, None)
        require(f"a DFlash draft without {name}", value in neutral, f"{name} {value!r}")


def _read_dflash2(values: Mapping[str, Any]) -> Dflash2Sizes | None:
    given = {name: drafting_value(values, name, None) for name in _DFLASH2_VALUES}
    if "DFlash2DraftModel" in values["architectures"]:
        return Dflash2Sizes(**{name: whole(name, value) for name, value in given.items()})
    for name, value in given.items():
        require(f"a DFlash v1 draft without {name}", not value, f"{name} {value!r}")
    return None


def _read_attention(values: Mapping[str, Any], num_layers: int) -> tuple[LayerAttention, ...]:
    """Apply the truth table of `dflash` 0.1.0.

    Sliding layers have the window, full layers have none. Without `is_causal`, sliding layers are causal and
    full layers are not; with it, every layer is what it says.
    """
    window = values.get("sliding_window", 4096) if values.get("use_sliding_window", False) else None
    if window is not None:
        window = whole("sliding_window", window)
    types = values.get("layer_types")
    if types is None:
        first_sliding = values.get("max_window_layers", 28) if window is not None else num_layers
        types = [_LAYER_TYPES[index >= first_sliding] for index in range(num_layers)]
    require(
        f"layer_types to be {num_layers} of {_LAYER_TYPES}",
        isinstance(types, list) and len(types) == num_layers and all(kind in _LAYER_TYPES for kind in types),
        types,
    )
    # The public package cannot run this either; forcing full attention would only lower acceptance.
    require(
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
    require(
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
        require(f"{name} to be a JSON object", isinstance(part, dict), part)
        require(
            f"{name} to be the same for all layers",
            not any(kind in part for kind in _LAYER_TYPES),
            f"one per layer type: {sorted(part)}",
        )
        described |= part
    rope = {**described, "rope_type": described.get("rope_type", described.get("type", "default"))}
    require(f"rope_type to be one of {_ROPE_TYPES}", rope["rope_type"] in _ROPE_TYPES, rope["rope_type"])
    rope["rope_theta"] = real("rope_theta", rope.get("rope_theta"))
    require("rope_theta above 0", rope["rope_theta"] > 0, rope["rope_theta"])
    if rope["rope_type"] != "default":
        partial = rope.get("partial_rotary_factor", 1.0)
        require("partial_rotary_factor 1", partial == 1, partial)
    return rope
