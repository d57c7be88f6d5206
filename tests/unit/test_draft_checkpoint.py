"""What a checkpoint folder says, and the one line that each kind of broken folder gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from ddtree.errors import CheckpointError
from ddtree.models.draft_checkpoint import draft_hash, open_checkpoint
from ddtree.models.draft_config import DraftConfig, LayerAttention, default_taps
from tests.fakes.random_draft import BASE_CONFIG, config_values, random_tensors, write_draft, write_folder

PILOT = Path(__file__).parents[2] / "drafters" / "smollm2-135m-dflash-pilot"
FULL = LayerAttention(is_causal=False, window=None)
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]

Tensors = dict[str, torch.Tensor]


def read_config(**changes: Any) -> DraftConfig:
    return DraftConfig.from_values(config_values(**changes))


def target(**changes: Any) -> LlamaConfig:
    values = {
        "hidden_size": 32,
        "num_hidden_layers": 8,
        "vocab_size": 50,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return LlamaConfig(**{**values, **changes})


def one_line_of(error: pytest.ExceptionInfo[CheckpointError]) -> str:
    message = str(error.value.args[0])
    assert "\n" not in message
    assert "expected" in message
    assert "found" in message
    return message


def test_the_pilot_checkpoint_is_read() -> None:
    checkpoint = open_checkpoint(PILOT)
    config = checkpoint.config
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (16, 16, (1, 8, 14, 20, 27))
    assert config.rope == {"rope_type": "default", "rope_theta": 100000.0}
    assert config.layers == (FULL,) * 4
    assert config.feature_size == 5 * 576
    assert len(checkpoint.files) == 3 + 11 * 4


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
        (
            {"architectures": ["DFlash2DraftModel"]},
            "a DFlash v1 draft",
            "DFlash 2, which is not supported yet",
        ),
        ({"architectures": ["Qwen3ForCausalLM"]}, "['DFlashDraftModel']", "a full model is no draft"),
        ({"architectures": None}, "['DFlashDraftModel']", "[]"),
        ({"speculators_model_type": "dflash"}, "z-lab's format", "the speculators format"),
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
def test_configuration_errors_name_file_rule_and_value(
    tmp_path: Path, changes: dict[str, Any], expected: str, found: str
) -> None:
    folder = write_folder(tmp_path, config_values(**changes), {})
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    message = one_line_of(error)
    assert message.startswith(f"{folder / 'config.json'}: expected ")
    assert expected in message
    assert found in message


def drop(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("fc.weight"), "expected 36 tensors, found 1 of them missing: fc.weight [32, 96]"),
        (
            put("lm_head.weight", torch.zeros(50, 32)),
            "expected only a DFlash v1 draft's tensors, found lm_head.weight [50, 32] as well",
        ),
        (
            put("layers.1.mlp.up_proj.weight", torch.zeros(32, 48)),
            "expected layers.1.mlp.up_proj.weight of shape [48, 32], found [32, 48]",
        ),
        (
            put("norm.weight", torch.zeros(32, dtype=torch.int8)),
            "expected norm.weight as one of ('BF16', 'F16', 'F32'), found I8",
        ),
    ],
)
def test_tensor_errors_name_file_tensor_and_shape(
    tmp_path: Path, change: Callable[[Tensors], None], message: str
) -> None:
    tensors = random_tensors(BASE_CONFIG)
    change(tensors)
    folder = write_folder(tmp_path, BASE_CONFIG, tensors)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    assert one_line_of(error) == f"{folder / 'model.safetensors'}: {message}"


def test_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: expected a draft checkpoint's configuration"):
        open_checkpoint(tmp_path / "nowhere")
    folder = write_draft(tmp_path / "draft")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected a safetensors file, found"):
        open_checkpoint(folder)
    weights.unlink()
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: expected the draft's weights .* found neither"
    ):
        open_checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: expected a readable JSON file, found"):
        open_checkpoint(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: expected a JSON object, found list"):
        open_checkpoint(folder)


def shard(folder: Path) -> None:
    tensors = random_tensors(BASE_CONFIG)
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:10], "model-00002-of-00002.safetensors": names[10:]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


def test_a_sharded_checkpoint_holds_the_same_tensors(tmp_path: Path) -> None:
    folder = write_draft(tmp_path)
    whole = open_checkpoint(folder)
    device = torch.device("cpu")
    expected = whole.load(whole.files, torch.float32, device)
    before = draft_hash(folder)
    shard(folder)
    sharded = open_checkpoint(folder)
    loaded = sharded.load(sharded.files, torch.float32, device)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert draft_hash(folder) == before
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: expected a shard"):
        open_checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json: expected JSON with a weight_map"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "expected the target's hidden_size 64, found 32"),
        ({"num_hidden_layers": 9}, "expected num_target_layers 9, the target's layer count, found 8"),
        ({"vocab_size": 49}, "expected a mask_token_id below the target's vocabulary of 49, found 49"),
        ({"eos_token_id": [2, 49]}, "padding and end tokens [0, 2, 49], found 49"),
        ({"pad_token_id": 49}, "padding and end tokens [2, 49], found 49"),
    ],
)
def test_a_draft_for_another_target_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    checkpoint = open_checkpoint(write_draft(tmp_path))
    with pytest.raises(CheckpointError) as error:
        checkpoint.check_against_target(target(**changes))
    assert message in one_line_of(error)
    assert str(tmp_path / "config.json") in one_line_of(error)


def test_a_draft_fits_its_target(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_draft(tmp_path))
    checkpoint.check_against_target(target())
    checkpoint.check_against_target(target(eos_token_id=None, pad_token_id=None))


def test_hash_tells_projections_and_configurations_apart(tmp_path: Path) -> None:
    values = config_values()
    first = draft_hash(write_folder(tmp_path / "a", values, random_tensors(values)))
    reordered = dict(reversed(values.items()))
    assert draft_hash(write_folder(tmp_path / "b", reordered, random_tensors(values))) == first

    for name in ("fc.weight", "hidden_norm.weight"):
        tensors = random_tensors(values)
        tensors[name].view(-1)[-1] += 1e-3
        assert draft_hash(write_folder(tmp_path / name, values, tensors)) != first
    half = {name: tensor.bfloat16() for name, tensor in random_tensors(values).items()}
    assert draft_hash(write_folder(tmp_path / "bf16", values, half)) != first
    other = config_values(block_size=8)
    assert draft_hash(write_folder(tmp_path / "c", other, random_tensors(other))) != first
