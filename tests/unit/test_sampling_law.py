"""What is emitted has exactly the target's law, whatever is drafted: every sequence of a toy target counted.

A target of six tokens whose logits depend on everything emitted so far; all 216 sequences of three tokens are
enumerated by the book (`tests.oracles.sampling_law`) and compared by Pearson's test with draws through the
product's own walk. A sampler that accepts drafts with min(1, p/q) fails the same test.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
import torch

from ddtree.accept import walk
from ddtree.sampling import SamplerState
from ddtree.sampling_spec import SamplingSpec
from ddtree.tree_sampling import first_tokens, target_tokens
from ddtree.types import TreeBatch
from tests.oracles.sampling_law import sequence_law

V, LENGTH, DRAWS = 6, 3, 100_000
DRAFTED = 40_000  # of the draws: with drafts they must give the tokens that they give without
PROMPT = (2, 5)
ALPHA = 0.001  # the seeds are fixed, so a pass is a pass for ever
CPU = torch.device("cpu")
SETTINGS = {
    "plain": SamplingSpec(temperature=1.0),
    "cuts": SamplingSpec(temperature=1.4, top_k=5, top_p=0.9, min_p=0.08),
    "penalties": SamplingSpec(
        temperature=0.6, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3,
        logit_bias=((4, 0.7),), top_p=0.95,
    ),
}  # fmt: skip
# Node tokens by rank of the draft, as (parent, rank): three levels, two or three children a node.
TREE = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0), (3, 1), (0, 2), (4, 0)]
SHAPES = {"tree": TREE, "chain": [(0, 0), (1, 0), (2, 0)], "off": []}


def prefixes() -> list[tuple[int, ...]]:
    return [tokens for length in range(LENGTH + 1) for tokens in product(range(V), repeat=length)]


@cache
def toy_logits() -> dict[tuple[int, ...], list[float]]:
    source = random.Random(11)
    return {prefix: [source.gauss(0.0, 1.3) for _ in range(V)] for prefix in prefixes()}


@cache
def draft_ranks() -> dict[tuple[int, ...], list[int]]:
    """The drafter's order of tokens after each prefix: the target's, with errors."""
    source = random.Random(12)
    logits = toy_logits()
    return {
        prefix: sorted(range(V), key=lambda token: -logits[prefix][token] + source.gauss(0, 1.0))
        for prefix in prefixes()
    }


@dataclass(frozen=True)
class Rounds:
    """For every prefix, the tree to verify after it and the target's logits at the nodes."""

    trees: TreeBatch  # [prefixes, N]
    logits: torch.Tensor  # [prefixes, N + 1, V]


@cache
def rounds_of(mode: str) -> Rounds:
    shape = SHAPES[mode]
    tokens = torch.zeros((len(prefixes()), len(shape)), dtype=torch.int32)
    logits = torch.zeros((len(prefixes()), len(shape) + 1, V))
    for row, prefix in enumerate(prefixes()):
        paths = [prefix]
        for parent, rank in shape:
            path = paths[parent]
            token = draft_ranks().get(path, range(V))[rank]
            paths.append((*path, token))
            tokens[row, len(paths) - 2] = token
        for node, path in enumerate(paths):
            logits[row, node] = torch.tensor(toy_logits().get(path, [0.0] * V))
    parents = torch.tensor([parent for parent, _ in shape], dtype=torch.int32).expand(len(prefixes()), -1)
    depths = [0]
    for parent, _ in shape:
        depths.append(depths[parent] + 1)
    depth = torch.tensor(depths[1:], dtype=torch.int32).expand(len(prefixes()), -1)
    counts = torch.full((len(prefixes()),), len(shape), dtype=torch.int32)
    return Rounds(TreeBatch(tokens, parents, depth, counts), logits)


@cache
def states_of(name: str) -> list[SamplerState]:
    """A state per draw; draws differ by their seeds."""
    spec = replace(SETTINGS[name], prompt_length=len(PROMPT))
    states = []
    for seed in range(DRAWS):
        each = copy.copy(spec)
        object.__setattr__(each, "seed", seed)  # `replace` takes seconds for so many
        states.append(SamplerState(each, vocab_size=V, device=CPU))
    return states


class Committed:
    """Brings states to where a prefix is committed; what is pushed is a function of the prefix alone."""

    def __init__(self, name: str) -> None:
        self._spec = states_of(name)[0].spec
        self._standing: dict[tuple[int, ...], SamplerState] = {}

    def at(self, state: SamplerState, committed: tuple[int, ...]) -> SamplerState:
        if committed not in self._standing:
            self._standing[committed] = SamplerState(self._spec, vocab_size=V, device=CPU)
            self._standing[committed].push(PROMPT)
            self._standing[committed].push(committed)
        pushed = self._standing[committed]
        state.length, state.output_counts, state.is_in_prompt = (
            pushed.length, pushed.output_counts, pushed.is_in_prompt,
        )  # fmt: skip
        return state


