"""The tree form of Gated DeltaNet against the recurrence run token by token along every path."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from ddtree.recurrent.gated_delta import Rows, Stop, commit_path, read_chain, stage_tree, unit
from tests.fakes.random_trees import path_to, random_parents, sees_of
from tests.oracles.gated_delta_steps import Token, walk_path

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 6
EXACT = 1e-5


def random_rows(generator: torch.Generator, sequences: int, count: int, *, fading: float = 0.3) -> Rows:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return Rows(
        queries=unit(normal(sequences, KEY_HEADS, count, KEY_DIM)) * KEY_DIM**-0.5,
        keys=unit(normal(sequences, KEY_HEADS, count, KEY_DIM)),
        values=normal(sequences, VALUE_HEADS, count, VALUE_DIM),
        log_decays=-fading * torch.rand((sequences, VALUE_HEADS, count), generator=generator),
        betas=torch.rand((sequences, VALUE_HEADS, count), generator=generator),
    )


def random_states(generator: torch.Generator, sequences: int) -> torch.Tensor:
    return torch.randn((sequences, VALUE_HEADS, KEY_DIM, VALUE_DIM), generator=generator)


def tokens_of(rows: Rows, sequence: int, nodes: Sequence[int]) -> list[Token]:
    return [
        Token(*(field[sequence, :, node] for field in (rows.queries, rows.keys, rows.values,
                                                       rows.log_decays, rows.betas)))
        for node in nodes
    ]  # fmt: skip


def padded(rows: Rows, counts: Sequence[int]) -> Rows:
    """Zeros after each sequence's own rows."""
    count = rows.keys.shape[2]
    is_row = torch.arange(count) < torch.tensor(counts)[:, None]
    wide = is_row[:, None, :, None]
    return Rows(rows.queries * wide, rows.keys * wide, rows.values * wide,
                rows.log_decays * is_row[:, None], rows.betas * is_row[:, None])  # fmt: skip


def padded_sees(trees: Sequence[list[int]]) -> torch.Tensor:
    count = max(map(len, trees)) + 1
    sees = torch.eye(count, dtype=torch.bool).repeat(len(trees), 1, 1)
    for index, parents in enumerate(trees):
        sees[index, : len(parents) + 1, : len(parents) + 1] = sees_of(parents)
    return sees


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(
        (found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1)
    )


@pytest.mark.parametrize(("nodes", "reach"), [(0, None), (1, None), (20, None), (20, 2), (64, 5), (256, 6)])
def test_every_node_is_its_path_run_alone(nodes: int, reach: int | None) -> None:
    generator, source = torch.Generator().manual_seed(nodes), random.Random(nodes)
    parents = random_parents(source, nodes, reach=reach)
    rows, states = random_rows(generator, 1, nodes + 1), random_states(generator, 1)
    before = states.clone()
    staged = stage_tree(rows, states, sees_of(parents)[None])
    assert torch.equal(states, before), "staging must not touch the state"
    checked = range(nodes + 1) if nodes <= 64 else source.sample(range(nodes + 1), 24)
    for node in checked:
        path = path_to(parents, node)
        expected = walk_path(states[0], tokens_of(rows, 0, path))
        assert far(staged.outputs[0, :, node], expected.output) <= EXACT
        lengths = torch.tensor([len(path)])
        after = commit_path(
            states, rows.keys[:, :, path], staged.updates[:, :, path], staged.decays[:, :, path], lengths
        )
        assert far(after[0], expected.state) <= EXACT


def test_sequences_with_other_trees_and_padding_change_nothing() -> None:
    """A wide tree, a chain, a root alone and a prompt's chunk, in one call and each alone."""
    generator, source = torch.Generator().manual_seed(3), random.Random(3)
    trees = [random_parents(source, 30), list(range(9)), [], list(range(17))]
    counts = [len(parents) + 1 for parents in trees]
    rows = padded(random_rows(generator, 4, max(counts)), counts)
    states = random_states(generator, 4)
    together = stage_tree(rows, states, padded_sees(trees))
    for index, (parents, count) in enumerate(zip(trees, counts, strict=True)):
        part = rows.part(0, count)
        one = Rows(*(getattr(part, name)[index : index + 1] for name in vars(part)))
        alone = stage_tree(one, states[index : index + 1], sees_of(parents)[None])
        assert far(together.outputs[index, :, :count], alone.outputs[0]) <= EXACT
        assert far(together.updates[index, :, :count], alone.updates[0]) <= EXACT
        assert not together.updates[index, :, count:].any(), "padding must not write"
        assert not together.outputs[index, :, count:].any()


