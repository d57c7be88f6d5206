"""Configuration values of a draft checkpoint: where each is looked up, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree.errors import CheckpointError
from ddtree.models.draft_config import Dflash2Sizes, DraftConfig, LayerAttention, default_taps
from tests.fakes.random_draft import config_values, dflash2_values

FULL = LayerAttention(is_causal=False, window=None)
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]


def read_config(**changes: Any) -> DraftConfig:
    return DraftConfig.from_values(config_values(**changes))


def test_drafting_values_come_from_dflash_config_then_root_then_default() -> None:
    assert read_config(block_size=None).block_size == 16
    assert read_config(block_size=6).block_size == 6
    both = read_config(block_size=6, dflash_config={"mask_token_id": 1, "block_size": 4})
    assert both.block_size == 4
    root = read_config(mask_token_id=7, input_embedding_scale=5.5, dflash_config={})
    assert (root.mask_token_id, root.input_embedding_scale, root.output_multiplier) == (7, 5.5, 1.0)
    assert read_config(final_logit_softcapping=30).final_logit_softcapping == 30.0
    assert read_config(final_logit_softcapping=0).final_logit_softcapping is None
    null_wins = {"mask_token_id": 1, "final_logit_softcapping": None}
    assert read_config(final_logit_softcapping=30, dflash_config=null_wins).final_logit_softcapping is None


@pytest.mark.parametrize(
    ("target_layers", "draft_layers", "taps"),
    [(36, 5, [1, 9, 17, 25, 33]), (64, 5, [1, 16, 31, 46, 61]), (40, 5, [1, 10, 19, 28, 37]), (30, 1, [15])],
)
def test_default_taps_are_those_of_published_drafters(
    target_layers: int, draft_layers: int, taps: list[int]
) -> None:
    assert default_taps(target_layers, draft_layers) == taps


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, [FULL] * 3),
        ({"layer_types": None}, [FULL] * 3),
        ({"is_causal": True}, [LayerAttention(True, None)] * 3),
        ({"layer_types": SLIDING}, [LayerAttention(True, 9), FULL, LayerAttention(True, 9)]),
        (
            {"layer_types": SLIDING, "is_causal": False},
            [LayerAttention(False, 9), FULL, LayerAttention(False, 9)],
        ),
        (
            {"layer_types": SLIDING, "is_causal": True},
            [LayerAttention(True, 9), LayerAttention(True, None), LayerAttention(True, 9)],
        ),
        ({"layer_types": None, "max_window_layers": 2}, [FULL, FULL, LayerAttention(True, 9)]),
    ],
)
def test_causality_and_window_per_layer(changes: dict[str, Any], layers: list[LayerAttention]) -> None:
    uses_window = changes.get("layer_types") == SLIDING or "max_window_layers" in changes
    config = read_config(**{"use_sliding_window": uses_window, "sliding_window": 9, **changes})
    assert list(config.layers) == layers


@pytest.mark.parametrize(
    ("changes", "theta", "kind"),
    [
        ({"rope_theta": 7.0}, 5000.0, "default"),
        ({"rope_theta": 7.0, "rope_parameters": None}, 7.0, "default"),
        ({"rope_theta": 7.0, "rope_parameters": {"rope_type": "default"}}, 7.0, "default"),
        ({"rope_theta": 7.0, "rope_parameters": None, "rope_scaling": {"type": "linear"}}, 7.0, "linear"),
    ],
)
def test_rope_is_found_wherever_it_is(changes: dict[str, Any], theta: float, kind: str) -> None:
    rope = read_config(**changes).rope
    assert (rope["rope_theta"], rope["rope_type"]) == (theta, kind)


@pytest.mark.parametrize(
    ("changes", "expected", "found"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "conv_kernel_size to be an integer of 1 or more", "None"),
        (
            {"architectures": ["Qwen3ForCausalLM"]},
            "architectures of ['DFlashDraft",
            "a full model is no draft",
        ),
        ({"architectures": None}, "architectures of ['DFlashDraftModel', 'DFlash2DraftModel']", "[]"),
        ({"vocab_size": None}, "vocab_size to be an integer of 1 or more", "None"),
        ({"dflash_config": {"mask_token_id": 1, "use_swa": True}}, "without use_swa", "True"),
        ({"is_neox_style": False}, "without is_neox_style", "False"),
        ({"logit_scale": 2.0}, "without logit_scale", "2.0"),
        ({"hidden_size": None}, "hidden_size to be an integer of 1 or more", "None"),
        ({"head_dim": 12.0}, "head_dim to be an integer", "12.0"),
        ({"head_dim": 7}, "an even head_dim", "7"),
        ({"num_key_value_heads": 3}, "a multiple of num_key_value_heads", "4 and 3"),
        ({"hidden_act": "gelu"}, "hidden_act 'silu'", "gelu"),
        ({"dflash_config": {}}, "mask_token_id to be an integer of 0 or more", "None"),
        ({"dflash_config": {"mask_token_id": -1}}, "mask_token_id to be an integer of 0 or more", "-1"),
        ({"dflash_config": ["mask_token_id"]}, "dflash_config to be a JSON object", "['mask_token_id']"),
        ({"block_size": 1}, "block_size of 2 or more", "1"),
        ({"block_size": True}, "block_size to be an integer", "True"),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 8]}},
            "target_layer_ids between 0 and 7",
            "[1, 8]",
        ),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": []}},
            "target_layer_ids between 0 and 7",
            "[]",
        ),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": 3}}, "a list of numbers", "3"),
        ({"dflash_config": {"mask_token_id": 1, "selector_rank": 256}}, "without selector_rank", "256"),
        ({"dflash_config": {"mask_token_id": 1, "causal_head": True}}, "without causal_head", "True"),
        ({"dflash_config": {"mask_token_id": 1, "causal": True}}, "dflash_config.causal to agree", "True"),
        ({"layer_types": ["full_attention"]}, "layer_types to be 3 of", "['full_attention']"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types to be 3 of", "linear_attention"),
        ({"layer_types": SLIDING}, "use_sliding_window and sliding_window to be set", "False and None"),
        ({"rope_parameters": None}, "rope_theta to be a number", "None"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta above 0", "0"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 9.0}},
            "rope_type to be one of",
            "dynamic",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 9.0}}},
            "rope_parameters to be the same for all layers",
            "full_attention",
        ),
        ({"input_embedding_scale": "2"}, "input_embedding_scale to be a number", "'2'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps to be a number", "nan"),
    ],
)
def test_errors_say_what_was_expected_and_what_was_found(
    changes: dict[str, Any], expected: str, found: str
) -> None:
    with pytest.raises(CheckpointError) as error:
        read_config(**changes)
    said = str(error.value.args[0]).split(", found ", maxsplit=1)
    assert said[0].startswith("expected ")
    assert expected in said[0]
    assert found in said[1]
    assert "\n" not in said[1]


@pytest.mark.parametrize(
    ("changes", "expected", "found"),
    [
        ({"conv_group_size": 5}, "conv_group_size to divide the hidden_size 32", "5"),
        ({"conv_kernel_size": 7}, "conv_kernel_size of at most the block_size 6", "7"),
        ({"selector_top_k": 51}, "selector_top_k of at most the vocab_size 50", "51"),
        ({"selector_rank": "6"}, "selector_rank to be an integer", "'6'"),
    ],
)
def test_sizes_of_a_dflash2_draft_are_checked(changes: dict[str, Any], expected: str, found: str) -> None:
    with pytest.raises(CheckpointError) as error:
        DraftConfig.from_values(dflash2_values(dflash_config=changes))
    said = str(error.value.args[0]).split(", found ", maxsplit=1)
    assert expected in said[0]
    assert found in said[1]


def test_a_dflash2_draft_is_read() -> None:
    config = DraftConfig.from_values(dflash2_values())
    assert config.dflash2 == Dflash2Sizes(2, 8, 6, 5)
    assert (config.block_size, config.draft_positions) == (6, 5)
    assert read_config().dflash2 is None
