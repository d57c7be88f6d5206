"""The kernels in Triton's interpreter against the PyTorch form, alone and under a whole target."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddtree.device import attend
from ddtree.device.kernels.gated_delta import OpenedRows
from ddtree.device.plan import DevicePlan
from ddtree.device.rows import DeviceRows
from ddtree.hybrid_cache import HybridPool
from ddtree.models.target import TargetModel
from ddtree.recurrent.gated_delta import unit
from ddtree.recurrent.kernel_choice import kernels_for, tried
from ddtree.recurrent.kernels import TreeKernels
from ddtree.recurrent.layer import LayerInputs, LayerRows
from ddtree.recurrent.state_pool import PoolSize, StatePool, StateShape
from ddtree.recurrent.step import RecurrentStep, Span
from tests.fakes.device import DEVICE
from tests.fakes.hybrid_families import make_hybrid
from tests.fakes.hybrid_runner import HybridRunner, Tree
from tests.fakes.random_trees import depths_of, path_to, random_parents, sees_of

CPU = torch.device("cpu")
EXACT = 1e-5
KERNELS = TreeKernels(value_slice=16, channel_slice=32)
SHAPE = StateShape(
    (0, 3), key_heads=1, value_heads=2, key_dim=8, value_dim=20, kernel=4, dtype=torch.float32
)  # fmt: skip


def make_pools(shape: StateShape, states: int, rows: int) -> list[StatePool]:
    """One without kernels, one with; the stash is poisoned: nothing may be read that was not written."""
    pools = [StatePool(shape, PoolSize(states, rows), DEVICE, kernels) for kernels in (None, KERNELS)]
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(pools[0].matrices.shape, generator=generator)
    tails = torch.randn(pools[0].tails.shape, generator=generator).to(shape.dtype)
    for pool in pools:
        pool.matrices.copy_(matrices)
        pool.tails.copy_(tails)
        for tensor in (pool.stash.keys, pool.stash.updates, pool.stash.decays, pool.stash.inputs):
            tensor.fill_(float("nan"))
    return pools


def spans_of(trees: Sequence[list[int]], states: Sequence[int]) -> list[Span]:
    spans, start = [], 0
    for parents, state in zip(trees, states, strict=True):
        count = len(parents) + 1
        depths, sees = torch.tensor(depths_of(parents)), sees_of(parents)
        spans.append(Span(start, count, state, depths.to(DEVICE), sees.to(DEVICE)))
        start += count
    return spans


def run_layer(step: RecurrentStep, layer: int, count: int) -> list[torch.Tensor]:
    generator, shape = torch.Generator().manual_seed(layer), step.pool.shape
    device = step.pool.matrices.device

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(device)

    convolved = step.convolve(layer, normal(count, shape.channels).to(shape.dtype), normal(shape.channels, 4))
    heads = (shape.key_heads, shape.key_dim)
    rows = LayerRows(
        unit(normal(count, *heads)), unit(normal(count, *heads)),
        normal(count, shape.value_heads, shape.value_dim).to(shape.dtype),
        -0.3 * normal(count, shape.value_heads).abs(), normal(count, shape.value_heads).sigmoid(),
    )  # fmt: skip
    return [convolved, step.mix(layer, rows)]


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Off by how much of the largest value."""
    assert torch.isfinite(expected).all()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1))


