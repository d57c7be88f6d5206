"""Reads the `speculators` library's format of a DFlash v1 draft (`RedHatAI/…-speculator.dflash`).

Its `config.json` nests the layers' values in `transformer_layer_config`, of which only those that differ from
transformers' Qwen3 defaults are written, and counts taps as indices of `hidden_states`: k is the output of
decoder layer k - 1, which z-lab's files call k - 1. Its tensors have the same names; beside them there may be
an output head over a reduced vocabulary with `d2t`, how far each draft id is from its target id.

This module turns values into z-lab's and knows what else the format can say; it reads no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddtree.errors import CheckpointError
from ddtree.models.config_values import require, whole

_ROPE_NAMES = ("rope_parameters", "rope_theta", "rope_scaling")


def is_speculators(values: Mapping[str, Any]) -> bool:
    """Whether a parsed `config.json` is of this format."""
    return any(name.startswith("speculators_") for name in values)


def translate(values: Mapping[str, Any]) -> dict[str, Any]:
    """Give the values as z-lab's format has them; what it cannot say is refused.

    Raises:
        CheckpointError: another algorithm of the library, or a variant that drafts otherwise.
    """
    kind = values.get("speculators_model_type")
    if kind != "dflash":
        raise CheckpointError(
            f"expected speculators_model_type 'dflash', found {kind!r}; only DFlash drafts are served"
        )
    layer = values.get("transformer_layer_config")
    require("transformer_layer_config to be a JSON object", isinstance(layer, dict), layer)
    assert isinstance(layer, dict)
    model_type = layer.get("model_type", "qwen3")
    require("transformer_layer_config of model_type 'qwen3'", model_type == "qwen3", repr(model_type))
    require(
        "rope_theta or rope_parameters in transformer_layer_config (10000 would be assumed)",
        any(layer.get(name) is not None for name in _ROPE_NAMES),
        "neither",
    )
    filled = _with_defaults(layer)
    _refuse_variants(values, filled["hidden_size"])
    taps = values.get("aux_hidden_state_layer_ids")
    require("aux_hidden_state_layer_ids to be a list of numbers", isinstance(taps, list) and bool(taps), taps)
    assert isinstance(taps, list)
    mask = {"mask_token_id": values.get("mask_token_id")}
    translated = {
        **filled,
        "architectures": ["DFlashDraftModel"],
        "block_size": values.get("block_size", 8),
        "draft_vocab_size": values.get("draft_vocab_size", 32000),
        "dflash_config": {
            **mask,
            # 1 is the first layer's output; 0 would be the embedding, which no tap gives.
            "target_layer_ids": [whole("aux_hidden_state_layer_ids", tap) - 1 for tap in taps],
        },
    }
    if values.get("sliding_window_non_causal"):
        translated["is_causal"] = False
    return translated


def _with_defaults(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what equals transformers' default and is therefore not written."""
    # Imported here: transformers takes seconds, and other drafts are read without it.
    from transformers import Qwen3Config

    said = {name: value for name, value in layer.items() if name not in ("architectures", "is_causal")}
    try:
        filled: dict[str, Any] = Qwen3Config(**said).to_dict()
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"expected transformer_layer_config to be a Qwen3 one, found {reason}"
        ) from None
    return filled


def _refuse_variants(values: Mapping[str, Any], hidden_size: int) -> None:
    """These change what a draft computes, or which row of the block drafts which position."""
    projector = values.get("projector_type", "dflash")
    require("projector_type 'dflash'", projector == "dflash", repr(projector))
    for name in ("sample_from_anchor", "shift_label"):
        require(f"a draft without {name}", not values.get(name), f"{name} {values.get(name)!r}")
    target_hidden = values.get("target_hidden_size")
    require(
        f"target_hidden_size to be the draft's hidden_size {hidden_size}",
        target_hidden in (None, hidden_size),
        target_hidden,
    )
