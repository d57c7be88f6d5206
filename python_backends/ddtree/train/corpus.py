"""Generated sequences on disk: ids in 16 bits where they fit, many sequences a file, files never changed.

Each shard is an `.npz` of flat ids and one row of facts per sequence. A shard appears whole or not at all, so
a generation that was stopped goes on with the next number. This module also finds sequences whose prompt
shares a long run of tokens with prompts that are only for evaluation. It knows no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.errors import InvalidArgument

_PATTERN = "shard-{:05d}.npz"
_FACTS = ("lengths", "answer_starts", "temperatures", "sources", "is_whole")
ANSWERS = ("all", "greedy", "drawn")  # by the temperature they were chosen at
_TABLE = 1 << 20
_MIX = np.uint64(0x9E3779B97F4A7C15)  # spreads ids before they are summed into a run's hash


@dataclass(frozen=True)
class Sequences:
    """Sequences laid end to end."""

    ids: NDArray[Any]  # [sum of lengths] uint16, or uint32 for larger vocabularies
    lengths: NDArray[np.int32]  # [n]
    answer_starts: NDArray[np.int32]  # [n]
    temperatures: NDArray[np.float32]  # [n] of the answers
    sources: NDArray[np.int32]  # [n] 0: made up by the target
    is_whole: NDArray[np.bool_]  # [n] ended by an end token

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each sequence begins in `ids`."""
        return np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    @property
    def answer_tokens(self) -> int:
        """Tokens of all answers."""
        return int((self.lengths - self.answer_starts).sum())

    def take(self, places: NDArray[np.int64]) -> Sequences:
        """Give the sequences at `places`, in that order."""
        starts = self.starts
        parts = [self.ids[starts[i] : starts[i] + self.lengths[i]] for i in places]
        ids = np.concatenate(parts) if parts else self.ids[:0]
        return Sequences(ids, *(getattr(self, name)[places] for name in _FACTS))

    @classmethod
    def join(cls, parts: Sequence[Sequences]) -> Sequences:
        """Lay several end to end."""
        columns = [np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", *_FACTS)]
        return cls(*columns)


def pack(
    rows: Sequence[NDArray[Any]],
    answer_starts: Sequence[int],
    temperatures: Sequence[float],
    sources: Sequence[int],
    is_whole: Sequence[bool],
    vocab_size: int,
) -> Sequences:
    """Lay rows of ids end to end, in the narrowest type that holds the vocabulary."""
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    flat = np.concatenate(rows).astype(dtype) if rows else np.empty(0, dtype)
    return Sequences(
        flat,
        np.array([len(row) for row in rows], np.int32),
        np.array(answer_starts, np.int32),
        np.array(temperatures, np.float32),
        np.array(sources, np.int32),
        np.array(is_whole, np.bool_),
    )


class Corpus:
    """A folder of shards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def shards(self) -> list[Path]:
        """The shards' files in their order."""
        return sorted(self.folder.glob("shard-*.npz"))

    def append(self, sequences: Sequences) -> Path:
        """Write the next shard."""
        self.folder.mkdir(parents=True, exist_ok=True)
        shards = self.shards
        number = int(shards[-1].stem.split("-")[1]) + 1 if shards else 0
        path = self.folder / _PATTERN.format(number)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            np.savez(file, ids=sequences.ids, **{name: getattr(sequences, name) for name in _FACTS})
        partial.replace(path)
        return path

    def read(self) -> Sequences:
        """Read all shards.

        Raises:
            InvalidArgument: there is none.
        """
        if not self.shards:
            raise InvalidArgument.of(
                "corpus", "must hold shards", str(self.folder), "run `ddtree-train generate` first"
            )
        parts = []
        for path in self.shards:
            with np.load(path) as columns:
                parts.append(Sequences(columns["ids"], *(columns[name] for name in _FACTS)))
        return Sequences.join(parts)


def split_held_out(sequences: Sequences, count: int, seed: int) -> tuple[Sequences, Sequences]:
    """Give (training, held-out) sequences.

    Prompts from files recur at several temperatures, so only made-up ones are held out, if there are enough.
    """
    made_up = np.flatnonzero(sequences.sources == 0)
    pool = made_up if len(made_up) >= 2 * count else np.arange(len(sequences))
    chosen = np.random.default_rng(seed).permutation(pool)[:count]
    rest = np.ones(len(sequences), bool)
    rest[chosen] = False
    return sequences.take(np.flatnonzero(rest)), sequences.take(np.sort(chosen))


def answered(sequences: Sequences, how: str) -> Sequences:
    """Give the sequences whose answers were chosen in one way.

    Args:
        sequences: what to choose from; their order is kept.
        how: one of `ANSWERS`: `greedy` at temperature 0, `drawn` above it, `all` both.

    Raises:
        InvalidArgument: another word, or there is no such sequence.
    """
    if how not in ANSWERS:
        raise InvalidArgument.of("answers", f"must be one of {', '.join(ANSWERS)}", how, "choose one of them")
    if how == "all":
        return sequences
    is_greedy = sequences.temperatures == 0
    places = np.flatnonzero(is_greedy if how == "greedy" else ~is_greedy)
    if not len(places):
        raise InvalidArgument.of(
            "answers", "must be of a kind that the corpus holds", how, "generate with other --temperatures"
        )
    return sequences.take(places)


def part_of(sequences: Sequences, answer_tokens: int, seed: int) -> Sequences:
    """Give randomly chosen sequences that hold about `answer_tokens`, all if there are no more.

    With one seed a smaller part lies within every larger one, so that parts differ in their amount alone.

    Raises:
        InvalidArgument: nothing is asked for.
    """
    if answer_tokens < 1:
        raise InvalidArgument.of("data share", "must leave a token of an answer", answer_tokens, "take more")
    if answer_tokens >= sequences.answer_tokens:
        return sequences
    order = np.random.default_rng((seed, 1)).permutation(len(sequences))
    held = np.cumsum((sequences.lengths - sequences.answer_starts)[order])
    count = int(np.searchsorted(held, answer_tokens)) + 1
    return sequences.take(np.sort(order[:count]))


def overlapping(
    sequences: Sequences,
    prompts: Iterable[Sequence[int]],
    run: int = 16,
) -> NDArray[np.int64]:
    """Find sequences whose prompt shares `run` tokens in a row with one of `prompts`.

    Args:
        sequences: what to look through; answers are not looked at.
        prompts: ids without the chat frame, which all prompts share; a shorter one must recur whole.
        run: length of a shared stretch that counts.

    Returns:
        Indices of such sequences, ascending.
    """
    wanted: dict[int, list[NDArray[np.uint64]]] = {}
    for prompt in prompts:
        ids = np.asarray(prompt, np.uint64)
        width = min(run, len(ids))
        if width:
            wanted.setdefault(width, []).append(_hashes(ids, width))
    # Prompts alone, end to end; a run that reaches from one into the next is no hit.
    owners = np.repeat(np.arange(len(sequences)), sequences.answer_starts)
    ends = np.cumsum(sequences.answer_starts, dtype=np.int64)
    inside = np.arange(len(owners)) - (ends - sequences.answer_starts)[owners]
    ids = sequences.ids[inside + sequences.starts[owners]].astype(np.uint64)
    found: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    for width, hashes in wanted.items():
        if len(ids) < width:
            continue
        rolled, sought = _hashes(ids, width), np.unique(np.concatenate(hashes))
        # A table over a few bits of the hash rules nearly everything out before anything is compared.
        is_likely = np.zeros(_TABLE, np.bool_)
        is_likely[sought & np.uint64(_TABLE - 1)] = True
        likely = np.flatnonzero(is_likely[rolled & np.uint64(_TABLE - 1)])
        hits = likely[np.isin(rolled[likely], sought)]
        owner = owners[hits]
        found.append(owner[hits + width <= ends[owner]])
    return np.unique(np.concatenate(found))


def _hashes(ids: NDArray[np.uint64], width: int) -> NDArray[np.uint64]:
    """Hash every run of `width` ids; unsigned sums wrap around."""
    mixed = (ids + np.uint64(1)) * _MIX
    mixed ^= mixed >> np.uint64(29)
    total = np.zeros(len(ids) - width + 1, np.uint64)
    for offset in range(width):
        factor = np.uint64(pow(0x100000001B3, width - offset, 1 << 64))
        total += mixed[offset : offset + len(total)] * factor
    return total