@pytest.mark.parametrize(("dtype", "large"), [(torch.float32, 32), (torch.bfloat16, 3)])
def test_sequences_with_trees_of_their_own(dtype: torch.dtype, large: int) -> None:
    """Blocks that are full, begun and spilled over; two layers, states in any order; then paths of each."""
    source = random.Random(1)
    trees = [random_parents(source, large // 2), [], random_parents(source, large, reach=3), [0, 1, 2]]
    count, shape = sum(len(parents) + 1 for parents in trees), replace(SHAPE, dtype=dtype)
    pools = make_pools(shape, 6, count)
    steps = [RecurrentStep.build(pool, spans_of(trees, (4, 0, 5, 2)), keeps=False) for pool in pools]
    for layer in shape.layers:
        plain, ours = (run_layer(step, layer, count) for step in steps)
        assert far(ours[0], plain[0]) <= EXACT
        assert far(ours[1], plain[1]) <= EXACT
    paths = [path_to(parents, source.randrange(len(parents) + 1)) for parents in trees]
    lengths = torch.tensor([len(path) for path in paths])
    lengths[0] = 0  # nothing of this one is kept
    padded = torch.full((4, int(lengths.max())), 10**6)
    for index, path in enumerate(paths):
        padded[index, : len(path)] = torch.tensor(path)[: padded.shape[1]]
    before = pools[0].matrices[:, 4].clone()
    for step in steps:
        step.commit(padded.to(DEVICE), lengths.to(DEVICE))
    assert far(pools[1].matrices, pools[0].matrices) <= EXACT
    assert torch.equal(pools[1].tails, pools[0].tails)
    assert torch.equal(pools[1].matrices[:, 4], before)


def test_a_tree_of_256_nodes() -> None:
    shape = replace(SHAPE, layers=(0,), key_heads=1, value_heads=1, value_dim=16)
    pools = make_pools(shape, 1, 257)
    spans = spans_of([random_parents(random.Random(2), 256, reach=6)], [0])
    outputs = [run_layer(RecurrentStep.build(pool, spans, keeps=False), 0, 257)[1] for pool in pools]
    assert far(outputs[1], outputs[0]) <= EXACT


def test_sequences_that_would_take_too_much_memory_run_one_after_another() -> None:
    """A launch each, or one of three and one of two, gives what one of all gives, to the last bit."""
    source = random.Random(5)
    trees = [random_parents(source, 33), [], [0, 0], random_parents(source, 18), [0]]
    count, shape = sum(len(parents) + 1 for parents in trees), replace(SHAPE, layers=(0,))
    pool = make_pools(shape, 6, count)[1]
    found = []
    for kernels in (KERNELS, replace(KERNELS, scratch_bytes=1), replace(KERNELS, scratch_bytes=80_000)):
        pool.kernels = kernels
        pool.stash.updates.fill_(float("nan"))
        step = RecurrentStep.build(pool, spans_of(trees, (4, 0, 5, 2, 1)), keeps=False)
        output = run_layer(step, 0, count)[1]
        found.append((kernels.at_a_time(5, 2, 34), output, pool.stash.updates[:, :count].clone()))
    assert [most for most, *_ in found] == [5, 1, 3]
    assert torch.isfinite(found[0][1]).all()
    for _, output, updates in found[1:]:
        assert torch.equal(output, found[0][1])
        assert torch.equal(updates, found[0][2])


def test_memory_of_a_step_is_bounded_by_its_shape() -> None:
    """Qwen3.6-27B: a tree of 256 nodes among 31 rows; and trees of 64 nodes, which go in one launch."""
    kernels = TreeKernels()
    each = 48 * 4 * (16 * 17 // 2 * 2 * 16 * 16 + 256 * 2)
    assert 1 < kernels.at_a_time(32, 48, 257) <= (64 << 20) // each
    assert kernels.at_a_time(32, 48, 65) == 32
    assert kernels.at_a_time(32, 48, 4097) == 1


def test_repeated_tokens_that_never_fade_stay_exact() -> None:
    """The system of equal keys: its powers would lose every digit, its solution is small."""
    shape = replace(SHAPE, layers=(0,), key_heads=1, value_heads=1, value_dim=16)
    outputs = []
    for pool in make_pools(shape, 1, 64):
        step = RecurrentStep.build(pool, spans_of([list(range(63))], [0]), keeps=False)
        key = unit(torch.ones(64, 1, 8))
        values = torch.randn((64, 1, 16), generator=torch.Generator().manual_seed(3))
        parts = (key, key, values, torch.zeros(64, 1), torch.full((64, 1), 0.999))
        outputs.append(step.mix(0, LayerRows(*(part.to(DEVICE) for part in parts))))
    assert far(outputs[1], outputs[0]) <= EXACT


def test_a_target_runs_on_them(tmp_path: Path) -> None:
    """Logits of a tree, its commit and the tree after it; prompts are read without kernels."""
    source = random.Random(4)
    target = TargetModel.load(make_hybrid(tmp_path, "qwen3.5"), dtype="float32", device=DEVICE, taps=(0,))
    prompt = [source.randrange(256) for _ in range(9)]
    trees = [Tree([source.randrange(256) for _ in range(8)], random_parents(source, 7)) for _ in range(2)]
    outputs = []
    for kernels in (None, KERNELS):
        runner = HybridRunner(target, sequences=1, slots=64, device=DEVICE)
        runner.states.kernels = kernels
        sequence = runner.open()
        runner.prefill([sequence], [prompt])
        first = runner.stage([sequence], [trees[0]])
        first.commit([7])
        second = runner.stage([sequence], [trees[1]])
        outputs.append(torch.cat((first.logits, second.logits)))
    assert far(outputs[1], outputs[0]) <= EXACT


# `item` is what inference mode makes of the first.
_LOOKS = ("_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "bincount", "lift_fresh")


class _LooksAtNothing(TorchDispatchMode):
    """Fails where a value would be carried to the host: a graph could not be captured there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in _LOOKS, name
        if name.startswith("index"):
            indices = [index for index in args[1] or () if index is not None] if len(args) > 1 else []
            assert all(index.dtype != torch.bool for index in indices), f"{name} by a mask counts it"
        return func(*args, **(kwargs or {}))


class _NoLaunch(TreeKernels):
    """Only what surrounds the launches; the interpreter itself looks at everything."""

    def stage(self, *arguments: Any) -> torch.Tensor:
        return torch.zeros_like(arguments[2], dtype=torch.float32)

    def commit(self, *arguments: Any) -> None:
        assert len(arguments) == 7

    def convolve(self, inputs: torch.Tensor, *_: Any) -> torch.Tensor:
        return inputs.float()

    def move_tails(self, *arguments: Any) -> None:
        assert len(arguments) == 5

    def sight(
        self, bits: torch.Tensor, depths: torch.Tensor, kernel: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sees = torch.ones((*depths.shape, bits.shape[1]), dtype=torch.bool)
        return sees, torch.zeros((depths.numel(), kernel), dtype=torch.int64)

    def open_rows(self, inputs: LayerInputs, *others: Any) -> OpenedRows:
        stash, count = others[-1], len(inputs.mixed)
        queries, values = (
            inputs.mixed.new_zeros((count, *part.shape[1:])) for part in (stash.keys, stash.updates)
        )
        return OpenedRows(queries, values, torch.zeros_like(inputs.betas))

    def gate(self, outputs: torch.Tensor, gates: torch.Tensor, *_: Any) -> torch.Tensor:
        assert len(outputs) == len(gates)
        return torch.zeros_like(gates)


class _OnlyFused(_NoLaunch):
    """For a target whose layers are all of a known kind."""

    def convolve(self, inputs: torch.Tensor, *_: Any) -> torch.Tensor:
        raise AssertionError(f"a layer of {len(inputs)} rows runs launch by launch")


@pytest.mark.parametrize("kernels", [None, _NoLaunch()])
def test_a_step_never_looks_at_values(kernels: TreeKernels | None) -> None:
    trees = [[0, 0, 1], [0, 1, 2, 3, 4]]
    pool = StatePool(SHAPE, PoolSize(2, 10), CPU, kernels)
    step = RecurrentStep.build(pool, spans_of(trees, (1, 0)), keeps=False)
    paths, lengths = torch.tensor([[0, 2, 0], [0, 1, 2]]), torch.tensor([2, 3])
    with _LooksAtNothing():
        for layer in SHAPE.layers:
            run_layer(step, layer, 10)
        step.commit(paths, lengths)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), _LooksAtNothing():
        int(lengths[0])


@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5", "qwen3.5 moe"])
def test_a_step_of_a_whole_target_never_looks_at_values(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From device rows through transformers' own modules to the commit: all of it can be captured."""
    target = TargetModel.load(make_hybrid(tmp_path, family), dtype="bfloat16", device=CPU, taps=(0,))
    shape = target.state_shape()
    assert shape is not None
    states = StatePool(shape, PoolSize(2, 16), CPU, _OnlyFused())
    pool = HybridPool(target.cache_shape(0), states, budget_bytes=1 << 20, page_size=16, device=CPU)
    monkeypatch.setattr(attend, "store", lambda *_: None)
    monkeypatch.setattr(attend, "attend_to_tree", lambda queries, *_, **__: torch.zeros_like(queries))
    rows, ids = DeviceRows.empty(2, 8, 4, 16, CPU), torch.zeros((2, 8), dtype=torch.int64)
    with torch.inference_mode(), _LooksAtNothing():
        step = RecurrentStep.of_rows(states, rows, ids[:, 0])
        target.device_forward(ids, DevicePlan(rows, pool, recurrent=step))
        step.commit(ids[:, :3].int(), ids[:, 0].int())


class _SingleRowsLost(TreeKernels):
    """Right in trees, and not a number in a plain step."""

    def stage(self, *arguments: Any) -> torch.Tensor:
        outputs, sees = super().stage(*arguments), arguments[5]
        return outputs * float("nan") if sees.shape[1] == 1 else outputs


def test_kernels_are_tried_before_they_are_used(caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> TreeKernels:
        raise ImportError("No module\nnamed 'triton'")

    assert kernels_for(CPU) is None
    assert tried(DEVICE, lambda: KERNELS) is KERNELS
    with caplog.at_level(logging.WARNING):
        assert tried(DEVICE, missing) is None
        assert tried(DEVICE, _NoLaunch) is None
        assert tried(DEVICE, _SingleRowsLost) is None
    said = [record.getMessage() for record in caplog.records]
    assert "No module named 'triton'" in said[0]
    assert all("without kernels" in line for line in said)
    assert "off by nan" in said[2]
    assert len(said) == 3
