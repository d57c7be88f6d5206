"""Our drafter and the public `dflash` package's, driven over the same rounds of growing contexts."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from ddtree.models.dflash import ContextReader, DFlashDraft, FeatureProjection
from ddtree.models.draft_checkpoint import open_checkpoint

CPU = torch.device("cpu")


def public_package() -> ModuleType:
    """The public package's model module; without it parity tests can say nothing, so they fail."""
    try:
        version = importlib.metadata.version("dflash")
    except importlib.metadata.PackageNotFoundError:
        pytest.fail("the dflash package is missing: pip install --no-deps dflash==0.1.0")
    assert version == "0.1.0", "the parity tests are about dflash 0.1.0"
    return importlib.import_module("dflash.model")


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
        (name,) = json.loads((folder / "config.json").read_text())["architectures"]
        model_class = getattr(dflash, name)
        self.model: Any = model_class.from_pretrained(folder, dtype=torch.float32).eval()
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
