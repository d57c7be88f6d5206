"""The training loop: batches in, a drafter out, with a log that says how well it drafts on held-out answers.

Bounded by steps, by wall-clock time, or both; the learning rate follows whichever is further. A training that
was stopped goes on from its last state. This module does not know where sequences come from.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from torch.nn import functional as F

from ddtree.errors import InvalidArgument
from ddtree.train.batches import Batch, BatchShape, epochs
from ddtree.train.checkpoints import TrainingState, write_draft
from ddtree.train.corpus import Sequences
from ddtree.train.draft_model import BlockBatch, TrainedDraft
from ddtree.train.loss import HeadLoss, position_weights
from ddtree.train.optimizers import make_optimizers, set_rates
from ddtree.train.targets import TapReader

_PREFETCHED = 8


@dataclass(frozen=True)
class TrainSettings:
    """How to train."""

    shape: BatchShape
    max_steps: int | None
    max_seconds: float | None  # at least one of the two is set
    rate: float = 1e-3
    matrix_rate: float | None = 0.02  # Muon's; None: AdamW for all
    weight_decay_positions: float = 7.0  # draft position k's loss weighs exp(-(k - 1) / this); 0: all alike
    warmup: float = 0.02  # part of the training
    clip: float = 1.0
    seed: int = 0
    save_seconds: float = 60.0
    log_seconds: float = 15.0
    compiled: bool = False


@dataclass(frozen=True)
class Scores:
    """How well a drafter foresees given sequences."""

    loss: float  # weighted cross-entropy
    chain: float  # acceptance length of a chain, given the true tokens before every anchor


@dataclass
class Trainer:
    """A drafter in training beside its frozen target."""

    draft: TrainedDraft
    taps: TapReader
    embedding: torch.Tensor  # [V, H] of the target, in the dtype to compute in
    head: torch.Tensor  # [V, H]
    values: dict[str, Any]  # the drafter's config.json
    settings: TrainSettings
    folder: Path
    log: Callable[[dict[str, Any]], None]
    step: int = 0
    seconds: float = 0.0
    _held_out: list[Batch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = self.embedding.device
        self.draft.to(self.device)
        self._loss = HeadLoss(self.head, compiled=self.settings.compiled)
        # Layer by layer: all share what is compiled once, and drafters with more or fewer layers do too.
        self._layers = (
            [torch.compile(layer.forward) for layer in self.draft.layers] if self.settings.compiled else None
        )
        self._optimizers = make_optimizers(
            self.draft, matrix_rate=self.settings.matrix_rate, rate=self.settings.rate
        )
        block = self.draft.config.block_size
        decay = self.settings.weight_decay_positions
        self._weights = position_weights(block - 1, decay, self.device)

    @property
    def state_path(self) -> Path:
        """Where the state is kept."""
        return self.folder / "state.pt"

    def resume(self) -> bool:
        """Go on from the folder's state; say whether there was one.

        Raises:
            InvalidArgument: it belongs to other optimizers.
        """
        if not self.state_path.is_file():
            return False
        state = TrainingState.load(self.state_path, self.device)
        if len(state.optimizers) != len(self._optimizers):
            raise InvalidArgument.of(
                "matrix_rate", "must be set or unset as when this training began", self.settings.matrix_rate,
                f"go on with the same optimizers, or remove {self.state_path}",
            )  # fmt: skip
        self.draft.load_state_dict(state.draft)
        for optimizer, saved in zip(self._optimizers, state.optimizers, strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds = state.step, state.seconds
        return True

    def save(self) -> None:
        """Write the drafter and the state to go on from."""
        write_draft(self.folder / "draft", self.draft, self.values)
        states = [optimizer.state_dict() for optimizer in self._optimizers]
        TrainingState(self.draft.state_dict(), states, self.step, self.seconds).save(self.state_path)

    def run(self, sequences: Sequences, held_out: Sequences, deadline: float | None = None) -> bool:
        """Train to the settings' bounds or until `deadline` (of `time.monotonic`); say whether it is done.

        Every call takes at least one step, so that repeated short ones come to an end.
        """
        settings = self.settings
        self._held_out = few_batches(held_out, settings)
        last = logged = saved = time.monotonic()
        losses: list[torch.Tensor] = []
        for batch in _prefetched(epochs(sequences, settings.shape, seed=settings.seed, skip=self.step)):
            if self._progress() >= 1:
                break
            losses.append(self._train_step(batch))
            if len(losses) % 8 == 0:
                float(losses[-1])  # waits for the device, so that the clock is about work that is done
            now = time.monotonic()
            self.seconds, last = self.seconds + now - last, now
            if now - logged >= settings.log_seconds or self._progress() >= 1:
                self._report(losses)
                losses, logged = [], time.monotonic()
                self.seconds, last = self.seconds + logged - last, logged
            if now - saved >= settings.save_seconds:
                self.save()
                saved = time.monotonic()
            if deadline is not None and now >= deadline:
                break
        self.save()
        return self._progress() >= 1

    def hidden_of(self, batch: Batch) -> torch.Tensor:
        """Draft a batch's blocks; `[S, A, B, H]`."""
        ids, anchors = (part.to(self.device, non_blocking=True) for part in (batch.ids, batch.anchors))
        return self._draft_blocks(ids, anchors)

    def held_out_scores(self) -> dict[str, float]:
        """Loss and the chain's acceptance length at held-out anchors, given the true tokens before them."""
        scores = self.scores_of(self._held_out, self._weights)
        return {"held_out_loss": scores.loss, "held_out_chain": scores.chain}

    @torch.no_grad()
    def scores_of(
        self,
        batches: Sequence[Batch],
        weights: torch.Tensor,  # [B - 1] float32 of draft positions, in the loss
    ) -> Scores:
        """Measure the drafter at the anchors of batches."""
        losses, accepted, count = [], 0.0, 0
        for batch in batches:
            hidden, labels = self.hidden_of(batch)[:, :, 1:], batch.labels.to(self.device)
            losses.append(self._loss_of(hidden, labels, weights))
            rows = hidden.reshape(-1, hidden.shape[-1]).split(4096)
            guesses = torch.cat([(part @ self.head.T).argmax(-1) for part in rows]).view(labels.shape)
            accepted += float((guesses == labels).cumprod(-1).sum())
            count += labels[..., 0].numel()
        return Scores(float(torch.stack(losses).mean()), 1 + accepted / count)

    def _draft_blocks(self, ids: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        config = self.draft.config
        # Without gradients, or for one sequence, all would be compiled once more: not worth it to measure.
        measures = not torch.is_grad_enabled()
        taps = self.taps.read(ids, plainly=measures).to(self.embedding.dtype)
        tokens = torch.full(
            (*anchors.shape, config.block_size), config.mask_token_id, dtype=ids.dtype, device=ids.device
        )
        tokens[..., 0] = ids.gather(1, anchors)
        embeds = F.embedding(tokens, self.embedding) * config.input_embedding_scale
        if self._layers is not None and not measures:
            embeds.requires_grad_()  # as the inputs of all layers but the first do: compiled once for all
        hidden: torch.Tensor = self.draft(
            BlockBatch(taps, embeds, anchors), None if measures else self._layers
        )
        return hidden

    def _loss_of(self, hidden: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        each = weights.expand(labels.shape).reshape(-1)
        return self._loss(hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1), each)

    def _train_step(self, batch: Batch) -> torch.Tensor:
        set_rates(self._optimizers, self._rate_factor())
        hidden = self.hidden_of(batch)
        labels = batch.labels.to(self.device, non_blocking=True)
        loss = self._loss_of(hidden[:, :, 1:], labels, self._weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), self.settings.clip)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.detach()

    def _progress(self) -> float:
        """How much of the training is done, 0 to 1."""
        parts = [0.0]
        if self.settings.max_steps is not None:
            parts.append(self.step / self.settings.max_steps)
        if self.settings.max_seconds is not None:
            parts.append(self.seconds / self.settings.max_seconds)
        return max(parts)

    def _rate_factor(self) -> float:
        """Linear warm-up, then a cosine to a fiftieth."""
        progress = min(1.0, self._progress())
        if progress < self.settings.warmup:
            return max(progress, 1e-3) / self.settings.warmup
        rest = (progress - self.settings.warmup) / (1 - self.settings.warmup)
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * rest))

    def _report(self, losses: list[torch.Tensor]) -> None:
        facts = {"step": self.step, "seconds": round(self.seconds, 1), "rate": self._rate_factor()}
        loss = float(torch.stack(losses).mean())
        self.log({**facts, "loss": loss, "steps": len(losses), **self.held_out_scores()})


def jsonl_log(path: Path) -> Callable[[dict[str, Any]], None]:
    """Give a log that appends one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(entry: dict[str, Any]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    return write


def few_batches(sequences: Sequences, settings: TrainSettings, count: int = 4) -> list[Batch]:
    """Give batches to measure on: always the same ones of the same sequences, shape and seed."""
    batches = epochs(sequences, settings.shape, seed=settings.seed + 1)
    return [next(batches) for _ in range(count)]


def _prefetched(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Make batches in a thread, so that the device never waits for them; the thread ends with the caller."""
    queue: Queue[Batch] = Queue(_PREFETCHED)
    stopped = threading.Event()
    pins = torch.cuda.is_available()

    def fill() -> None:
        for batch in batches:
            queue.put(batch.pinned() if pins else batch)
            if stopped.is_set():
                return

    thread = threading.Thread(target=fill, name="batches", daemon=True)
    thread.start()
    try:
        while True:
            yield queue.get()
    finally:
        stopped.set()
        while thread.is_alive():
            while not queue.empty():
                queue.get()
            thread.join(0.05)
