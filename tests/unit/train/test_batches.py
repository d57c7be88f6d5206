"""What a training batch holds."""

from __future__ import annotations

from itertools import islice

import numpy as np
import torch

from ddtree.train.batches import BatchShape, epochs
from ddtree.train.corpus import Sequences, pack
from ddtree.train.loss import IGNORED

SHAPE = BatchShape(sequences=4, anchors=6, block_size=5)


def corpus(count: int = 24) -> Sequences:
    """Sequences whose tokens say where they stand: 100 * sequence + position."""
    random = np.random.default_rng(0)
    lengths = random.integers(12, 60, count)
    rows = [1000 * number + 1 + np.arange(length) for number, length in enumerate(lengths)]
    return pack(rows, [10] * count, [0.0] * count, [0] * count, [True] * count, 49152)


def test_labels_are_the_tokens_after_the_anchor_and_end_with_the_sequence() -> None:
    for batch in islice(epochs(corpus(), SHAPE, seed=0), 12):
        for row in range(SHAPE.sequences):
            ids = batch.ids[row][batch.ids[row] > 0].tolist()
            for anchor, labels in zip(batch.anchors[row].tolist(), batch.labels[row].tolist(), strict=True):
                expected = ids[anchor + 1 : anchor + SHAPE.block_size]
                assert labels == expected + [IGNORED] * (len(labels) - len(expected))
                assert 10 <= anchor <= len(ids) - 2, "a root is in the answer and has a token after it"


def test_an_epoch_takes_every_sequence_once_with_new_anchors_the_next_time() -> None:
    batches = list(islice(epochs(corpus(), SHAPE, seed=0), 12))
    for epoch in (batches[:6], batches[6:]):
        seen = sorted(int(batch.ids[row, 0]) for batch in epoch for row in range(4))
        assert seen == [1000 * number + 1 for number in range(24)]
    anchors = [
        {int(batch.ids[row, 0]): batch.anchors[row] for batch in epoch for row in range(4)}
        for epoch in (batches[:6], batches[6:])
    ]
    assert any(not torch.equal(anchors[0][first], anchors[1][first]) for first in anchors[0])


def test_skipping_goes_on_where_a_training_stopped() -> None:
    whole = list(islice(epochs(corpus(), SHAPE, seed=3), 9))
    rest = list(islice(epochs(corpus(), SHAPE, seed=3, skip=7), 2))
    for expected, found in zip(whole[7:], rest, strict=True):
        assert torch.equal(expected.ids, found.ids)
        assert torch.equal(expected.anchors, found.anchors)


def test_fewer_sequences_than_a_batch_repeat() -> None:
    batch = next(epochs(corpus(2), SHAPE, seed=0))
    assert batch.ids.shape[0] == SHAPE.sequences
