"""Holds captured steps and rounds of loaded stages to the general way, and to reading everything at once.

Sessions are opened in the stages directly, beside an engine that has none. This module knows stages and their
caches; neither prompts nor how stages are loaded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.opened import ints
from benchmarks.gpu.setting import Facts
from ddtree.device.messages import RoundRequest
from ddtree.draft import Drafter
from ddtree.sessions import Session
from ddtree.stages.in_process import RoundStage
from ddtree.staging import Steps, stage
from ddtree.types import DraftRequest, PrefillRequest, SessionBatch, TreeBatch
from ddtree.verify import TargetVerifier

_REACH = 4  # nodes of a random tree hang from one of the last so many, so that it grows deep
_OTHER_ROOT = 1 / 12  # of a round's sequences: text that repeats itself would be accepted for ever
_CHAIN = 1 / 4  # of a round's sequences


@dataclass(frozen=True)
class Loaded:
    """Stages of one process; steps and rounds where they were captured."""

    verifier: TargetVerifier
    drafter: Drafter
    steps: Steps | None
    rounds: RoundStage | None

    def open(self, session_id: int, ids: Sequence[int], slots: int) -> None:
        """Let both stages read all ids but the last, which is the root."""
        batch = SessionBatch(torch.tensor([session_id]), ints(1, 0), ints(1, 0))
        tokens = torch.tensor(ids[:-1], dtype=torch.int32)
        count, reserve = ints(1, len(tokens)), ints(1, slots)
        read = self.verifier.prefill(PrefillRequest(batch, tokens, count, reserve))
        assert not read.status.any(), "the pool has room"
        drafted = self.drafter.draft(
            DraftRequest(batch, tokens, read.features, count, tokens[:1], reserve, depth=0, width=0)
        )
        assert not drafted.status.any(), "the pool has room"

    def session(self, session_id: int) -> Session:
        """The verifier's session."""
        return next(each for each in self.verifier.sessions if each.session_id == session_id)

    def close(self, session_ids: Sequence[int]) -> None:
        """Drop sessions of both stages."""
        self.verifier.release(session_ids)
        self.drafter.release(session_ids)

    def cached(self, session_id: int, count: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Keys, values and features of the first tokens in both caches, by name."""
        for name, stage_ in (("target", self.verifier), ("draft", self.drafter)):
            table, pool = stage_.sessions, stage_.pool
            slots = next(each for each in table if each.session_id == session_id).pages.slots[:count]
            parts = {
                "keys": pool.keys_values[:, 0, slots],
                "values": pool.keys_values[:, 1, slots],
                "features": pool.features[slots],
            }
            yield from ((f"{name}_{part}", tensor) for part, tensor in parts.items() if tensor.numel())


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, in millionths of the largest value."""
    return 1e6 * float((found - expected).abs().max() / expected.abs().max())


def compare_steps(
    loaded: Loaded,
    texts: Sequence[Sequence[int]],
    sizes: Sequence[Sequence[int]],
    read_logits: Callable[[Sequence[int]], torch.Tensor],
    nodes: int,
) -> Facts:
    """Logits of trees: of the captured step, of the general one, and of a node's path read as a prompt.

    Args:
        loaded: the stages.
        texts: committed ids of each session and its root.
        sizes: batches of trees, by nodes.
        read_logits: gives the logits `[V]` after ids, by other means.
        nodes: how many nodes are read as prompts.
    """
    source, captured, over_general, over_prompt = random.Random(0), 0, [], []
    ids = {session_id: list(text) for session_id, text in enumerate(texts)}
    for session_id, text in ids.items():
        loaded.open(session_id, text, len(text) + max(map(max, sizes)))
    try:
        for batch in sizes:
            trees = _random_trees(source, batch, loaded.verifier.target.vocab_size)
            order = source.sample([*ids], len(batch))  # sequences stand in other places each time
            general, step = _stage_both(loaded, order, trees, [ids[one][-1] for one in order])
            if step is not None:
                captured += 1
                over_general += [far(*rows) for rows in zip(step, general, strict=True)]
            found = step or general
            for _ in range(-(-nodes // len(sizes))):
                place = source.randrange(len(batch))
                node = source.randrange(batch[place] + 1)
                path = [*ids[order[place]], *_path(trees, place, node)]
                over_prompt.append(far(found[place][node], read_logits(path)))
    finally:
        loaded.close([*ids])
    facts: Facts = {
        "steps_captured": captured,
        "nodes_read": len(over_prompt),
        "nodes_off_ppm": max(over_prompt),
    }
    if captured:
        facts["steps_off_ppm"] = max(over_general)
    else:
        facts["steps_skipped"] = "no steps were captured: a CPU, or see warnings"
    return facts


@torch.inference_mode()
def _stage_both(
    loaded: Loaded, order: Sequence[int], trees: TreeBatch, roots: Sequence[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """Logits `[nodes + 1, V]` of each sequence: of the general step, and of the captured one."""
    verifier, sessions = loaded.verifier, [loaded.session(one) for one in order]
    rows = [count + 1 for count in trees.counts.tolist()]

    def cut(logits: torch.Tensor, starts: Sequence[int]) -> list[torch.Tensor]:
        return [logits[start : start + count].clone() for start, count in zip(starts, rows, strict=True)]

    general = stage(verifier.target, verifier.pool, sessions, trees, roots)
    expected = cut(general.step.logits, general.starts)
    captured = None if loaded.steps is None else loaded.steps.stage(sessions, trees, roots)
    return expected, None if captured is None else cut(captured.step.logits, captured.starts)


def _random_trees(source: random.Random, sizes: Sequence[int], vocabulary: int) -> TreeBatch:
    """Trees of so many nodes each, of any tokens; on the CPU."""
    tokens, parents, depths = (torch.zeros((len(sizes), max(sizes)), dtype=torch.int32) for _ in range(3))
    for place, size in enumerate(sizes):
        depth_of = [0]
        for node in range(size):
            parent = source.randrange(max(0, node - _REACH), node + 1)
            depth_of.append(depth_of[parent] + 1)
            tokens[place, node] = source.randrange(vocabulary)
            parents[place, node], depths[place, node] = parent, depth_of[-1]
    return TreeBatch(tokens, parents, depths, torch.tensor(sizes, dtype=torch.int32))


def _path(trees: TreeBatch, place: int, node: int) -> list[int]:
    """Tokens from below the root down to a node."""
    tokens: list[int] = []
    while node:
        tokens.append(int(trees.tokens[place, node - 1]))
        node = int(trees.parents[place, node - 1])
    return tokens[::-1]


def compare_rounds(loaded: Loaded, texts: Sequence[Sequence[int]], rounds: int, most_nodes: int) -> Facts:
    """Rounds of trees and chains of any size; then both caches, and those of sessions that read all at once.

    Args:
        loaded: the stages.
        texts: ids to begin with, the last of each being its first root.
        rounds: how many.
        most_nodes: budgets are drawn up to here.
    """
    if loaded.rounds is None:
        return {"rounds_skipped": "no rounds were captured: a CPU, or see warnings"}
    first, count = len(texts), 2 * len(texts)
    beyond = most_nodes + loaded.drafter.block_size + 1
    most = min(
        pool.num_pages // count * pool.page_size for pool in (loaded.verifier.pool, loaded.drafter.pool)
    )
    slots = min(most, loaded.verifier.target.context_length)
    slots = min(slots, max(map(len, texts)) + rounds * loaded.drafter.block_size + beyond)
    source, accepted, done = random.Random(1), list[int](), 0
    ids = {session_id: list(text) for session_id, text in enumerate(texts)}
    for session_id, text in ids.items():
        loaded.open(session_id, text, slots)
    try:
        while done < rounds and (live := [one for one in ids if len(ids[one]) + beyond <= slots]):
            live = source.sample(live, source.randint(1, len(live)))
            accepted += _round(loaded.rounds, source, ids, live, most_nodes, loaded)
            done += 1
        off: dict[str, float] = {}
        for session_id, text in ids.items():
            loaded.open(first + session_id, text, len(text))
            for name, value in _caches_off(loaded, (session_id, first + session_id), len(text) - 1).items():
                off[name] = max(value, off.get(name, 0.0))
    finally:
        loaded.close(range(count))
    return {
        "rounds": done,
        "rounds_tokens": sum(accepted) + len(accepted),
        "rounds_acceptances": sorted(set(accepted)),
        "rounds_accepted_mean": sum(accepted) / len(accepted),
        "caches_off_ppm": max(off.values()),
        **{f"{name}_off_ppm": value for name, value in off.items()},
    }


def _round(
    rounds: RoundStage,
    source: random.Random,
    ids: Mapping[int, list[int]],
    live: Sequence[int],
    most_nodes: int,
    loaded: Loaded,
) -> list[int]:
    """One round; `ids` grow by what came, and how many draft tokens each sequence took is given back."""
    count, depth = len(live), loaded.drafter.block_size - 1
    for one in live:
        if source.random() < _OTHER_ROOT:
            ids[one][-1] = source.randrange(loaded.verifier.target.vocab_size)
    is_chain = [source.random() < _CHAIN for _ in live]
    budgets = [source.randint(0, min(most_nodes, depth) if chain else most_nodes) for chain in is_chain]
    nodes = rounds.sizes.nodes_for(count, max(budgets))
    assert nodes is not None, "serving prepares such sizes"
    result = rounds.run(
        RoundRequest(
            sessions=SessionBatch(
                torch.tensor(live),
                ints(count, 0),
                torch.tensor([len(ids[one]) - 1 for one in live], dtype=torch.int32),
            ),
            draft_epochs=ints(count, 0),
            root_tokens=torch.tensor([ids[one][-1] for one in live], dtype=torch.int32),
            budgets=torch.tensor(budgets, dtype=torch.int32),
            depths=ints(count, depth),
            is_chain=torch.tensor(is_chain),
            nodes=nodes,
        )
    )
    assert not result.status.any(), "the sessions are there"
    assert not result.draft_status.any(), "the sessions are there"
    taken: list[int] = result.accepted_counts.tolist()
    for place, (one, took) in enumerate(zip(live, taken, strict=True)):
        ids[one] += [*result.accepted_tokens[place, :took].tolist(), int(result.bonus_tokens[place])]
    return taken


@torch.inference_mode()
def _caches_off(loaded: Loaded, pair: tuple[int, int], count: int) -> dict[str, float]:
    """How far the first session's caches are from the second's."""
    found, expected = (dict(loaded.cached(one, count)) for one in pair)
    return {name: far(found[name], expected[name]) for name in found}