def test_siblings_of_a_star_are_independent_and_may_stand_in_any_order() -> None:
    generator = torch.Generator().manual_seed(4)
    nodes = 12
    rows, states = random_rows(generator, 1, nodes + 1), random_states(generator, 1)
    star = sees_of([0] * nodes)[None]
    staged = stage_tree(rows, states, star)
    order = [0, *(node + 1 for node in torch.randperm(nodes, generator=generator).tolist())]
    moved = Rows(*(getattr(rows, name)[:, :, order] for name in vars(rows)))
    assert far(stage_tree(moved, states, star).outputs, staged.outputs[:, :, order]) <= EXACT
    changed = Rows(*(getattr(rows, name).clone() for name in vars(rows)))
    changed.keys[:, :, 5], changed.values[:, :, 5] = changed.keys[:, :, 6], 100.0
    again = stage_tree(changed, states, star).outputs
    others = [node for node in range(nodes + 1) if node != 5]
    assert torch.equal(again[:, :, others], staged.outputs[:, :, others])
    assert not torch.allclose(again[:, :, 5], staged.outputs[:, :, 5])


@pytest.mark.parametrize("block", [1, 7, 64])
def test_a_chain_is_the_same_as_a_tree_and_as_a_prompt(block: int) -> None:
    """A path-shaped tree, committed whole, leaves the state of a chain that is read in blocks."""
    generator = torch.Generator().manual_seed(5)
    counts = [40, 13]
    rows = padded(random_rows(generator, 2, 40), counts)
    states = random_states(generator, 2)
    stops = [Stop(1, 1), Stop(0, 7), Stop(0, 40), Stop(1, 12)]
    read = read_chain(rows, states, block, stops)
    staged = stage_tree(rows, states, padded_sees([list(range(39)), list(range(12))]))
    committed = commit_path(states, rows.keys, staged.updates, staged.decays, torch.tensor(counts))
    assert far(read.outputs, staged.outputs) <= EXACT
    assert far(read.states, committed) <= EXACT
    for index, count in enumerate(counts):
        expected = walk_path(states[index], tokens_of(rows, index, range(count)))
        assert far(read.states[index], expected.state) <= EXACT
    for stop, state in zip(stops, read.stopped, strict=True):
        expected = walk_path(states[stop.sequence], tokens_of(rows, stop.sequence, range(stop.rows)))
        assert far(state, expected.state) <= EXACT


def test_branches_that_fade_differently_do_not_overflow() -> None:
    """One branch forgets by e^-200 a token; its difference to the other is masked before it is raised."""
    generator = torch.Generator().manual_seed(6)
    parents = [0, 1, 2, 0, 4, 5]
    rows, states = random_rows(generator, 1, 7), random_states(generator, 1)
    rows.log_decays[:, :, 1:4] = -200.0
    staged = stage_tree(rows, states, sees_of(parents)[None])
    for node in range(7):
        expected = walk_path(states[0], tokens_of(rows, 0, path_to(parents, node)))
        assert far(staged.outputs[0, :, node], expected.output) <= EXACT


def test_repeated_tokens_that_never_fade_stay_exact() -> None:
    """Equal keys, full writes, no decay: the system's powers would explode where its solution does not."""
    generator = torch.Generator().manual_seed(7)
    count = 200
    rows, states = random_rows(generator, 1, count, fading=0.0), random_states(generator, 1)
    rows.keys[:] = rows.keys[:, :, :1]
    rows.betas.fill_(0.999)
    staged = stage_tree(rows, states, torch.ones(1, count, count, dtype=torch.bool).tril())
    expected = walk_path(states[0], tokens_of(rows, 0, range(count)))
    assert far(staged.outputs[0, :, -1], expected.output) <= EXACT


def test_what_lies_beyond_a_path_is_never_looked_at() -> None:
    generator = torch.Generator().manual_seed(8)
    rows, states = random_rows(generator, 3, 5), random_states(generator, 3)
    staged = stage_tree(rows, states, padded_sees([[0, 1, 2, 3]] * 3))
    lengths = torch.tensor([0, 2, 5])
    clean = commit_path(states, rows.keys, staged.updates, staged.decays, lengths)
    for tensor in (rows.keys, staged.updates, staged.decays.unsqueeze(-1)):
        tensor[0], tensor[1, :, 2:] = float("nan"), float("nan")
    assert torch.equal(commit_path(states, rows.keys, staged.updates, staged.decays, lengths), clean)
    assert torch.equal(clean[0], states[0]), "an empty path must leave the state as it is"
