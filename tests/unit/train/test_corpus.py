"""Shards on disk, held-out sequences, and finding prompts that were to be kept out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ddtree.errors import InvalidArgument
from ddtree.train.corpus import Corpus, Sequences, overlapping, pack, split_held_out


def sequences(rows: list[list[int]], starts: list[int], sources: list[int] | None = None) -> Sequences:
    count = len(rows)
    arrays = [np.array(row) for row in rows]
    return pack(arrays, starts, [0.5] * count, sources or [0] * count, [True] * count, 49152)


def test_what_is_written_is_read_back_in_16_bits(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path / "corpus")
    corpus.append(sequences([[1, 2, 3], [49151, 5]], [1, 1]))
    Corpus(tmp_path / "corpus").append(sequences([[7, 8, 9, 10]], [2], sources=[3]))
    assert [path.name for path in corpus.shards] == ["shard-00000.npz", "shard-00001.npz"]
    found = corpus.read()
    assert found.ids.dtype == np.uint16
    assert found.ids.tolist() == [1, 2, 3, 49151, 5, 7, 8, 9, 10]
    assert found.lengths.tolist() == [3, 2, 4]
    assert found.answer_starts.tolist() == [1, 1, 2]
    assert found.sources.tolist() == [0, 0, 3]
    assert found.temperatures.tolist() == [0.5] * 3
    assert found.answer_tokens == 2 + 1 + 2


def test_large_vocabularies_take_32_bits() -> None:
    assert pack([np.array([100_000])], [0], [0.0], [0], [True], 151_936).ids.tolist() == [100_000]


def test_a_half_written_shard_is_no_shard(tmp_path: Path) -> None:
    (tmp_path / "shard-00000.partial").write_bytes(b"half")
    with pytest.raises(InvalidArgument, match="must hold shards"):
        Corpus(tmp_path).read()


def test_sequences_are_taken_in_the_order_asked() -> None:
    taken = sequences([[1, 2], [3, 4, 5], [6]], [0, 1, 0]).take(np.array([2, 1]))
    assert taken.ids.tolist() == [6, 3, 4, 5]
    assert taken.answer_starts.tolist() == [0, 1]


def test_held_out_sequences_are_made_up_ones_and_in_no_training() -> None:
    rows = [[number, number] for number in range(40)]
    training, held_out = split_held_out(sequences(rows, [1] * 40, sources=[0, 1] * 20), 5, seed=0)
    assert set(held_out.sources.tolist()) == {0}
    seen, kept = set(training.ids.tolist()), set(held_out.ids.tolist())
    assert len(held_out) == 5
    assert len(training) == 35
    assert not seen & kept


@pytest.fixture
def noise() -> list[list[int]]:
    """Twelve sequences of 60 ids, the first 40 of each being the prompt."""
    random = np.random.default_rng(0)
    return [random.integers(0, 49152, 60).tolist() for _ in range(12)]


def test_overlaps_in_prompts_are_found_and_nothing_else(noise: list[list[int]]) -> None:
    random = np.random.default_rng(1)
    long, short = (random.integers(0, 49152, size).tolist() for size in (50, 7))
    noise[1][3:19] = long[10:26]  # 16 in a row
    noise[2][24:40] = long[34:50]  # up to the prompt's very end
    noise[3][3:18] = long[10:25]  # one too few
    noise[4][25:41] = long[0:16]  # the last of them is the answer's first
    noise[5][44:60] = long[0:16]  # in the answer
    noise[6][33:40] = short  # a short prompt, whole
    noise[7][36:40], noise[8][:3] = short[:4], short[4:]  # from one prompt into the next
    noise[9][0:6] = short[:6]
    assert overlapping(sequences(noise, [40] * 12), [long, short]).tolist() == [1, 2, 6]


def test_nothing_to_keep_out_finds_nothing(noise: list[list[int]]) -> None:
    assert overlapping(sequences(noise, [40] * 12), [[]]).tolist() == []
