"""The builder on the device against the heap on the host: the same nodes in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.device.kernels.build import build
from ddtree.device.trees import DeviceTrees
from ddtree.tree import build_trees
from ddtree.types import TreeBatch, TreeRequest
from tests.fakes.device import DEVICE
from tests.fakes.device_trees import poisoned_memory

few = settings(deadline=None, max_examples=40)


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    with poisoned_memory():
        yield


@dataclass(frozen=True)
class Case:
    """What one batch of trees is built from."""

    log_probs: torch.Tensor  # [S, D, K]
    budgets: list[int]
    depths: list[int]
    chains: list[bool]
    nodes: int
    edges: torch.Tensor | None = None  # [S, D, K, K]

    @property
    def ids(self) -> torch.Tensor:
        """Another token for every candidate, token 0 among them."""
        return torch.arange(self.log_probs.numel(), dtype=torch.int32).reshape(self.log_probs.shape)

    def built(self) -> DeviceTrees:
        """On the device."""

        def row(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        return build(
            self.ids.to(DEVICE), self.log_probs.to(DEVICE), row(self.budgets), row(self.depths),
            torch.tensor(self.chains, device=DEVICE), self.nodes,
            None if self.edges is None else self.edges.to(DEVICE),
        )  # fmt: skip

    def expected(self, place: int) -> TreeBatch:
        """One sequence's tree from the host, which is not shown positions that are too deep."""
        end = max(0, self.depths[place])
        part = slice(place, place + 1)
        edges = torch.zeros(0) if self.edges is None else self.edges[part, :end]
        return build_trees(
            TreeRequest(
                top_ids=self.ids[part, :end], top_log_probs=self.log_probs[part, :end],
                budgets=torch.tensor([min(self.budgets[place], self.nodes)]),
                is_chain=torch.tensor(self.chains[part]), round_cost_ms=torch.zeros(0),
                edge_log_probs=edges,
            )
        )  # fmt: skip

    def path_log_probs(self, tree: TreeBatch, place: int) -> list[float]:
        """Of each node, summed along its path; a token tells its candidate."""
        width = self.log_probs.shape[2]
        candidates = [0] + [token % width for token in tree.tokens[0].tolist()]
        sums = [0.0]
        for node, parent in enumerate(tree.parents[0].tolist(), start=1):
            depth = int(tree.depths[0, node - 1]) - 1
            row = self.log_probs[place, depth]
            if self.edges is not None:
                row = self.edges[place, depth, candidates[parent]]
            sums.append(sums[parent] + float(row[candidates[node]]))
        return sums[1:]


def check(case: Case) -> list[int]:
    """Compare all of it, padding too; give the counts."""
    trees = case.built()
    for place, budget in enumerate(case.budgets):
        expected = case.expected(place)
        count = int(expected.counts[0])
        assert count <= max(0, budget)
        assert int(trees.counts[place]) == count
        for name in ("tokens", "parents", "depths"):
            found = getattr(trees, name)[place].tolist()
            assert found == getattr(expected, name)[0].tolist() + [0] * (case.nodes - count), name
        sums = torch.tensor(case.path_log_probs(expected, place) + [-inf] * (case.nodes - count))
        torch.testing.assert_close(trees.log_probs[place].cpu(), sums, rtol=1e-6, atol=0.0)
    return [int(count) for count in trees.counts.tolist()]


def quantised(seed: int, *shape: int, step: float = 0.5, absent: float = 0.1) -> torch.Tensor:
    """Log-probabilities on a coarse grid, where ties are common; some are -inf."""
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(shape, generator=generator) * 2).log_softmax(-1)
    values = (values / step).round() * step
    return values.masked_fill(torch.rand(shape, generator=generator) < absent, -inf)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    places, depth = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    width, nodes = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 5, 8, 9]))
    value = st.one_of(st.sampled_from([0.0, -0.5, -1.0, -2.0, -inf]), st.floats(-20, 0, width=32))
    size = places * depth * width
    values = draw(st.lists(value, min_size=size, max_size=size))

    def per_place(strategy: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(strategy, min_size=places, max_size=places))

    return Case(
        torch.tensor(values).reshape(places, depth, width).sort(-1, descending=True).values,
        budgets=per_place(st.sampled_from([0, 1, nodes - 1, nodes, nodes, nodes + 3])),
        depths=per_place(st.sampled_from([0, 1, depth, depth, depth + 2])),
        chains=[bool(chain) for chain in per_place(st.sampled_from([0, 0, 0, 1]))],
        nodes=nodes,
    )


