"""The target's token at the nodes of draft trees: at all of them greedily, else along the path that is taken.

A sampled sequence is drawn for node by node: the root's token first, and the next one only where a child
holds it, because only those draws can matter. Sequences walk in step, so that a batch costs as many rounds
of work as its longest path, not as all paths together. The result feeds `accept.walk`; nodes that no path
came to hold `NOT_DRAWN`, which no draft token equals.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from ddtree import log_probs
from ddtree.sampling import Draws, PathSampler, SamplerState, choose
from ddtree.types import Status, TreeBatch

_LOG = logging.getLogger(__name__)
NOT_DRAWN: Final = -1


@dataclass(frozen=True)
class TargetTokens:
    """What the target says at the nodes, and how probable it found what is emitted."""

    tokens: torch.Tensor  # [S, N + 1] int64, root first
    log_probs: torch.Tensor  # [S, E, width] of the tokens along the path, see `log_probs`
    failed: Mapping[int, Status] = field(default_factory=dict)  # sequences that cannot go on

    def after(self, commits: Sequence[Status]) -> TargetTokens:
        """The same when the ids before these tokens were committed, or not, with this outcome."""
        failed = {index: status for index, status in enumerate(commits) if status != Status.OK}
        return replace(self, failed={**self.failed, **failed})


def target_tokens(
    logits: torch.Tensor,  # [rows, V], packed by segment
    starts: Sequence[int],  # first row of each sequence; it has as many as its tree has nodes, and the root
    trees: TreeBatch,
    roots: Sequence[int],  # root tokens, not yet pushed to the states
    states: Sequence[SamplerState | None],  # None: the largest logit is the token
    counts: Sequence[int] | None = None,  # nodes of each tree; None: the device is asked, and waited for
) -> TargetTokens:
    """Choose the target's token wherever the acceptance walk may ask for it."""
    counts = trees.counts.tolist() if counts is None else counts
    width = trees.tokens.shape[1] + 1
    if all(state is None for state in states):
        return TargetTokens(_largest(logits, starts, counts, width), no_log_probs(len(states)))
    tokens = torch.full((len(states), width), NOT_DRAWN, dtype=torch.int64, device=logits.device)
    for index, state in enumerate(states):
        if state is None:
            rows = counts[index] + 1
            tokens[index, :rows] = choose(logits[starts[index] : starts[index] + rows])
    drawn = {index: state for index, state in enumerate(states) if state is not None}

    def run(some: Mapping[int, SamplerState]) -> TargetTokens:
        sampler = PathSampler(list(some.values()), logits.device)
        sampler.advance(range(len(some)), [roots[index] for index in some])
        return _Walk(sampler, logits, starts, trees, some).run(tokens.clone())

    return _isolated(drawn, run, TargetTokens(tokens, no_log_probs(len(states))))


def _largest(
    logits: torch.Tensor,  # [rows, V]
    starts: Sequence[int],
    counts: Sequence[int],
    width: int,
) -> torch.Tensor:
    """The token of the largest logit at every node, `[S, width]`; 32 trees take no more launches than one."""
    columns = torch.arange(width)
    rows = torch.tensor(starts)[:, None] + columns
    rows[columns > torch.tensor(counts)[:, None]] = -1
    rows = rows.to(logits.device, non_blocking=True)  # the device may still be at the step: not waited for
    return torch.where(rows >= 0, choose(logits)[rows.clamp(min=0)], NOT_DRAWN)


def first_tokens(
    logits: torch.Tensor,  # [S, V] after the last committed token of each sequence
    states: Sequence[SamplerState | None],
) -> TargetTokens:
    """Choose each sequence's first output token; where the prompt does not end here, whatever is cheapest."""
    tokens = choose(logits)[:, None]
    drawn = {
        index: state
        for index, state in enumerate(states)
        if state is not None and state.length == state.spec.prompt_length
    }
    if not drawn:
        return TargetTokens(tokens, no_log_probs(len(states)))
    trees = TreeBatch.empty(len(states), logits.device)

    def run(some: Mapping[int, SamplerState]) -> TargetTokens:
        sampler = PathSampler(list(some.values()), logits.device)
        return _Walk(sampler, logits, range(len(states)), trees, some).run(tokens.clone())

    return _isolated(drawn, run, TargetTokens(tokens, no_log_probs(len(states))))


