"""Our drafter against the public `dflash` package, and what packing and caching must not change."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ddtree.models.dflash import DFlashDraft, FeatureProjection
from ddtree.models.draft_checkpoint import open_checkpoint
from tests.fakes.dflash_reference import CPU, OurDrafter, max_difference, public_package
from tests.fakes.random_draft import write_draft

DEMO_DRAFT = Path(__file__).parents[2] / "drafters" / "smollm2-135m-dflash"
SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]
TOLERANCE = 1e-4


@pytest.fixture(scope="session")
def dflash() -> ModuleType:
    return public_package()


@pytest.fixture(autouse=True)
def _fixed_noise() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="full, not causal"),
        pytest.param({"is_causal": True}, id="full, causal"),
        pytest.param(
            {"layer_types": SLIDING, "use_sliding_window": True, "sliding_window": 8},
            id="sliding layers are causal unless told otherwise",
        ),
        pytest.param(
            {"layer_types": SLIDING, "use_sliding_window": True, "sliding_window": 8, "is_causal": False},
            id="symmetric window wider than the block",
        ),
        pytest.param(
            {"layer_types": SLIDING, "use_sliding_window": True, "sliding_window": 4, "is_causal": False},
            id="symmetric window narrower than the block",
        ),
        pytest.param(
            {"layer_types": SLIDING, "use_sliding_window": True, "sliding_window": 8, "is_causal": True},
            id="window, all causal",
        ),
    ],
)
def test_hidden_states_and_logits_equal_the_public_package(
    dflash: ModuleType, tmp_path: Path, changes: dict[str, Any], num_sequences: int
) -> None:
    folder = write_draft(tmp_path, **changes)
    assert max_difference(dflash, folder, num_sequences) <= TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"attention_bias": True}, id="biases"),
        pytest.param({"rope_parameters": None, "rope_theta": 700.0}, id="rope_theta at the root"),
        pytest.param(
            {
                "rope_parameters": None,
                "rope_theta": 700.0,
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            id="linear scaling in the older field",
        ),
        pytest.param(
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 700.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                }
            },
            id="yarn",
        ),
        pytest.param(
            {
                "dflash_config": {
                    "mask_token_id": 49,
                    "target_layer_ids": [0, 7],
                    "output_multiplier": 0.5,
                    "final_logit_softcapping": 2.0,
                }
            },
            id="scaled and capped logits",
        ),
        pytest.param({"dflash_config": {"mask_token_id": 49}, "output_multiplier": 3.0}, id="default taps"),
        pytest.param(
            {"num_hidden_layers": 1, "layer_types": None, "dflash_config": {"mask_token_id": 0}},
            id="one layer",
        ),
    ],
)
def test_variants_of_the_format_equal_the_public_package(
    dflash: ModuleType, tmp_path: Path, changes: dict[str, Any]
) -> None:
    assert max_difference(dflash, write_draft(tmp_path, **changes), 2) <= TOLERANCE


def test_the_demo_drafter_equals_the_public_package(dflash: ModuleType) -> None:
    assert max_difference(dflash, DEMO_DRAFT, 2, rounds=3) <= TOLERANCE


def test_a_sequence_drafts_the_same_alone_and_packed(tmp_path: Path) -> None:
    folder = write_draft(tmp_path, layer_types=SLIDING, use_sliding_window=True, sliding_window=5)
    together = OurDrafter(folder, 3)
    config = together.draft.config
    taps = [torch.randn(n, config.feature_size) for n in (2, 11, 5)]
    block_embeds = torch.randn(3, config.block_size, config.hidden_size)
    packed = together.step(taps, block_embeds)
    for index in range(3):
        alone = OurDrafter(folder, 1).step([taps[index]], block_embeds[index : index + 1])
        torch.testing.assert_close(packed[index : index + 1], alone, rtol=0, atol=1e-5)


def test_context_in_chunks_equals_context_at_once(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_draft(tmp_path))
    draft = DFlashDraft.load(checkpoint, torch.float32, CPU)
    features, positions = torch.randn(7, checkpoint.config.hidden_size), torch.arange(20, 27)
    whole = draft.context_kv(features, positions)
    parts = [draft.context_kv(features[part], positions[part]) for part in (slice(0, 3), slice(3, 7))]
    for kind in (0, 1):
        assert whole[kind].shape == (3, 7, 2, 12)
        joined = torch.cat([part[kind] for part in parts], 1)
        torch.testing.assert_close(joined, whole[kind], rtol=0, atol=1e-5)


def test_bf16_stays_close_to_float32(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_draft(tmp_path))
    config = checkpoint.config
    block_embeds = torch.randn(1, config.block_size, config.hidden_size)
    features, positions = torch.randn(300, config.hidden_size), torch.arange(300)
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        draft = DFlashDraft.load(checkpoint, dtype, CPU)
        keys, values = draft.context_kv(features.to(dtype), positions)
        block_positions = torch.arange(300, 300 + config.block_size)[None]
        read = lambda layer, _, k=keys, v=values: (k[layer], v[layer])  # noqa: E731
        outputs.append(draft(block_embeds.to(dtype), block_positions, read).float())
    scale = outputs[0].abs().mean()
    assert float((outputs[0] - outputs[1]).abs().mean() / scale) < 0.03


def test_projection_loads_alone_and_names_are_the_checkpoints(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_draft(tmp_path))
    projection = FeatureProjection.load(checkpoint, torch.bfloat16, CPU)
    assert set(projection.state_dict()) == {"fc.weight", "hidden_norm.weight"}
    features = projection(torch.randn(2, checkpoint.config.feature_size).bfloat16())
    assert features.shape == (2, checkpoint.config.hidden_size)
    assert not any(parameter.requires_grad for parameter in projection.parameters())