@few
@given(cases())
def test_the_same_nodes_in_the_same_order(case: Case) -> None:
    check(case)


@few
@given(
    st.integers(0, 10_000), st.integers(1, 2), st.integers(1, 3), st.integers(1, 5), st.integers(1, 9),
    st.booleans(),
)  # fmt: skip
def test_children_that_depend_on_their_parent(
    seed: int, places: int, depth: int, width: int, nodes: int, is_chain: bool
) -> None:
    check(
        Case(
            quantised(seed, places, depth, width),
            budgets=[nodes] * places,
            depths=[depth, 2][:places],
            chains=[is_chain, False][:places],
            nodes=nodes,
            edges=quantised(seed + 1, places, depth, width, width),
        )
    )


@pytest.mark.parametrize("nodes", [63, 64, 65])
def test_trees_of_a_real_width(nodes: int) -> None:
    """Ties, a place without a budget, one that may emit five more tokens, and a chain."""
    log_probs = quantised(nodes, 4, 15, 64, step=0.25, absent=0.0).sort(-1, descending=True).values
    counts = check(
        Case(log_probs, [nodes, 0, nodes, nodes], [15, 15, 5, 31], [False, False, False, True], nodes)
    )
    assert counts == [nodes, 0, nodes, 15]


def test_selector_of_a_real_width() -> None:
    edges = quantised(3, 1, 3, 16, 16, step=0.25)
    case = Case(torch.zeros(1, 3, 16), [24], [3], [False], 24, edges)
    assert check(case) == [24]


def test_the_most_nodes_that_fit_all_equal() -> None:
    """Dictionary order alone: down to the deepest position, then its siblings, then theirs."""
    counts = check(Case(torch.zeros(1, 31, 256), [256], [31], [False], 256))
    assert counts == [256]


def test_the_most_siblings_that_fit() -> None:
    equal = torch.full((1, 2, 256), -1.0)
    equal[:, 1] = -300.0
    assert check(Case(equal, [256], [2], [False], 256)) == [256]


def test_sums_are_as_exact_as_the_hosts() -> None:
    """In float32 the path (0, 0) would cost what (1) costs, and come first by dictionary order."""
    ulp = 2.0**-19  # of numbers from 16 to 32
    log_probs = torch.tensor([[[-16.0, -16.0 - ulp], [-1.3 * ulp, -9.0]]])
    case = Case(log_probs, [3], [2], [False], 3)
    check(case)
    assert case.built().tokens.tolist() == [[0, 1, 2]]


def test_what_rounding_put_above_zero_comes_first() -> None:
    """A sure candidate's log-probability may come out as a little more than none."""
    tiny = 2.0**-23
    log_probs = torch.tensor([[[3 * tiny, tiny, 0.0, -tiny], [2 * tiny, -tiny, -1.0, -2.0]]])
    assert check(Case(log_probs, [12], [2], [False], 12)) == [12]


def test_what_is_no_probability_is_not_drafted() -> None:
    log_probs = torch.tensor([[[-1.0, nan], [nan, nan]], [[nan, nan], [-1.0, -1.0]]])
    assert check(Case(log_probs, [4, 4], [2, 2], [False, False], 4)) == [1, 0]
    edges = torch.full((2, 2, 2, 2), -1.0)
    edges[:, 1, 1] = nan
    edges[:, 1, 0, 1] = nan
    assert check(Case(torch.zeros(2, 2, 2), [4, 4], [2, 2], [False, True], 4, edges)) == [3, 2]


def test_nothing_to_build_from() -> None:
    assert check(Case(torch.zeros(2, 0, 3), [4, 4], [0, 2], [False, True], 4)) == [0, 0]
    assert check(Case(torch.zeros(1, 3, 2), [4], [-1], [False], 4)) == [0]
    assert check(Case(torch.zeros(1, 3, 2), [4], [3], [False], 0)) == [0]
    negative = Case(torch.zeros(1, 3, 2), [-1], [3], [False], 4).built()
    assert negative.counts.tolist() == [0]