def _isolated(
    states: Mapping[int, SamplerState],
    run: Callable[[Mapping[int, SamplerState]], TargetTokens],
    undrawn: TargetTokens,  # what there is without any of them
) -> TargetTokens:
    """Draw for all; where that raises, for those that can be drawn for alone. Drawing changes no state."""
    try:
        return run(states)
    except Exception:  # noqa: BLE001 - the one at fault is looked for
        _LOG.exception("choosing tokens failed, now for each sequence alone")
    failed = {}
    for index, state in states.items():
        try:
            run({index: state})
        except Exception:  # noqa: BLE001 - whatever broke, it is this sequence's own
            _LOG.exception("the tokens of one sequence cannot be chosen")
            failed[index] = Status.SAMPLER_FAILED
    others = {index: state for index, state in states.items() if index not in failed}
    result = run(others) if others else undrawn
    return replace(result, failed={**result.failed, **failed})


def no_log_probs(sequences: int) -> torch.Tensor:
    """The log-probs of sequences that asked for none."""
    return torch.zeros((sequences, 0, 0))


class _Walk:
    """Draws for some sequences of a batch, level by level."""

    def __init__(
        self,
        sampler: PathSampler,
        logits: torch.Tensor,
        starts: Sequence[int],
        trees: TreeBatch,
        states: Mapping[int, SamplerState],  # by place in the batch, in the sampler's order
    ) -> None:
        self._sampler = sampler
        self._logits = logits
        self._trees = trees
        self._members = list(states)  # place in the batch of each walker
        self._specs = [state.spec for state in states.values()]
        self._starts = torch.tensor([starts[index] for index in states], device=logits.device)

    def run(self, tokens: torch.Tensor) -> TargetTokens:
        """Fill in the nodes that are come to, `[S, N + 1]`."""
        width = log_probs.width_for(self._specs)
        wanting = {row for row, spec in enumerate(self._specs) if spec.top_log_probs >= 0}
        levels = []
        rows = list(range(len(self._members)))
        nodes = torch.zeros(len(rows), dtype=torch.int64, device=tokens.device)
        while rows:
            index = torch.tensor(rows, device=tokens.device)
            members = torch.tensor([self._members[row] for row in rows], device=tokens.device)
            draws = self._sampler.draw(rows, self._logits[self._starts[index] + nodes])
            tokens[members, nodes] = draws.tokens
            if wanting:
                levels.append(self._measure(rows, wanting, draws, len(tokens), width))
            children = self._children(members, nodes, draws.tokens)
            chosen, found = draws.tokens.tolist(), children.tolist()
            places = [place for place, child in enumerate(found) if child]
            rows = [rows[place] for place in places]
            nodes = children[children > 0]
            self._sampler.advance(rows, [chosen[place] for place in places])
        entries = torch.stack(levels, dim=1) if levels else no_log_probs(len(tokens))
        failed = {self._members[row]: Status.GRAMMAR_FAILED for row in self._sampler.failures()}
        return TargetTokens(tokens, entries, failed)

    def _measure(
        self, rows: Sequence[int], wanting: set[int], draws: Draws, sequences: int, width: int
    ) -> torch.Tensor:
        level = torch.zeros((sequences, width), device=draws.tokens.device)
        places = [place for place, row in enumerate(rows) if row in wanting]
        if places:
            specs = [self._specs[rows[place]] for place in places]
            at = torch.tensor([self._members[rows[place]] for place in places], device=level.device)
            level[at] = log_probs.measure(draws, places, specs, width)
        return level

    def _children(self, members: torch.Tensor, nodes: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The child of each node that holds the chosen token, or 0 where there is none."""
        trees = self._trees
        columns = torch.arange(trees.tokens.shape[1], device=nodes.device)
        is_it = (trees.parents[members] == nodes[:, None]) & (trees.tokens[members] == chosen[:, None])
        is_it &= columns < trees.counts[members, None]
        return (is_it * (columns + 1)).sum(dim=1)
