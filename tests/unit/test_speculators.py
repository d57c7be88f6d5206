"""Drafts in the speculators format: what their values mean, and that they draft with their own head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig

from ddtree import assembly
from ddtree.config import ServingConfig
from ddtree.draft import Drafter
from ddtree.errors import CheckpointError
from ddtree.models.draft_checkpoint import open_checkpoint
from ddtree.models.draft_config import DraftConfig, LayerAttention
from ddtree.models.loading import load_tables
from ddtree.types import DraftRequest, DraftResult, SessionBatch
from tests.fakes.dflash_reference import CPU, ReferenceDrafter, public_package
from tests.fakes.random_draft import (
    DRAFTED,
    config_values,
    random_tensors,
    speculators_tensors,
    speculators_values,
    write_folder,
    write_speculators,
)
from tests.fakes.target_families import COMMON, save_checkpoint

VOCABULARY, HIDDEN, BLOCK, MASK_ID = 50, 32, 6, 49
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "use_sliding_window": True,
    "sliding_window": 9,
}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def dflash() -> ModuleType:
    return public_package()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = {**COMMON, "vocab_size": VOCABULARY, "num_hidden_layers": 8, "rope_theta": 5000.0}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    return save_checkpoint(tmp_path_factory.mktemp("target"), LlamaConfig(**{**values, **special}))


def read(**changes: Any) -> DraftConfig:
    return DraftConfig.from_values(speculators_values(**changes))


def test_values_are_those_of_the_same_draft_in_z_labs_format() -> None:
    """Above all the taps: k is the k-th layer's output, counted from 1."""
    ours, original = read(), DraftConfig.from_values(config_values())
    for name in (
        "target_layer_ids",
        "mask_token_id",
        "block_size",
        "layers",
        "hidden_size",
        "head_dim",
        "rope",
    ):
        assert getattr(ours, name) == getattr(original, name), name
    assert (ours.draft_vocab_size, ours.vocab_size, ours.num_target_layers) == (DRAFTED, VOCABULARY, None)
    assert ours.is_from_speculators


def test_what_equals_transformers_default_is_not_written() -> None:
    config = read(transformer_layer_config={"num_attention_heads": 64})
    assert (config.rms_norm_eps, config.attention_bias, config.num_kv_heads) == (1e-6, False, 2)
    values = speculators_values()
    del values["transformer_layer_config"]["head_dim"]
    assert DraftConfig.from_values(values).head_dim == 128


@pytest.mark.parametrize(("non_causal", "causal"), [(False, True), (None, True), (True, False)])
def test_sliding_layers_are_causal_unless_said_otherwise(non_causal: bool | None, causal: bool) -> None:
    """Full layers never are."""
    config = read(transformer_layer_config=SLIDING, sliding_window_non_causal=non_causal)
    window, full = LayerAttention(is_causal=causal, window=9), LayerAttention(is_causal=False, window=None)
    assert config.layers == (window, full, window)


