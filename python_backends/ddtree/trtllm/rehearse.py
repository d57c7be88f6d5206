"""Decodes a few prompts with the tree verifier and compares with the engine's own greedy decoding.

The trees hold the right continuation, not as first children, and as many wrong tokens: a draft model of any
quality would only change how much is accepted. This module drives the verifier directly, without Triton.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ddtree.trtllm.library import Library
from ddtree.types import PrefillRequest, SessionBatch, Status, TreeBatch, VerifyRequest
from ddtree.verify import TargetVerifier

_SESSION = 1
_DEPTH, _DECOYS = 4, 3


@dataclass(frozen=True)
class Rehearsed:
    """One prompt decoded both ways."""

    prompt: tuple[int, ...]
    expected: tuple[int, ...]  # by the engine alone
    got: tuple[int, ...]  # by tree steps
    accepted: int  # draft tokens accepted on the way

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that differs; None when all are equal."""
        pairs = zip(self.expected, self.got, strict=True)
        return next((index for index, (left, right) in enumerate(pairs) if left != right), None)


class OwnEngine:
    """The engine by itself, without any draft, through its public API."""

    def __init__(self, library: Library, target: Path) -> None:
        self._library = library
        self._engine = library["LLM"](model=str(target))

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """The tokens it adds to a prompt."""
        params = self._library["SamplingParams"](max_tokens=max_tokens, end_id=-1)
        stream = self._engine.generate_async(inputs=list(prompt), sampling_params=params, streaming=True)
        for _ in stream:
            pass
        return tuple(stream.outputs[0].token_ids[:max_tokens])


def decode_plainly(verifier: TargetVerifier, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """Decode greedily by steps of one row."""
    return _decode(verifier, prompt, count, lambda _: TreeBatch.empty(1)).got


def decode_with_trees(
    verifier: TargetVerifier, prompt: Sequence[int], expected: Sequence[int], seed: int = 0
) -> Rehearsed:
    """Decode greedily as many tokens as are expected, with trees that know them."""
    source = random.Random(seed)
    size = verifier.target.vocab_size

    def tree(done: int) -> TreeBatch:
        return _tree(expected[done : done + _DEPTH], size, source)

    return replace(_decode(verifier, prompt, len(expected), tree), expected=tuple(expected))


def _decode(
    verifier: TargetVerifier, prompt: Sequence[int], wanted: int, tree: Callable[[int], TreeBatch]
) -> Rehearsed:
    """Decode; `tree` makes the next draft tree after so many tokens."""
    reserve = len(prompt) + wanted + _DEPTH * (_DECOYS + 1) + 2
    prefilled = verifier.prefill(
        PrefillRequest(_session(0), _int32(prompt), _int32([len(prompt)]), _int32([reserve]))
    )
    assert prefilled.status.tolist() == [Status.OK], "kv_cache_mib has no room for one prompt"
    got = [int(prefilled.next_tokens[0])]
    committed, accepted = len(prompt), 0
    while len(got) < wanted:
        result = verifier.verify(VerifyRequest(_session(committed), _int32([got[-1]]), tree(len(got))))
        assert result.status.tolist() == [Status.OK], "the verifier lost the only session"
        count = int(result.accepted_counts[0])
        committed, accepted = committed + count + 1, accepted + count
        got += [*result.accepted_tokens[0, :count].tolist(), int(result.bonus_tokens[0])]
    verifier.release([_SESSION])
    return Rehearsed(tuple(prompt), (), tuple(got[:wanted]), accepted)


def _tree(right: Sequence[int], vocab_size: int, source: random.Random) -> TreeBatch:
    """A level per token: wrong ones first, the right one last, and the next level under it."""
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    parent = 0
    for depth, token in enumerate(right, start=1):
        wrong = [value for value in source.sample(range(vocab_size), _DECOYS + 1) if value != token]
        level = [*wrong[:_DECOYS], token]
        tokens += level
        parents += [parent] * len(level)
        depths += [depth] * len(level)
        parent = len(tokens)
    return TreeBatch(_int32(tokens)[None], _int32(parents)[None], _int32(depths)[None], _int32([len(tokens)]))


def _session(length: int) -> SessionBatch:
    return SessionBatch(torch.tensor([_SESSION]), _int32([0]), _int32([length]))


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)
