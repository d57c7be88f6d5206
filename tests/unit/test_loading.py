"""Each way in which a target folder cannot be loaded is told in one line that names file and expectation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddtree.attention import sdpa
from ddtree.errors import CheckpointError, ConfigError
from ddtree.models import loading
from ddtree.models.target import TargetModel
from tests.fakes.tiny_models import HIDDEN, VOCAB_SIZE, make_draft, make_target

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_target(tmp_path / "target")


def load(folder: Path) -> Any:
    return loading.load_target(folder, dtype=torch.float32, device=CPU, attention=sdpa.register())


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def no_folder(folder: Path) -> str:
    (folder).rename(folder.parent / "elsewhere")
    return rf"target: {folder} is not a folder; give the folder of a transformers checkpoint"


def no_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return rf"target: {folder}/config.json must be a readable JSON object"


def config_of_no_json(folder: Path) -> str:
    (folder / "config.json").write_text("{")
    return rf"target: {folder}/config.json must be a readable JSON object"


def config_of_a_list(folder: Path) -> str:
    (folder / "config.json").write_text("[]")
    return rf"target: {folder}/config.json must be a readable JSON object"


def a_draft(folder: Path) -> str:
    make_draft(folder)
    return rf"target: {folder}/config.json names .*DFlashDraftModel.*, a draft model; were .* swapped\?"


def an_unknown_model(folder: Path) -> str:
    edit_config(folder, model_type="unheard_of")
    return rf"target: {folder}/config.json is not a configuration that transformers reads"


def no_weights(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    return rf"target: no \*\.safetensors file in {folder}; only safetensors"


def a_missing_shard(folder: Path) -> str:
    index = {"weight_map": {"lm_head.weight": "model.safetensors", "x": "model-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return (
        rf"target: {folder}/model-00002.safetensors is named in model.safetensors.index.json but is not there"
    )


def a_truncated_file(folder: Path) -> str:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return rf"target: {path}.* safetensors file"


def a_missing_tensor(folder: Path) -> str:
    edit_weights(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    return rf"target: in {folder} 1 tensors are missing, the first is model.layers.1.mlp.up_proj.weight;"


def a_tensor_of_another_shape(folder: Path) -> str:
    edit_config(folder, intermediate_size=80)
    return rf"target: in {folder} 9 tensors have another shape: .*down_proj.weight \[32, 80\] is \[32, 64\];"


BREAKS = [
    no_folder, no_config, config_of_no_json, config_of_a_list, a_draft, an_unknown_model, no_weights,
    a_missing_shard, a_truncated_file, a_missing_tensor, a_tensor_of_another_shape,
]  # fmt: skip


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda each: each.__name__)
def test_each_error_names_file_and_expectation(folder: Path, break_it: Callable[[Path], str]) -> None:
    expected = break_it(folder)
    with pytest.raises(CheckpointError, match=expected) as caught:
        load(folder)
    assert str(caught.value).startswith("FAILED_PRECONDITION: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("break_it", BREAKS[:9], ids=lambda each: each.__name__)
def test_the_tables_of_a_drafter_meet_the_same_errors(folder: Path, break_it: Callable[[Path], str]) -> None:
    expected = break_it(folder)
    with pytest.raises(CheckpointError, match=expected):
        loading.load_tables(folder, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (
            "model.embed_tokens.weight",
            r"no tensor \*\.embed_tokens\.weight in .*; a drafter needs the embedding",
        ),
        ("lm_head.weight", r"no tensor lm_head\.weight in .*, and config\.json does not tie it"),
    ],
)
def test_a_missing_table_is_named(folder: Path, name: str, complaint: str) -> None:
    edit_weights(folder, lambda weights: weights.pop(name))
    with pytest.raises(CheckpointError, match=complaint):
        loading.load_tables(folder, dtype=torch.float32, device=CPU)


def test_a_tap_outside_the_target(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"draft: tap layer 3 is outside the target's 0\.\.2"):
        TargetModel.load(folder, dtype="float32", device=CPU, taps=(0, 3))


def test_a_whole_folder_loads_without_gradients_in_the_wanted_dtype(folder: Path) -> None:
    model = load(folder)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training
    tables = loading.load_tables(folder, dtype=torch.bfloat16, device=CPU)
    assert tables.embedding.shape == tables.head.shape == (VOCAB_SIZE, HIDDEN)
    assert tables.embedding.dtype == tables.head.dtype == torch.bfloat16
    assert torch.equal(tables.embedding, model.get_input_embeddings().weight.bfloat16())
    assert torch.equal(tables.head, model.get_output_embeddings().weight.bfloat16())


@pytest.mark.parametrize("name", ["cuda:99", "gpu", ""])
def test_a_device_that_is_not_there_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"must be auto, cpu, cuda or cuda:N .* got '{name}'"):
        loading.choose_device(name)


def test_devices_that_are_there() -> None:
    assert loading.choose_device("cpu") == torch.device("cpu")
    assert loading.choose_device("auto").type in ("cpu", "cuda")