@pytest.mark.parametrize(
    ("changes", "expected", "found"),
    [
        (
            {"speculators_model_type": "eagle3"},
            "speculators_model_type 'dflash'",
            "only DFlash drafts are served",
        ),
        ({"speculators_model_type": "dspark"}, "speculators_model_type 'dflash'", "'dspark'"),
        ({"projector_type": "domino"}, "projector_type 'dflash'", "'domino'"),
        ({"sample_from_anchor": True}, "a draft without sample_from_anchor", "True"),
        ({"shift_label": True}, "a draft without shift_label", "True"),
        ({"target_hidden_size": 64}, "target_hidden_size to be the draft's hidden_size 32", "64"),
        ({"aux_hidden_state_layer_ids": [0, 4, 6]}, "aux_hidden_state_layer_ids to be an integer of 1", "0"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids to be a list", "None"),
        ({"mask_token_id": None}, "mask_token_id to be an integer", "None"),
        ({"draft_vocab_size": 51}, "draft_vocab_size of at most the vocab_size 50", "51"),
        ({"transformer_layer_config": {"rope_parameters": None}}, "(10000 would be assumed)", "neither"),
        ({"transformer_layer_config": {"model_type": "llama"}}, "of model_type 'qwen3'", "'llama'"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], expected: str, found: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read(**changes)
    said = str(error.value.args[0]).split(", found ", maxsplit=1)
    assert expected in said[0]
    assert found in said[1]


def load_drafter(target: Path, draft: Path) -> Drafter:
    return assembly.load_drafter(
        ServingConfig(target, draft, dtype="float32", kv_cache_mib=1, draft_kv_cache_mib=1, page_size=16)
    )


def draft(drafter: Drafter, features: torch.Tensor, root: int, width: int) -> DraftResult:
    zero = torch.zeros(1, dtype=torch.int32)
    return drafter.draft(
        DraftRequest(
            SessionBatch(torch.tensor([1]), zero, zero), torch.zeros(len(features)).int(), features,
            torch.tensor([len(features)]).int(), torch.tensor([root]).int(), torch.tensor([64]).int(),
            depth=BLOCK - 1, width=width,
        )
    )  # fmt: skip


def test_drafts_come_from_its_own_head_over_its_own_tokens(
    dflash: ModuleType, target: Path, tmp_path: Path
) -> None:
    """Hidden states as the public package has them for the same layers; then the draft's head and map."""
    values = speculators_values()
    tensors = speculators_tensors(values)
    folder = write_folder(tmp_path / "speculators", values, tensors)
    layers = {name: tensors[name] for name in random_tensors(config_values())}
    reference = ReferenceDrafter(dflash, write_folder(tmp_path / "z-lab", config_values(), layers))
    drafter = load_drafter(target, folder)
    embedding = load_tables(target, dtype=torch.float32, device=CPU).embedding
    with torch.inference_mode():
        taps = torch.randn(9, 3 * HIDDEN, generator=torch.Generator().manual_seed(0))
        features = reference.model.hidden_norm(reference.model.fc(taps))
        result = draft(drafter, features, root=3, width=40)
        block = torch.tensor([3, *[MASK_ID] * (BLOCK - 1)])
        hidden = reference.step(taps, embedding[block])[1:]
        expected = functional.linear(hidden, tensors["lm_head.weight"]).log_softmax(-1)
    assert result.top_ids.shape == (1, BLOCK - 1, DRAFTED), "no wider than the draft's own vocabulary"
    tokens = torch.arange(DRAFTED) + tensors["d2t"]
    order = expected.sort(-1, descending=True)
    assert torch.equal(result.top_ids[0].long(), tokens[order.indices])
    assert torch.allclose(result.top_log_probs[0], order.values, atol=1e-4)


def test_a_head_over_all_tokens_is_used_too_and_none_is_the_targets(target: Path, tmp_path: Path) -> None:
    features, results = torch.randn(4, HIDDEN), []
    for name, drop in (("own", ()), ("borrowed", ("lm_head.weight",))):
        values = speculators_values(draft_vocab_size=VOCABULARY)
        tensors = {key: value for key, value in speculators_tensors(values).items() if key not in drop}
        folder = write_folder(tmp_path / name, values, tensors)
        results.append(draft(load_drafter(target, folder), features, root=3, width=8))
        head = open_checkpoint(folder).load_head(torch.float32, CPU)
        assert (head is None) == bool(drop)
    assert not torch.equal(results[0].top_ids, results[1].top_ids)


def _set(name: str, value: Callable[[Tensors], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: value(tensors)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # Target ids instead of distances to them, as some would write a map.
        (_set("d2t", lambda t: t["d2t"] + torch.arange(DRAFTED)), "expected d2t to lead to"),
        (_set("d2t", lambda t: t["d2t"] * 0 + 40), "expected d2t to lead to ids below 50"),
        (_set("d2t", lambda _: -torch.arange(DRAFTED)), "expected d2t to lead to every id once"),
        (_set("t2d", lambda t: ~t["t2d"]), "expected d2t to lead to the ids that t2d has"),
        (_set("d2t", lambda t: t["d2t"].float()), r"expected d2t as one of \('I64', 'I32'\), found F32"),
        (lambda t: t.__delitem__("d2t"), r"missing: d2t \[20\]"),
        (lambda t: t.__delitem__("lm_head.weight"), r"missing: lm_head\.weight \[20, 32\]"),
        (_set("embed_tokens.weight", lambda _: torch.randn(VOCABULARY, HIDDEN)), "to be the target's embed"),
        (_set("markov.weight", lambda _: torch.randn(2, 2)), r"found markov\.weight \[2, 2\] as well"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_what_they_should_be(
    target: Path, tmp_path: Path, change: Callable[[Tensors], None], message: str
) -> None:
    values = speculators_values()
    tensors = speculators_tensors(values)
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(target, write_folder(tmp_path, values, tensors))


def test_what_training_left_behind_does_no_harm(target: Path, tmp_path: Path) -> None:
    values = speculators_values()
    tensors = speculators_tensors(values)
    plain = load_drafter(target, write_folder(tmp_path / "plain", values, dict(tensors)))
    tensors["embed_tokens.weight"] = load_tables(target, dtype=torch.float32, device=CPU).embedding.bfloat16()
    tensors["verifier_norm.weight"] = torch.randn(HIDDEN)
    tensors["verifier_lm_head.weight"] = torch.randn(DRAFTED, HIDDEN)
    whole = load_drafter(target, write_folder(tmp_path / "whole", values, tensors))
    features = torch.randn(4, HIDDEN)
    results = [draft(drafter, features, root=3, width=5) for drafter in (plain, whole)]
    assert torch.equal(results[0].top_ids, results[1].top_ids)


def test_a_tap_beyond_the_target_is_refused(target: Path, tmp_path: Path) -> None:
    """The format does not say how many layers its target has, so the target is asked."""
    with pytest.raises(
        CheckpointError, match="target_layer_ids between 0 and 7, the target's last layer, found"
    ):
        load_drafter(target, write_speculators(tmp_path, aux_hidden_state_layer_ids=[2, 4, 9]))
