"""Targets with Gated DeltaNet layers: a node has the logits of its path, and a commit is a prefill."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ddtree.models import packed
from ddtree.models.loading import load_tables
from ddtree.models.probe import check_trees_work
from ddtree.models.target import TargetModel
from tests.fakes.hybrid_families import HYBRIDS, make_hybrid
from tests.fakes.hybrid_runner import HybridRunner, PlainTarget, Tree
from tests.fakes.random_trees import random_parents
from tests.fakes.target_families import LAYERS

CPU = torch.device("cpu")
EXACT = 1e-5
Checkpoints = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = make_hybrid(tmp_path_factory.mktemp("hybrid"), name)
        return made[name]

    return make


def load(folder: Path, dtype: str = "float32") -> TargetModel:
    return TargetModel.load(folder, dtype=dtype, device=CPU, taps=(0, LAYERS - 2))


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Off by how much of the largest value."""
    return float((found.to(expected.dtype) - expected).abs().max() / expected.abs().max().clamp(min=1))


def tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(256) for _ in range(count)]


def random_tree(source: random.Random, nodes: int, reach: int | None = None) -> Tree:
    return Tree(tokens(source, nodes + 1), random_parents(source, nodes, reach=reach))


def rounding_of(folder: Path, paths: Sequence[list[int]]) -> float:
    """How far float32 is from float64 in transformers' own forward of some paths."""
    plain, exact = PlainTarget(folder), PlainTarget(folder, torch.float64)
    return max(far(plain.logits(path)[-1].double(), exact.logits(path)[-1]) for path in paths)


@pytest.mark.parametrize("family", HYBRIDS)
def test_every_node_has_the_logits_of_its_path(checkpoints: Checkpoints, family: str) -> None:
    """Trees of 1 to 256 nodes, wide and deep ones, a chain and a root alone, together and alone."""
    source, plain = random.Random(1), PlainTarget(checkpoints(family))
    runner = HybridRunner(load(checkpoints(family)), sequences=6, slots=400)
    prompts = [tokens(source, count) for count in (1, 2, 3, 40, 70, 9)]
    trees = [random_tree(source, 24), random_tree(source, 1), Tree(tokens(source, 1), []),
             random_tree(source, 30, reach=2), Tree(tokens(source, 12), list(range(11))),
             random_tree(source, 256, reach=8)]  # fmt: skip
    sequences = [runner.open() for _ in prompts]
    runner.prefill(sequences, prompts)
    together = runner.stage(sequences, trees)
    # Two ways of adding up in float32 differ by what each is off, and that depends on the processor.
    longest = [[*prompts[index], *trees[index].path(len(trees[index].tokens) - 1)] for index in (3, 4, 5)]
    bound = max(EXACT, 4 * rounding_of(checkpoints(family), longest))
    assert bound < 1e-4
    for index, (prompt, tree) in enumerate(zip(prompts, trees, strict=True)):
        found = together.logits_of(index)
        alone = runner.stage([sequences[index]], [tree])
        assert far(found, alone.logits) <= bound
        nodes = range(len(tree.tokens)) if len(tree.tokens) < 50 else source.sample(range(257), 12)
        for node in nodes:
            assert far(found[node], plain.logits([*prompt, *tree.path(node)])[-1]) <= bound


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_prompt_in_chunks_is_the_prompt_at_once(checkpoints: Checkpoints, family: str) -> None:
    """Chunks shorter than the convolution and longer than a block, two sequences of other lengths beside."""
    source, plain = random.Random(2), PlainTarget(checkpoints(family))
    runner = HybridRunner(load(checkpoints(family)), sequences=2, slots=400)
    prompts = [tokens(source, 230), tokens(source, 150)]
    sequences, at = [runner.open(), runner.open()], [0, 0]
    found: list[list[torch.Tensor]] = [[], []]
    for sizes in ((1, 90), (2, 1), (150, 3), (3, 55), (74, 1)):
        chunks = [prompts[i][at[i] : at[i] + size] for i, size in enumerate(sizes)]
        pieces = runner.prefill(sequences, chunks).logits.split(sizes)
        for i, size in enumerate(sizes):
            at[i] += size
            found[i].append(pieces[i])
    assert at == [230, 150]
    for prompt, pieces in zip(prompts, found, strict=True):
        assert far(torch.cat(pieces), plain.logits(prompt)) <= EXACT


@pytest.mark.parametrize("family", HYBRIDS)
def test_after_commits_everything_goes_on_as_if_prefilled(checkpoints: Checkpoints, family: str) -> None:
    """Ten rounds of two sequences with other trees and paths; then states, tails and logits are compared."""
    source, plain = random.Random(3), PlainTarget(checkpoints(family))
    runner = HybridRunner(load(checkpoints(family)), sequences=4, slots=300)
    sequences = [runner.open(), runner.open()]
    runner.prefill(sequences, [tokens(source, 2), tokens(source, 30)])
    for _ in range(10):
        trees = [random_tree(source, source.randrange(12), reach=3), random_tree(source, 9)]
        staged = runner.stage(sequences, trees)
        staged.commit([source.randrange(len(tree.tokens)) for tree in trees])
    fresh = [runner.open(), runner.open()]
    logits = runner.prefill(fresh, [list(sequence.ids) for sequence in sequences]).logits
    for old, new in zip(sequences, fresh, strict=True):
        assert old.ids == new.ids
        for tensor in (runner.states.matrices, runner.states.tails):
            assert far(tensor[:, old.state], tensor[:, new.state]) <= EXACT
    assert far(logits[-1], plain.logits(sequences[1].ids)[-1]) <= EXACT
    probe = Tree(tokens(source, 4), [0, 0, 1])
    staged = runner.stage(sequences, [probe, probe])
    again = runner.stage(fresh, [probe, probe])
    assert far(staged.logits, again.logits) <= EXACT


