"""Fused layers of hybrid targets: every node's logits, what a commit leaves, weights, and what is let in."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddtree.device import fused_check, fused_layers
from ddtree.device.fused_layers import PlainLinear, fuse
from ddtree.device.kernels import layer
from ddtree.device.plan import DevicePlan
from ddtree.device.rows import DeviceRows
from ddtree.models import packed
from ddtree.models.target import TargetModel
from ddtree.recurrent.kernels import TreeKernels
from ddtree.recurrent.step import RecurrentStep
from ddtree.tree_mask import ancestor_bits
from tests.fakes.device import DEVICE
from tests.fakes.device_step import fused_of
from tests.fakes.hybrid_families import make_hybrid
from tests.fakes.hybrid_runner import HybridRunner, PlainTarget, RunningSequence, Tree
from tests.fakes.kept_weights import assert_fused_in_place
from tests.fakes.random_trees import depths_of, path_to, random_parents
from tests.fakes.target_families import LAYERS

KERNELS = TreeKernels(value_slice=16, channel_slice=32)
ROWS = 4
EXACT = 3e-5  # two ways of adding up in float32, maybe on two devices


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers are tried over the step's kernels on a CPU too."""
    cheaply(monkeypatch)
    with torch.inference_mode():
        yield


def cheaply(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fused_check, "kernels_for", lambda _: KERNELS)
    if DEVICE.type == "cpu":  # the interpreter takes its time per program, however much each does
        patch.setattr(layer, "_MANY_PROGRAMS", 0)


def load(folder: Path, family: str, dtype: str = "float32") -> TargetModel:
    return TargetModel.load(make_hybrid(folder, family), dtype=dtype, device=DEVICE, taps=(0,))


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Off by how much of the largest value."""
    assert torch.isfinite(expected).all()
    return float((found.cpu() - expected.cpu()).abs().max() / expected.abs().max().clamp(min=1))


@dataclass(frozen=True)
class Staged:
    """A step over device rows: the first place is empty, then one for each sequence."""

    logits: torch.Tensor  # [S + 1, T, V]
    step: RecurrentStep

    def commit(self, trees: list[Tree], nodes: list[int]) -> None:
        paths = [[], *(path_to(tree.parents, node) for tree, node in zip(trees, nodes, strict=True))]
        padded = torch.zeros((len(paths), ROWS), dtype=torch.int32)
        for place, path in enumerate(paths):
            padded[place, : len(path)] = torch.tensor(path)
        lengths = torch.tensor([len(path) for path in paths], dtype=torch.int32)
        self.step.commit(padded.to(DEVICE), lengths.to(DEVICE))


def stage(runner: HybridRunner, sequences: list[RunningSequence], trees: list[Tree]) -> Staged:
    rows = DeviceRows.empty(len(trees) + 1, ROWS, 4, 16, DEVICE)
    rows.depths.fill_(3)
    tokens = torch.full((len(trees) + 1, ROWS), 7, device=DEVICE)
    for place, (sequence, tree) in enumerate(zip(sequences, trees, strict=True), start=1):
        count, start = len(tree.tokens), len(sequence.ids)
        bits = ancestor_bits(torch.tensor([tree.parents], dtype=torch.int32), torch.tensor([count - 1]))
        rows.page_table[place, : len(sequence.pages.indices)] = torch.tensor(sequence.pages.indices)
        rows.lengths[place], rows.counts[place] = start, count
        rows.depths[place, :count], rows.bits[place, :count] = torch.tensor(depths_of(tree.parents)), bits[0]
        rows.slots[place, :count] = sequence.pages.slots[start : start + count]
        tokens[place, :count] = torch.tensor(tree.tokens)
    states = torch.tensor([0, *(sequence.state for sequence in sequences)], device=DEVICE)
    step = RecurrentStep.of_rows(runner.states, rows, states)
    logits = runner.target.device_forward(tokens, DevicePlan(rows, runner.pool, recurrent=step)).logits
    return Staged(logits.view(len(trees) + 1, ROWS, -1), step)


def opened(target: TargetModel, chosen: TreeKernels | None) -> tuple[HybridRunner, list[RunningSequence]]:
    source = random.Random(1)
    runner = HybridRunner(target, sequences=4, slots=40, device=DEVICE)
    runner.states.kernels = chosen
    sequences = [runner.open(), runner.open()]
    runner.prefill(sequences, [[source.randrange(256) for _ in range(count)] for count in (11, 2)])
    return runner, sequences


def two_trees() -> list[Tree]:
    source = random.Random(2)
    return [
        Tree([source.randrange(256) for _ in range(nodes + 1)], random_parents(source, nodes, reach=3))
        for nodes in (ROWS - 1, 2)
    ]


@dataclass(frozen=True)
class Ran:
    """One step of two sequences over fused layers and the step's kernels, and its commit."""

    folder: Path
    runner: HybridRunner
    sequences: list[RunningSequence]
    logits: torch.Tensor  # [S + 1, T, V]
    calls: list[str]  # products and kernels, as they were called

    def matrices_of(self, state: int) -> list[torch.Tensor]:
        return [self.runner.states.matrices[:, state], self.runner.states.tails[:, state]]


