"""What is read of a target's folder, and the one line that each target that cannot be served gets."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    BloomConfig,
    DeepseekV3Config,
    FalconH1Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxConfig,
    Phi3Config,
    PretrainedConfig,
)

from ddtree.errors import CheckpointError
from ddtree.models import target_config
from ddtree.models.loading import load_tables, read_target_config, resolve_dtype
from ddtree.models.probe import check_trees_work
from ddtree.models.target import TargetModel
from tests.fakes.target_families import COMMON, FAMILIES, SLIDING, make_family, save_checkpoint

CPU = torch.device("cpu")
SIZES = {name: value for name, value in COMMON.items() if name != "head_dim"}


def load(folder: Path, dtype: str = "float32") -> TargetModel:
    target = TargetModel.load(folder, dtype=dtype, device=CPU, taps=(0,))
    check_trees_work(target)
    return target


def logits(folder: Path) -> torch.Tensor:
    """Plain logits of the model that the folder's files make."""
    target = load(folder)
    target.model.set_attn_implementation("eager")
    output: torch.Tensor = target.model(torch.arange(30, 90)[None]).logits[0]
    return output


@pytest.mark.parametrize("family", ["llama", "qwen3 moe", "gemma3", "gpt-oss"])
def test_shards_hold_the_same_model(tmp_path: Path, family: str) -> None:
    config = FAMILIES[family]()
    whole = save_checkpoint(tmp_path / "whole", config)
    shards = save_checkpoint(tmp_path / "shards", config, max_shard_size="20KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    assert torch.equal(logits(shards), logits(whole))
    tables = load_tables(shards, dtype=torch.float32, device=CPU)
    assert torch.equal(tables.embedding, load(whole).embedding)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_borrows_the_tables_that_the_target_uses(tmp_path: Path, family: str) -> None:
    folder = make_family(tmp_path, family)
    target, tables = load(folder), load_tables(folder, dtype=torch.float32, device=CPU)
    assert torch.equal(tables.embedding, target.embedding)
    assert torch.equal(tables.head, target.model.get_output_embeddings().weight)
    assert (tables.head is tables.embedding) == bool(target.model.config.tie_word_embeddings)


def test_a_head_that_is_there_counts_although_the_configuration_ties(tmp_path: Path) -> None:
    """Whatever transformers makes of such a folder, target and drafter must agree."""
    folder = make_family(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tables = load_tables(folder, dtype=torch.float32, device=CPU)
    assert torch.equal(tables.head, load(folder).model.get_output_embeddings().weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_auto_is_the_checkpoints(tmp_path: Path, dtype: torch.dtype) -> None:
    for family in ("qwen3", "gemma3 with a vision tower"):
        folder = make_family(tmp_path / family, family, dtype=dtype)
        assert resolve_dtype("auto", read_target_config(folder)) == dtype
        assert load(folder, "auto").dtype == dtype


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"rope_theta": 700.0}, {"rope_type": "default", "rope_theta": 700.0}),
        (
            {"rope_theta": 700.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_type": "linear", "rope_theta": 700.0, "factor": 4.0},
        ),
        (
            {
                "rope_theta": 700.0,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
            },
            {
                "rope_type": "llama3",
                "rope_theta": 700.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
    ],
    ids=["theta at the root", "linear", "llama3"],
)
def test_rope_in_older_fields_is_rope_in_newer_ones(
    tmp_path: Path, older: dict[str, Any], newer: dict[str, Any]
) -> None:
    new = save_checkpoint(tmp_path / "new", LlamaConfig(**COMMON, rope_parameters=newer))
    plain = save_checkpoint(tmp_path / "plain", LlamaConfig(**COMMON))
    values = json.loads((new / "config.json").read_text())
    expected = logits(new)
    del values["rope_parameters"]
    (new / "config.json").write_text(json.dumps({**values, **older}))
    assert torch.allclose(logits(new), expected, atol=1e-5)
    assert not torch.allclose(logits(plain), expected, atol=1e-2)
    assert target_config.rope_thetas(read_target_config(new)) == (700.0,)


def test_longrope_ends_where_its_positions_would_turn_otherwise(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = Phi3Config(
        **COMMON,
        original_max_position_embeddings=64,
        rope_parameters={**rope, "original_max_position_embeddings": 64},
    )
    assert load(save_checkpoint(tmp_path, config)).context_length == 64


REFUSED: dict[str, tuple[Callable[[], PretrainedConfig], str]] = {
    "linear attention of another kind": (
        lambda: MiniMaxConfig(
            **COMMON, num_local_experts=4, num_experts_per_tok=2,
            layer_types=["linear_attention", "full_attention"] * 2,
        ),
        "found linear_attention; a draft tree can only be verified where every layer is attention over",
    ),
    "recurrence beside attention": (
        lambda: FalconH1Config(
            **COMMON, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8
        ),
        "found hybrid",
    ),
    "latent attention": (
        lambda: DeepseekV3Config(
            **SIZES, q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
            n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=16,
            first_k_dense_replace=4,
        ),
        "DeepseekV3ForCausalLM cannot run with tree attention",
    ),
    "attention in both directions": (
        lambda: Gemma3TextConfig(**COMMON, **SLIDING, use_bidirectional_attention=True),
        "Gemma3ForCausalLM asks its attention for attention that is not causal",
    ),
    "positions without an end": (
        lambda: BloomConfig(vocab_size=272, hidden_size=32, n_layer=2, n_head=4),
        "expected a decoder-only language model with one attention size for all layers",
    ),
    "sizes that differ by layer": (
        lambda: Gemma4TextConfig(**COMMON, **SLIDING),
        "with one attention size for all layers ('head_dim' is a per-layer attribute",
    ),
    "chunked attention": (
        lambda: Llama4TextConfig(
            **COMMON, num_local_experts=2, intermediate_size_mlp=32, attention_chunk_size=8
        ),
        "found chunked_attention",
    ),
    "layers under another name": (
        lambda: GPT2Config(vocab_size=272, n_embd=32, n_layer=2, n_head=4),
        "GPT2LMHeadModel has no list of decoder layers to tap",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_target_that_no_tree_can_be_verified_with_is_refused(tmp_path: Path, kind: str) -> None:
    make, message = REFUSED[kind]
    folder = save_checkpoint(tmp_path, make())
    with pytest.raises(CheckpointError) as error:
        load(folder)
    said = str(error.value.args[0])
    assert message in said
    assert "\n" not in said
    assert len(said) < 500


def test_rows_that_meet_outside_of_attention_are_found(tmp_path: Path) -> None:
    target = load(make_family(tmp_path, "llama"))
    mix = target.model.model.layers[1].mlp
    mix.register_forward_hook(lambda _, __, rows: rows + rows.cumsum(1) / 4)
    with pytest.raises(CheckpointError, match="a draft node changes the logits of its sibling"):
        check_trees_work(target)


def test_a_layer_with_attention_of_its_own_is_found(tmp_path: Path) -> None:
    target = load(make_family(tmp_path, "llama"))
    layer = target.model.model.layers[2].self_attn
    layer.config = copy.deepcopy(layer.config)
    layer.config._attn_implementation = "eager"
    with pytest.raises(CheckpointError, match=r"runs 1 of 4 layers \(the first is 2\) without"):
        check_trees_work(target)


def test_weights_of_another_type_need_their_quantization_config(tmp_path: Path) -> None:
    folder = make_family(tmp_path, "llama")
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**weights, name: weights[name].to(torch.int8)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"expected {name} as one of .* found I8"):
        TargetModel.load(folder, dtype="auto", device=CPU, taps=(0,))
    with pytest.raises(CheckpointError, match="found I8"):
        load_tables(folder, dtype=torch.float32, device=CPU)


def test_a_truncated_file_and_a_missing_tensor_are_named(tmp_path: Path) -> None:
    folder = make_family(tmp_path, "llama")
    weights, path = load_file(folder / "model.safetensors"), folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected a safetensors file"):
        load(folder)
    del weights["model.layers.2.self_attn.k_proj.weight"]
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 tensors are missing.*layers\.2\.self_attn\.k_proj"):
        load(folder)


def test_a_target_configuration_that_transformers_does_not_know(tmp_path: Path) -> None:
    folder = make_family(tmp_path, "llama")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "model_type": "unheard_of"}))
    with pytest.raises(CheckpointError, match="not a configuration that transformers reads"):
        read_target_config(folder)


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (FAMILIES["llama"], None),
        (FAMILIES["qwen2"], None),
        (FAMILIES["qwen2, sliding"], 8),
        (FAMILIES["gemma3"], 8),
        (FAMILIES["gpt-oss"], 8),
    ],
)
def test_the_window_that_is_told(
    tmp_path: Path, config: Callable[[], PretrainedConfig], window: int | None
) -> None:
    config().save_pretrained(tmp_path)
    assert target_config.sliding_window(AutoConfig.from_pretrained(tmp_path)) == window
