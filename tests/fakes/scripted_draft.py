"""A drafter's pass over device rows that knows one long text and proposes how it goes on, with errors.

Every sequence is a piece of that text from its start, so the committed length alone says what follows. The
context is kept as the product's drafter keeps it, in PyTorch; what is proposed comes from the text, with the
true token first, further down, or missing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ddtree.device.drafting import DeviceCandidates, DeviceDraft
from ddtree.device.rows import DeviceRows
from ddtree.draft import Drafter
from tests.fakes.plain_kernels import slot_of


@dataclass
class Script:
    """What is proposed, and how well."""

    text: Sequence[int] = ()
    noise: float = 0.4
    is_checked: bool = False  # while rounds are timed, no text stands anywhere
    source: random.Random = field(default_factory=lambda: random.Random(0))

    def candidates(self, true: int, vocabulary: int, width: int) -> list[int]:
        """Distinct tokens, the true one (-1: there is none) first, further down, or missing."""
        row = self.source.sample([token for token in range(vocabulary) if token != true], width)
        if true >= 0 and self.source.random() > self.noise / 2:
            row[self.source.randrange(width) if self.source.random() < self.noise else 0] = true
        return row


class ScriptedDraft(DeviceDraft):
    """Proposes the text; looks at the host, so it is for a CPU only."""

    script = Script()

    def draft(self, roots: torch.Tensor, rows: DeviceRows, width: int) -> DeviceCandidates:
        """Candidates by rank, each half as probable as the one before."""
        positions, vocabulary, script = rows.rows - 1, len(self._embedding), self.script
        ids = torch.zeros((rows.places, positions, width), dtype=torch.int32)
        for place, (length, count) in enumerate(
            zip(rows.lengths.tolist(), rows.counts.tolist(), strict=True)
        ):
            is_text = script.text[length] == int(roots[place])
            assert not count or is_text or not script.is_checked, "the text stands at its root"
            for depth, at in enumerate(range(length + 1, length + 1 + positions)):
                true = script.text[at] if at < len(script.text) else -1
                ids[place, depth] = torch.tensor(script.candidates(true, vocabulary, width))
        log_probs = torch.log_softmax(-0.7 * torch.arange(width), dim=0).expand(ids.shape)
        return DeviceCandidates(ids, log_probs, None)

    def extend(self, features: torch.Tensor, counts: torch.Tensor, rows: DeviceRows) -> None:
        """Write each place's new context at its slots."""
        for place, (length, count) in enumerate(zip(rows.lengths.tolist(), counts.tolist(), strict=True)):
            if count:
                positions = torch.arange(length, length + count)
                keys, values = self._model.context_kv(features[place, :count], positions)
                slots = torch.tensor([slot_of(rows, place, at) for at in positions.tolist()])
                self._pool.write_layers(slots, keys, values)


class ScriptedDrafter(Drafter):
    """The product's drafter with that pass."""

    script = Script()

    def on_device(self) -> DeviceDraft:
        draft = ScriptedDraft(self.model, self._embedding, self._head, self._target_ids, self.pool)
        draft.script = self.script
        return draft