def decode(mode: str, name: str, draws: int) -> torch.Tensor:
    """Draw sequences round by round through the product's walk, `[draws, LENGTH]`."""
    rounds, states, committed = rounds_of(mode), states_of(name)[:draws], Committed(name)
    index_of = {prefix: row for row, prefix in enumerate(prefixes())}
    first = first_tokens(
        rounds.logits[0, 0].expand(draws, V), [committed.at(state, ()) for state in states]
    ).tokens[:, 0]
    outputs = [(token,) for token in first.tolist()]
    unfinished = list(range(draws))
    while unfinished:
        rows = torch.tensor([index_of[outputs[draw]] for draw in unfinished])
        every = rounds.trees
        trees = TreeBatch(every.tokens[rows], every.parents[rows], every.depths[rows], every.counts[rows])
        logits = rounds.logits[rows]
        starts = range(0, logits.shape[0] * logits.shape[1], logits.shape[1])
        standing = [committed.at(states[draw], outputs[draw][:-1]) for draw in unfinished]
        roots = [outputs[draw][-1] for draw in unfinished]
        target = target_tokens(logits.flatten(0, 1), starts, trees, roots, standing)
        accepted = walk(trees, target.tokens)
        paths = torch.cat((accepted.accepted_tokens, torch.zeros(len(rows), 1, dtype=torch.int64)), 1)
        paths.scatter_(1, accepted.accepted_counts[:, None], accepted.bonus_tokens[:, None])
        counts = accepted.accepted_counts.tolist()
        for draw, path, count in zip(unfinished, paths.tolist(), counts, strict=True):
            outputs[draw] = (*outputs[draw], *path[: count + 1])[:LENGTH]
        unfinished = [draw for draw in unfinished if len(outputs[draw]) < LENGTH]
    return torch.tensor(outputs)


def p_value(sequences: torch.Tensor, expected: dict[tuple[int, ...], float]) -> float:
    """Pearson's χ² test; cells with less than five expected draws share one."""
    codes = (sequences * torch.tensor([V**2, V, 1])).sum(dim=1)
    counts = torch.bincount(codes, minlength=V**LENGTH).double()
    shares = torch.tensor([expected[tokens] for tokens in product(range(V), repeat=LENGTH)]).double()
    if bool((counts[shares == 0] > 0).any()):
        return 0.0  # something impossible was emitted
    mean = shares * counts.sum()
    common = mean >= 5
    observed = torch.cat((counts[common], counts[~common].sum()[None]))
    mean = torch.cat((mean[common], mean[~common].sum()[None]))
    observed, mean = observed[mean > 0], mean[mean > 0]
    statistic = ((observed - mean) ** 2 / mean).sum()
    return float(torch.special.gammaincc(torch.tensor((len(mean) - 1) / 2.0).double(), statistic / 2))


@cache
def expected_law(name: str) -> dict[tuple[int, ...], float]:
    return sequence_law(lambda output: toy_logits()[output], PROMPT, SETTINGS[name], V, LENGTH)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_law_is_the_targets_in_every_draft_mode(name: str) -> None:
    plain = decode("off", name, DRAWS)
    assert p_value(plain, expected_law(name)) > ALPHA
    for mode in ("tree", "chain"):
        # Stronger than equal laws: the same seed gives the same tokens.
        assert torch.equal(decode(mode, name, DRAFTED), plain[:DRAFTED]), mode


def naive_sampler(spec: SamplingSpec) -> torch.Tensor:
    """Accept the draft's children one after the other with min(1, p/q), else draw anew: biased."""
    generator = torch.Generator().manual_seed(5)
    rows = {prefix: row for row, prefix in enumerate(prefixes())}
    target = torch.tensor([toy_logits()[prefix] for prefix in prefixes()]).div(spec.temperature).softmax(-1)
    ranks = torch.tensor([draft_ranks()[prefix] for prefix in prefixes()])
    draft = torch.zeros_like(target).scatter_(
        1, ranks, torch.linspace(1.5, -1.5, V).softmax(0).expand_as(target)
    )
    outputs: list[tuple[int, ...]] = [()] * DRAWS
    for _ in range(LENGTH):
        at = torch.tensor([rows[output] for output in outputs])
        token = torch.multinomial(target[at], 1, generator=generator)[:, 0]
        is_open = torch.ones(DRAWS, dtype=torch.bool)
        for rank in range(2):
            child = ranks[at, rank]
            ratio = target[at].gather(1, child[:, None]) / draft[at].gather(1, child[:, None])
            taken = is_open & (torch.rand(DRAWS, generator=generator) < ratio[:, 0])
            token = torch.where(taken, child, token)
            is_open &= ~taken
        outputs = [(*output, each) for output, each in zip(outputs, token.tolist(), strict=True)]
    return torch.tensor(outputs)


def test_a_sampler_that_accepts_by_the_ratio_fails_the_same_test() -> None:
    assert p_value(naive_sampler(SETTINGS["plain"]), expected_law("plain")) < 1e-12
