"""Steps from rows on the device: what a packed step gives, whatever stands in padding and empty places."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from ddtree.device.rows import DeviceRows
from ddtree.recurrent.kernels import TreeKernels
from ddtree.recurrent.layer import LayerInputs, LayerWeights, rows_of, run_plainly
from ddtree.recurrent.state_pool import PoolSize, StatePool, StateShape
from ddtree.recurrent.step import RecurrentStep, Span
from ddtree.recurrent.windows import next_tails, windows_of
from ddtree.tree_mask import ancestor_bits, expand
from tests.fakes.device import DEVICE
from tests.fakes.random_trees import depths_of, path_to, random_parents, sees_of

SHAPE = StateShape(
    (0, 3), key_heads=1, value_heads=2, key_dim=8, value_dim=12, kernel=4, dtype=torch.float32
)  # fmt: skip
KERNELS = TreeKernels(value_slice=16, channel_slice=32)
Trees = Sequence[list[int] | None]  # parents; None: the place is empty


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """What is allocated and not written holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def normal(generator: torch.Generator, *sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(sizes, generator=generator).to(dtype).to(DEVICE)


def make_pool(shape: StateShape, kernels: TreeKernels | None, states: int, rows: int) -> StatePool:
    """States of anything; the stash is poisoned: nothing may be read that was not written."""
    pool = StatePool(shape, PoolSize(states, rows), DEVICE, kernels)
    generator = torch.Generator().manual_seed(0)
    pool.matrices.copy_(normal(generator, *pool.matrices.shape))
    pool.tails.copy_(normal(generator, *pool.tails.shape))
    for tensor in (pool.stash.keys, pool.stash.updates, pool.stash.decays, pool.stash.inputs):
        tensor.fill_(float("nan"))
    return pool


def device_rows(trees: Trees, rows: int) -> DeviceRows:
    """As the layout kernel leaves them; parents of padding are rubbish."""
    made = DeviceRows.empty(len(trees), rows, 1, 16, DEVICE)
    parents = torch.full((len(trees), rows - 1), 3, dtype=torch.int32)
    counts = torch.tensor([0 if tree is None else len(tree) + 1 for tree in trees], dtype=torch.int32)
    for place, tree in enumerate(trees):
        if tree is not None:
            parents[place, : len(tree)] = torch.tensor(tree, dtype=torch.int32)
            made.depths[place, : len(tree) + 1] = torch.tensor(depths_of(tree), dtype=torch.int32)
    made.bits.copy_(ancestor_bits(parents, (counts - 1).clamp(min=0)))
    made.counts.copy_(counts)
    return made


def packed_step(pool: StatePool, trees: Trees, states: Sequence[int]) -> RecurrentStep:
    spans, start = [], 0
    for tree, state in zip(trees, states, strict=True):
        if tree is not None:
            depths, sees = torch.tensor(depths_of(tree)).to(DEVICE), sees_of(tree).to(DEVICE)
            spans.append(Span(start, len(tree) + 1, state, depths, sees))
            start += len(tree) + 1
    return RecurrentStep.build(pool, spans, keeps=False)


def layer_of(shape: StateShape, layer: int, count: int) -> tuple[LayerInputs, LayerWeights]:
    """A layer's numbers, and what its projections give for so many rows."""
    generator, dtype, heads = torch.Generator().manual_seed(layer), shape.dtype, shape.value_heads
    weights = LayerWeights(
        normal(generator, shape.channels, shape.kernel, dtype=dtype),
        normal(generator, heads, dtype=dtype), normal(generator, heads, dtype=dtype),
        1 + 0.1 * normal(generator, shape.value_dim, dtype=dtype), 1e-6,
    )  # fmt: skip
    inputs = LayerInputs(
        normal(generator, count, shape.channels, dtype=dtype),
        normal(generator, count, heads, shape.value_dim, dtype=dtype),
        normal(generator, count, heads, dtype=dtype), 6 * normal(generator, count, heads, dtype=dtype),
    )  # fmt: skip
    return inputs, weights


def taken(inputs: LayerInputs, rows: torch.Tensor) -> LayerInputs:
    return LayerInputs(inputs.mixed[rows], inputs.gates[rows], inputs.betas[rows], inputs.steps[rows])


def run(step: RecurrentStep, layer: int, inputs: LayerInputs, weights: LayerWeights) -> torch.Tensor:
    fused = step.pool.kernels is not None
    return step.run_fused(layer, inputs, weights) if fused else run_plainly(step, layer, inputs, weights)


def paths_of(trees: Trees, source: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """A path in every tree, as wide as the longest; behind its end, and in empty places, rubbish."""
    paths = [[] if tree is None else path_to(tree, source.randrange(len(tree) + 1)) for tree in trees]
    lengths = torch.tensor([len(path) for path in paths])
    padded = torch.full((len(trees), int(lengths.max())), 10**6)
    for place, path in enumerate(paths):
        padded[place, : len(path)] = torch.tensor(path, dtype=torch.int64)
    return padded.to(DEVICE), lengths.to(DEVICE)


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Off by how much of the largest value."""
    found, expected = found.float(), expected.float()
    assert torch.isfinite(expected).all()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1))


CASES: list[tuple[Trees, list[int]]] = [
    ([[0, 0, 1, 2], None, [], [0, 1, 2, 3, 4]], [4, 1, 0, 1]),  # the empty place has a live one's state
    ([random_parents(random.Random(1), 16, reach=4), None], [2, 2]),
    ([[]], [3]),
    ([None, [], []], [1, 1, 4]),  # single rows have a kernel of their own
]


@pytest.mark.parametrize("kernels", [None, KERNELS], ids=["pytorch", "kernels"])
@pytest.mark.parametrize(("trees", "states"), CASES)
def test_device_rows_give_what_packed_rows_give(
    trees: Trees, states: list[int], kernels: TreeKernels | None
) -> None:
    """All rows of every layer, then the states behind a path of each; no other state moves."""
    widest = max(len(tree or []) for tree in trees) + 1
    rows = widest + 2 if widest > 1 else 1
    ours, theirs = (make_pool(SHAPE, chosen, 5, len(trees) * rows) for chosen in (kernels, None))
    device = RecurrentStep.of_rows(ours, device_rows(trees, rows), torch.tensor(states, device=DEVICE))
    packed = packed_step(theirs, trees, states)
    counts = [0 if tree is None else len(tree) + 1 for tree in trees]
    own = torch.cat([place * rows + torch.arange(count) for place, count in enumerate(counts)]).to(DEVICE)
    for layer in SHAPE.layers:
        inputs, weights = layer_of(SHAPE, layer, len(trees) * rows)
        found = run(device, layer, inputs, weights)
        assert torch.isfinite(found).all(), "padding stays finite"
        assert far(found[own], run_plainly(packed, layer, taken(inputs, own), weights)) <= 1e-5
    paths, lengths = paths_of(trees, random.Random(2))
    device.commit(paths.int(), lengths.int())
    live = [place for place, tree in enumerate(trees) if tree is not None]
    packed.commit(paths[live], lengths[live])
    assert far(ours.matrices, theirs.matrices) <= 1e-5
    assert torch.equal(ours.tails, theirs.tails)


@pytest.mark.parametrize("kernels", [None, KERNELS], ids=["pytorch", "kernels"])
def test_the_first_places_commit_alone(kernels: TreeKernels | None) -> None:
    trees: Trees = [[0, 1], [0, 0], None]
    pool = make_pool(SHAPE, kernels, 3, 9)
    step = RecurrentStep.of_rows(pool, device_rows(trees, 3), torch.tensor([2, 0, 2], device=DEVICE))
    for layer in SHAPE.layers:
        run(step, layer, *layer_of(SHAPE, layer, 9))
    before = pool.matrices.clone()
    step.first(1).commit(torch.tensor([[0, 1, 2]], device=DEVICE), torch.tensor([3], device=DEVICE))
    assert torch.equal(pool.matrices[:, :2], before[:, :2])
    assert not torch.isclose(pool.matrices[:, 2], before[:, 2]).all(dim=-1).any()


def test_rows_that_the_stash_cannot_hold_are_refused() -> None:
    pool = make_pool(SHAPE, None, 1, 7)
    with pytest.raises(AssertionError, match="8 rows are staged, the stash holds 7"):
        RecurrentStep.of_rows(pool, device_rows([[0], [0]], 4), torch.tensor([0, 0], device=DEVICE))


def test_half_precision_is_as_exact_as_the_module() -> None:
    """Triton's interpreter cuts bfloat16 off where a GPU rounds, so it may be twice as far from the truth."""
    shape = replace(SHAPE, layers=(0,), dtype=torch.bfloat16)
    trees: Trees = [[0, 0, 1, 2, 2], [0]]
    inputs, weights = layer_of(shape, 0, 8)
    exact = LayerInputs(*(_floats(value) for value in vars(inputs).values()))
    exactly = LayerWeights(*(_floats(value) for value in vars(weights).values()))
    pools = [make_pool(shape, kernels, 2, 8) for kernels in (None, KERNELS)]
    pools.append(make_pool(SHAPE, None, 2, 8))
    pools[2].tails.copy_(pools[0].tails)
    steps = [packed_step(pool, trees, [1, 0]) for pool in pools]
    plain, fused = (run(step, 0, inputs, weights) for step in steps[:2])
    truth = run(steps[2], 0, exact, exactly)
    assert fused.dtype == torch.bfloat16
    assert far(fused, truth) <= 3 * far(plain, truth) <= 0.1
    off = [float((found.float() - truth).abs().mean()) for found in (fused, plain)]
    assert off[0] <= 2.5 * off[1]


def _floats(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(("nodes", "kernel"), [(0, 4), (5, 2), (9, 4), (70, 4)])
def test_sight_is_worked_out_at_once(nodes: int, kernel: int) -> None:
    """Words of bits that are full and begun, a full place, one with padding, an empty one."""
    source, rows = random.Random(nodes), nodes + 1
    trees: Trees = [random_parents(source, nodes, reach=4), random_parents(source, nodes // 2), None]
    made = device_rows(trees, rows)
    sees, windows = KERNELS.sight(made.bits, made.depths, kernel)
    starts = torch.arange(3, device=DEVICE) * rows
    assert torch.equal(sees, expand(made.bits))
    expected = windows_of(made.depths.long(), sees, starts, kernel)
    for place, count in enumerate(made.counts.tolist()):
        assert torch.equal(windows.view(expected.shape)[place, :count], expected[place, :count])
    assert 0 <= int(windows.min()) <= int(windows.max()) < 3 * (kernel - 1 + rows)


def test_decays_of_any_step_are_exact() -> None:
    """Tiny ones too: a head that forgets nearly nothing must still forget that."""
    values = torch.tensor([-40.0, -20, -16, -10, -3, 0, 5, 19, 21, 80])[:, None]
    shape = StateShape(
        (0,), key_heads=1, value_heads=1, key_dim=4, value_dim=4, kernel=2, dtype=torch.float32
    )
    step = packed_step(make_pool(shape, KERNELS, 10, 10), [[]] * 10, list(range(10)))
    assert step.sees is not None
    inputs, weights = layer_of(shape, 0, 10)
    zero, stash = torch.zeros(1, device=DEVICE), step.pool.stash.layer(0)
    inputs = replace(inputs, steps=values.to(DEVICE), betas=values.to(DEVICE))
    own = (step.pool.tails[0], step.windows, step.states, step.sees, step.starts, step.counts, stash)
    shares = KERNELS.open_rows(inputs, replace(weights, rates=zero, bias=zero), *own).shares
    decays = stash.decays
    exact = functional.softplus(values.double(), threshold=100.0)
    torch.testing.assert_close(-decays.cpu().double(), exact, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(shares.cpu(), values.sigmoid(), rtol=1e-5, atol=1e-12)


def test_rows_are_opened_however_many_rows_and_heads_there_are() -> None:
    """More of both than a program takes, and neither a multiple of that."""
    shape = StateShape(
        (0,), key_heads=2, value_heads=6, key_dim=4, value_dim=8, kernel=3, dtype=torch.float32
    )
    trees = [random_parents(random.Random(3), 69, reach=4), [], [0, 1]]
    steps = [packed_step(make_pool(shape, chosen, 3, 74), trees, [2, 0, 1]) for chosen in (KERNELS, None)]
    step, stash = steps[0], steps[0].pool.stash.layer(0)
    assert step.sees is not None
    inputs, weights = layer_of(shape, 0, 74)
    own = (step.pool.tails[0], step.windows, step.states, step.sees, step.starts, step.counts, stash)
    opened = KERNELS.open_rows(inputs, weights, *own)
    active = functional.silu(steps[1].convolve(0, inputs.mixed, weights.convolution))
    rows = rows_of(active, inputs, weights.rates, weights.bias, shape)
    sees = torch.block_diag(*(sees_of(tree).float() for tree in trees)).to(DEVICE)
    for found, expected in (
        (opened.queries, rows.queries), (stash.keys, rows.keys), (opened.values, rows.values),
        (opened.shares, rows.betas), (stash.decays, sees @ rows.log_decays), (stash.inputs, inputs.mixed),
    ):  # fmt: skip
        assert far(found, expected) <= 1e-5


@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_tails_of_all_layers_move_at_once(kernel: int) -> None:
    """Paths shorter and longer than a tail, an empty one, and more channels than a program has."""
    generator = torch.Generator().manual_seed(kernel)
    tails, inputs = normal(generator, 2, 5, kernel - 1, 300), normal(generator, 2, 12, 300)
    states, lengths = torch.tensor([4, 0, 3, 0]), torch.tensor([1, 5, 2, 0])
    paths = torch.full((4, 5), 99)
    for place, nodes in enumerate(([3], [0, 2, 5, 6, 11], [1, 8])):
        paths[place, : len(nodes)] = torch.tensor(nodes)
    expected = tails.clone()
    for layer in range(2):
        for place, state in enumerate(states.tolist()[:3]):
            own, path = tails[layer, state][None], paths[place, : lengths[place]][None].to(DEVICE)
            count = lengths[place][None].to(DEVICE)
            expected[layer, state] = next_tails(own, inputs[layer], path, count)[0]
    KERNELS.move_tails(tails, inputs, *(part.to(DEVICE) for part in (states, paths, lengths)))
    assert torch.equal(tails, expected)
