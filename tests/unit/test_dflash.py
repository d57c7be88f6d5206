"""Our drafter against the public `dflash` package, and what packing and caching must not change."""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from ddtree.models.dflash import ContextReader, DFlashDraft, FeatureProjection
from ddtree.models.draft_checkpoint import open_checkpoint
from tests.fakes.random_draft import write_draft

CPU = torch.device("cpu")
PILOT = Path(__file__).parents[2] / "drafters" / "smollm2-135m-dflash-pilot"
SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]
TOLERANCE = 1e-4


@pytest.fixture(scope="session")
def dflash() -> ModuleType:
    """The public package's model module; without it these tests can say nothing, so they fail."""
    try:
        version = importlib.metadata.version("dflash")
    except importlib.metadata.PackageNotFoundError:
        pytest.fail("the dflash package is missing: pip install --no-deps dflash==0.1.0")
    assert version == "0.1.0", "the parity tests are about dflash 0.1.0"
    return importlib.import_module("dflash.model")


@pytest.fixture(autouse=True)
def _fixed_noise() -> None:
    torch.manual_seed(0)


@dataclass
class OurSequence:
    """One sequence's context, kept the simplest way: grown tensors, all layers."""

    length: int = 0
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat(self.keys, 1)[layer], torch.cat(self.values, 1)[layer]


class OurDrafter:
    """Projection, draft and context of a packed batch, as a drafter stage holds them."""

    def __init__(self, folder: Path, num_sequences: int) -> None:
        checkpoint = open_checkpoint(folder)
        self.projection = FeatureProjection.load(checkpoint, torch.float32, CPU)
        self.draft = DFlashDraft.load(checkpoint, torch.float32, CPU)
        self.sequences = [OurSequence() for _ in range(num_sequences)]

    def step(self, taps: list[torch.Tensor], block_embeds: torch.Tensor) -> torch.Tensor:
        """Take new context of every sequence in one packed call each, then draft."""
        counts = [len(rows) for rows in taps]
        starts = [sequence.length for sequence in self.sequences]
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        keys, values = self.draft.context_kv(self.projection(torch.cat(taps)), positions)
        for sequence, key, value in zip(
            self.sequences, keys.split(counts, 1), values.split(counts, 1), strict=True
        ):
            sequence.keys.append(key)
            sequence.values.append(value)
            sequence.length += key.shape[1]
        block = torch.arange(block_embeds.shape[1])
        block_positions = torch.stack([sequence.length + block for sequence in self.sequences])
        read: ContextReader = lambda layer, index: self.sequences[index].read(layer)  # noqa: E731
        hidden: torch.Tensor = self.draft(block_embeds, block_positions, read)
        return hidden


class ReferenceDrafter:
    """The public package's model and cache for one sequence, driven as its `dflash_generate` does."""

    def __init__(self, dflash: ModuleType, folder: Path) -> None:
        self._dflash = dflash
        self.model: Any = dflash.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
        self._cache = dflash._make_cache(self.model.config)
        self._length = 0

    def step(self, taps: torch.Tensor, block_embeds: torch.Tensor) -> torch.Tensor:
        start, self._length = self._length, self._length + len(taps)
        hidden: torch.Tensor = self.model(
            target_hidden=taps[None],
            noise_embedding=block_embeds[None],
            position_ids=torch.arange(start, self._length + len(block_embeds))[None],
            past_key_values=self._cache,
            use_cache=True,
        )
        self._dflash._crop_to(self._cache, self._length)
        return hidden[0]


def max_difference(
    dflash: ModuleType, folder: Path, num_sequences: int, rounds: int = 5, seed: int = 0
) -> float:
    """Drive both over the same rounds of growing contexts; give the largest difference in any output."""
    generator = torch.Generator().manual_seed(seed)
    ours = OurDrafter(folder, num_sequences)
    config = ours.draft.config
    references = [ReferenceDrafter(dflash, folder) for _ in range(num_sequences)]
    head = nn.Linear(config.hidden_size, 64, bias=False)
    worst = 0.0
    with torch.inference_mode():
        for step in range(rounds):
            counts = torch.randint(1, 6, (num_sequences,), generator=generator)
            if step == 0:  # prompts of clearly different lengths
                counts = counts + 9 * torch.arange(num_sequences)
            taps = [torch.randn(int(n), config.feature_size, generator=generator) for n in counts]
            shape = (num_sequences, config.block_size, config.hidden_size)
            block_embeds = torch.randn(shape, generator=generator)
            hidden = ours.step(taps, block_embeds)
            for index, reference in enumerate(references):
                expected = reference.step(taps[index], block_embeds[index])
                worst = max(worst, float((hidden[index] - expected).abs().max()))
                logits = ours.draft.finish_logits(head(hidden[index]))
                expected_logits = reference.model.compute_logits(expected, head)
                worst = max(worst, float((logits - expected_logits).abs().max()))
    return worst


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


def test_the_pilot_drafter_equals_the_public_package(dflash: ModuleType) -> None:
    assert max_difference(dflash, PILOT, 2, rounds=3) <= TOLERANCE


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