PATHS = [ROWS - 1, 1]  # the nodes that are committed


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    folder, calls = tmp_path_factory.mktemp("fused"), list[str]()
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        cheaply(patch)
        target = load(folder, "qwen3.5")
        assert fuse(target.model) == LAYERS == len(fused_of(target.model))
        runner, sequences = opened(target, KERNELS)

        def noted(owner: Any, name: str) -> None:
            own = getattr(owner, name)

            def call(*arguments: Any, **options: Any) -> Any:
                calls.append(name)
                return own(*arguments, **options)

            patch.setattr(owner, name, call)

        for name in ("add_norm", "turn", "tree_attention", "open_gates", "gate"):
            noted(fused_layers, name)
        for name in ("open_rows", "stage"):
            noted(TreeKernels, name)
        noted(torch.nn.functional, "linear")
        staged = stage(runner, sequences, two_trees())
        seen = list(calls)
        staged.commit(two_trees(), PATHS)
        yield Ran(folder, runner, sequences, staged.logits, seen)


def test_a_node_has_the_logits_of_its_path(ran: Ran) -> None:
    plain = PlainTarget(ran.folder)
    assert ran.logits.isfinite().all(), "padding and empty places are finite"
    for place, (sequence, tree) in enumerate(zip(ran.sequences, two_trees(), strict=True), start=1):
        for node in range(len(tree.tokens)):
            expected = plain.logits([*sequence.ids, *tree.path(node)])[-1]
            assert far(ran.logits[place, node], expected) <= EXACT


def test_a_commit_leaves_what_reading_leaves(ran: Ran) -> None:
    for sequence, tree, node in zip(ran.sequences, two_trees(), PATHS, strict=True):
        fresh = ran.runner.open()
        ran.runner.prefill([fresh], [[*sequence.ids, *tree.path(node)]])
        for found, expected in zip(
            ran.matrices_of(sequence.state), ran.matrices_of(fresh.state), strict=True
        ):
            assert far(found, expected) <= EXACT


def test_a_layer_is_eleven_launches(ran: Ran) -> None:
    mlp = ["linear", "add_norm", "linear", "gate", "linear", "add_norm"]
    recurrent = [
        "linear",
        "open_rows",
        "stage",
        *mlp,
    ]  # a kernel `gate` of the step's own behind it
    attention = ["linear", "turn", "tree_attention", "open_gates", *mlp]
    assert ran.calls[1:-1] == [*recurrent * 3, *attention], "the first norm before, the head after"


def test_without_kernels_of_the_step_the_numbers_are_the_same(tmp_path: Path) -> None:
    target = load(tmp_path, "qwen3.5, other order")
    assert fuse(target.model) == LAYERS
    runner, sequences = opened(target, None)
    tree, plain = two_trees()[1], PlainTarget(tmp_path)
    logits = stage(runner, sequences[:1], [tree]).logits
    assert far(logits[1, 2], plain.logits([*sequences[0].ids, *tree.path(2)])[-1]) <= EXACT


def prompt_logits(target: TargetModel) -> torch.Tensor:
    runner = HybridRunner(target, sequences=1, slots=40, device=DEVICE)
    return runner.prefill([runner.open()], [list(range(60, 80))]).logits


def test_weights_and_other_forwards_stay_as_they_are(tmp_path: Path) -> None:
    """Names and values; each in memory once; and what prompts are read with, bit for bit."""
    target = load(tmp_path, "qwen3.5")
    expected = prompt_logits(target)
    assert_fused_in_place(target.model, LAYERS)
    assert torch.equal(prompt_logits(target), expected)
    stack: Any = target.model.model.layers
    mixer, attention = stack[0].linear_attn, stack[3].self_attn
    for fused, names in (
        (stack[0], [getattr(mixer, f"in_proj_{name}") for name in ("qkv", "z", "b", "a")]),
        (stack[3], [getattr(attention, f"{name}_proj") for name in ("q", "k", "v")]),
    ):
        whole = fused.forward._products.inputs._weight
        assert whole.shape[0] == sum(part.out_features for part in names)
        assert {part.weight.untyped_storage().data_ptr() for part in names} == {whole.data_ptr()}


class Off(PlainLinear):
    """A matrix product of a card that is not well, where it is as tall as a recurrent layer's inputs."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        product = super().forward(rows)
        return product * 1.01 if product.shape[1] == 2 * 16 + 2 * 24 + 2 * 4 else product


def test_a_kind_that_does_not_come_out_alike_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The attention layer stays fused: it is a kind of its own."""
    target = load(tmp_path, "qwen3.5")
    with caplog.at_level(logging.WARNING):
        assert fuse(target.model, Off) == 1
    assert fused_of(target.model) == ["model.layers.3"]
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().startswith("Qwen3_5DecoderLayer runs unfused, more slowly: ")
    runner, sequences = opened(target, None)
    tree, plain = two_trees()[1], PlainTarget(tmp_path)
    logits = stage(runner, sequences[:1], [tree]).logits
    assert far(logits[1, 2], plain.logits([*sequences[0].ids, *tree.path(2)])[-1]) <= EXACT


def test_layers_that_are_not_quite_their_class_are_left_alone(tmp_path: Path) -> None:
    target = load(tmp_path, "qwen3.5")
    stack: Any = target.model.model.layers
    packed.pack(stack[1].mlp.cpu())
    stack[0].linear_attn.forward = lambda hidden_states, **_: hidden_states
    stack[2].linear_attn.in_proj_z.register_forward_hook(lambda *_: None)
    stack[3].self_attn.q_norm = nn.Identity()
    assert fuse(target.model) == 0
