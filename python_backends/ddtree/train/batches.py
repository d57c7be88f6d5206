"""Training batches: sequences of similar length side by side, with random anchors in their answers.

An anchor is the root token's position; the block's labels are the tokens after it. This module knows ids and
answer starts only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddtree.train.corpus import Sequences
from ddtree.train.loss import IGNORED

_PADDED_TO = 64  # few distinct lengths: kernels are chosen, and perhaps compiled, per shape


@dataclass(frozen=True)
class Batch:
    """Sequences with the places of their blocks, on the CPU."""

    ids: torch.Tensor  # [S, n] int64, zeros after a sequence's end
    anchors: torch.Tensor  # [S, A] int64
    labels: torch.Tensor  # [S, A, B - 1] int64, IGNORED beyond the sequence's end

    def pinned(self) -> Batch:
        """Give the same in page-locked memory, from which a device copies while it computes."""
        return Batch(self.ids.pin_memory(), self.anchors.pin_memory(), self.labels.pin_memory())


@dataclass(frozen=True)
class BatchShape:
    """Sizes of a batch."""

    sequences: int
    anchors: int  # per sequence
    block_size: int


def epochs(sequences: Sequences, shape: BatchShape, *, seed: int, skip: int = 0) -> Iterator[Batch]:
    """Go on giving batches, epoch after epoch; the same seed gives the same ones.

    Args:
        sequences: sequences without at least two answer tokens are left out.
        shape: sizes.
        seed: of order and anchors.
        skip: batches to leave out at the beginning, for a training that goes on.
    """
    usable = np.flatnonzero(sequences.lengths - sequences.answer_starts >= 2)
    starts, done, epoch = sequences.starts, 0, 0
    while True:
        random = np.random.default_rng((seed, epoch))
        for members in _groups(sequences.lengths, usable, shape.sequences, random):
            done += 1
            if done > skip:
                yield make_batch(
                    sequences, starts, members, shape, np.random.default_rng((seed, epoch, done))
                )
        epoch += 1


def make_batch(
    sequences: Sequences,
    starts: NDArray[np.int64],
    members: NDArray[np.int64],
    shape: BatchShape,
    random: np.random.Generator,
) -> Batch:
    """Lay sequences side by side and choose their anchors."""
    lengths = sequences.lengths[members].astype(np.int64)
    width = -(-int(lengths.max()) // _PADDED_TO) * _PADDED_TO
    ids = np.zeros((len(members), width + shape.block_size), np.int64)
    for row, (start, length) in enumerate(zip(starts[members], lengths, strict=True)):
        ids[row, :length] = sequences.ids[start : start + length]
    anchors = _choose_anchors(sequences.answer_starts[members], lengths, shape.anchors, random)
    places = anchors[..., None] + np.arange(1, shape.block_size)
    labels = np.take_along_axis(ids, places.reshape(len(members), -1), 1).reshape(places.shape)
    labels = np.where(places < lengths[:, None, None], labels, IGNORED)
    return Batch(torch.from_numpy(ids[:, :width]), torch.from_numpy(anchors), torch.from_numpy(labels))


def _choose_anchors(
    answer_starts: NDArray[Any], lengths: NDArray[np.int64], count: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """Spread anchors over an answer: one in each of `count` equal parts of it, at a random place."""
    first, last = answer_starts.astype(np.float64)[:, None], lengths[:, None] - 1.0
    parts = (np.arange(count) + random.random((len(lengths), count))) / count
    chosen: NDArray[np.int64] = np.floor(first + parts * (last - first)).astype(np.int64)
    return chosen


def _groups(
    lengths: NDArray[np.int32], usable: NDArray[np.int64], size: int, random: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    """Batches of similar length, in random order; what is left over of a pool waits for the next epoch."""
    order = random.permutation(usable)
    pool = size * 64
    groups: list[NDArray[np.int64]] = []
    for start in range(0, len(order), pool):
        part = order[start : start + pool]
        part = part[np.argsort(lengths[part], kind="stable")]
        groups += [part[at : at + size] for at in range(0, len(part) - size + 1, size)]
    if not groups:  # fewer sequences than a batch: repeat them
        yield random.choice(order, size)
        return
    for place in random.permutation(len(groups)):
        yield groups[place]
