"""What a checkpoint folder says, and the one line that each kind of broken folder gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ddtree.errors import CheckpointError
from ddtree.models.draft_checkpoint import draft_hash, open_checkpoint
from ddtree.models.draft_config import LayerAttention
from tests.fakes.random_draft import (
    BASE_CONFIG,
    config_values,
    dflash2_values,
    random_tensors,
    write_dflash2,
    write_draft,
    write_folder,
)

DEMO_DRAFT = Path(__file__).parents[2] / "drafters" / "smollm2-135m-dflash"
FULL = LayerAttention(is_causal=False, window=None)

Tensors = dict[str, torch.Tensor]


def one_line_of(error: pytest.ExceptionInfo[CheckpointError]) -> str:
    message = str(error.value.args[0])
    assert "\n" not in message
    assert "expected" in message
    assert "found" in message
    return message


def test_the_demo_drafter_is_read() -> None:
    checkpoint = open_checkpoint(DEMO_DRAFT)
    config = checkpoint.config
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (16, 16, (1, 8, 14, 20, 27))
    assert config.rope == {"rope_type": "default", "rope_theta": 100000.0}
    assert config.layers == (FULL,) * 4
    assert config.feature_size == 5 * 576
    assert len(checkpoint.files) == 3 + 11 * 4


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
            "expected only a DFlash draft's tensors, found lm_head.weight [50, 32] as well",
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
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected weights or .* found neither"):
        open_checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: expected a readable JSON file, found"):
        open_checkpoint(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: expected a JSON object, found list"):
        open_checkpoint(folder)


def test_configuration_errors_name_the_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, config_values(block_size=1), {})
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    assert one_line_of(error) == f"{folder / 'config.json'}: expected block_size of 2 or more, found 1"


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


def test_a_mask_embedding_of_its_own_is_refused(tmp_path: Path) -> None:
    folder = write_draft(tmp_path)
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt: expected the mask's embedding to be the"):
        open_checkpoint(folder)


def test_a_dflash2_folder_is_checked_by_name_and_shape(tmp_path: Path) -> None:
    values = dflash2_values()
    assert len(open_checkpoint(write_dflash2(tmp_path / "whole")).files) == 3 + 3 * (11 + 4) + 3
    tensors = random_tensors(values)
    del tensors["candidate_selector.successor_codebook"]
    with pytest.raises(CheckpointError, match=r"missing: candidate_selector\.successor_codebook \[50, 6\]"):
        open_checkpoint(write_folder(tmp_path / "part", values, tensors))
    plain = {**values, "architectures": ["DFlashDraftModel"]}
    with pytest.raises(CheckpointError, match="a DFlash v1 draft without conv_kernel_size"):
        open_checkpoint(write_folder(tmp_path / "plain", plain, random_tensors(values)))