def test_a_path_shaped_tree_leaves_the_state_of_the_chain(checkpoints: Checkpoints) -> None:
    source = random.Random(4)
    runner = HybridRunner(load(checkpoints("qwen3.5")), sequences=3, slots=100)
    prompt, chain = tokens(source, 20), tokens(source, 30)
    sequences = [runner.open() for _ in range(3)]
    runner.prefill(sequences, [prompt] * 3)
    beside = Tree([*chain, 7], [*range(29), 0])  # one more child of the root makes a tree of it
    staged = runner.stage(sequences[:2], [Tree(chain, list(range(29))), beside])
    staged.commit([29, 29])
    runner.prefill([sequences[2]], [chain])
    for tensor in (runner.states.matrices, runner.states.tails):
        assert far(tensor[:, sequences[0].state], tensor[:, sequences[2].state]) <= EXACT
        assert far(tensor[:, sequences[1].state], tensor[:, sequences[2].state]) <= EXACT


def test_siblings_of_a_star_may_stand_in_any_order(checkpoints: Checkpoints) -> None:
    source = random.Random(5)
    runner = HybridRunner(load(checkpoints("qwen3-next")), sequences=1, slots=100)
    sequence = runner.open()
    runner.prefill([sequence], [tokens(source, 20)])
    children = source.sample(range(256), 40)
    order = source.sample(range(40), 40)
    first = runner.stage([sequence], [Tree([9, *children], [0] * 40)]).logits[1:]
    second = runner.stage([sequence], [Tree([9, *(children[i] for i in order)], [0] * 40)]).logits[1:]
    assert far(second, first[order]) <= EXACT


def test_two_thousand_rounds_leave_the_state_of_a_fresh_prefill(checkpoints: Checkpoints) -> None:
    """Drift would grow with the rounds; states are float32 and move once per round, not once per token."""
    source = random.Random(6)
    runner = HybridRunner(load(checkpoints("qwen3.5, other order")), sequences=2, slots=6000)
    sequence = runner.open()
    runner.prefill([sequence], [tokens(source, 5)])
    for _ in range(2000):
        tree = random_tree(source, 4, reach=2)
        runner.stage([sequence], [tree]).commit([source.randrange(5)])
    fresh = runner.open()
    for start in range(0, len(sequence.ids), 512):
        runner.prefill([fresh], [sequence.ids[start : start + 512]])
    assert len(sequence.ids) > 4000
    for tensor in (runner.states.matrices, runner.states.tails):
        assert far(tensor[:, sequence.state], tensor[:, fresh.state]) <= EXACT


@pytest.mark.parametrize("family", HYBRIDS)
def test_classes_and_names_of_weights_stay_as_they_are(checkpoints: Checkpoints, family: str) -> None:
    """Taps too: they are the outputs of decoder layers, recurrent or not."""
    folder, source = checkpoints(family), random.Random(7)
    target, plain = load(folder), PlainTarget(folder).model
    assert list(target.model.state_dict()) == list(plain.state_dict())
    assert [type(m) for m in target.model.modules()] == [type(m) for m in plain.modules()]
    runner, ids = HybridRunner(target, sequences=1, slots=100), tokens(source, 20)
    taps = runner.prefill([runner.open()], [ids]).taps
    with torch.inference_mode():
        hidden = plain(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for layer, tap in zip(target.taps, taps, strict=True):
        assert far(tap, hidden[layer + 1][0]) <= EXACT
    tables = load_tables(folder, dtype=torch.float32, device=CPU)
    assert torch.equal(tables.embedding, target.embedding)
    assert torch.equal(tables.head, target.model.get_output_embeddings().weight)


@pytest.mark.parametrize("family", HYBRIDS)
def test_packed_modules_change_nothing(checkpoints: Checkpoints, family: str) -> None:
    target, source = load(checkpoints(family)), random.Random(8)
    prompt, tree = tokens(source, 9), random_tree(source, 12)
    outputs = []
    for _ in range(2):
        runner = HybridRunner(target, sequences=1, slots=64)
        sequence = runner.open()
        runner.prefill([sequence], [prompt])
        outputs.append(runner.stage([sequence], [tree]).logits)
        packed.pack(target.model)
    assert sum(isinstance(module, packed.PackedLinear) for module in target.model.modules()) > LAYERS
    assert far(outputs[1], outputs[0]) <= EXACT


@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5", "qwen3.5 moe"])
def test_half_precision_keeps_its_states_in_float32(checkpoints: Checkpoints, family: str) -> None:
    """The rest of the layer is as exact as its dtype; against transformers' forward in the same dtype."""
    source = random.Random(9)
    runner = HybridRunner(load(checkpoints(family), "bfloat16"), sequences=1, slots=64)
    assert runner.states.matrices.dtype == torch.float32
    assert runner.states.tails.dtype == torch.bfloat16
    prompt, tree = tokens(source, 24), random_tree(source, 10, reach=2)
    sequence = runner.open()
    runner.prefill([sequence], [prompt])
    found = runner.stage([sequence], [tree]).logits.float()
    plain = AutoModelForCausalLM.from_pretrained(checkpoints(family), dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        for node in range(11):
            expected = plain(torch.tensor([[*prompt, *tree.path(node)]])).logits[0, -1].float()
            likeness = torch.nn.functional.cosine_similarity(found[node], expected, dim=0)
            assert likeness > 0.99  # a router of so few experts may choose another in half precision


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_probe_lets_them_in(checkpoints: Checkpoints, family: str) -> None:
    check_trees_work(load(checkpoints(family)))
