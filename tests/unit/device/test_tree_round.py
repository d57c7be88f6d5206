"""All that a round does to trees, one kernel after another, in tensors that stay where they are.

On a GPU the kernels are captured into a graph and played back; elsewhere they are called again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ddtree.device.kernels.build import build
from ddtree.device.kernels.layout import lay_out
from ddtree.device.kernels.move import commit_rows, gather_rows, keep_rows
from ddtree.device.kernels.walk import walk
from ddtree.device.rows import DeviceRows
from ddtree.device.trees import DeviceAcceptance, DeviceTrees
from tests.fakes.device import DEVICE

PLACES, NODES, DEPTH, WIDTH, PAGE = 2, 5, 3, 3, 4


@dataclass(frozen=True)
class Round:
    """Everything a round reads and writes."""

    log_probs: torch.Tensor  # [S, D, K]
    edges: torch.Tensor  # [S, D, K, K]
    target_tokens: torch.Tensor  # [S, T]
    roots: torch.Tensor
    active: torch.Tensor
    token_ids: torch.Tensor
    rows: DeviceRows
    keys_values: torch.Tensor
    features: torch.Tensor  # [slots, 1]
    trees: DeviceTrees
    accepted: DeviceAcceptance

    @classmethod
    def new(cls) -> Round:
        rows = DeviceRows.empty(PLACES, NODES + 1, 8, PAGE, DEVICE)
        rows.page_table.copy_(torch.arange(PLACES * 8).reshape(PLACES, 8))
        slots = PLACES * 8 * PAGE
        return cls(
            log_probs=torch.zeros(PLACES, DEPTH, WIDTH, device=DEVICE),
            edges=torch.zeros(PLACES, DEPTH, WIDTH, WIDTH, device=DEVICE),
            target_tokens=torch.zeros(PLACES, NODES + 1, dtype=torch.int64, device=DEVICE),
            roots=torch.zeros(PLACES, dtype=torch.int64, device=DEVICE),
            active=torch.tensor([True, False], device=DEVICE),
            token_ids=torch.zeros(PLACES, NODES + 1, dtype=torch.int64, device=DEVICE),
            rows=rows,
            keys_values=torch.arange(float(slots), device=DEVICE)
            .reshape(1, 1, slots, 1, 1)
            .repeat(2, 2, 1, 1, 1),
            features=torch.zeros(slots, 1, device=DEVICE),
            trees=DeviceTrees.unwritten(PLACES, NODES, DEVICE),
            accepted=DeviceAcceptance.unwritten(PLACES, DEPTH, DEVICE),
        )

    def run(self) -> None:
        """Six launches, or seven: with edges children are sorted first."""
        ids = (torch.arange(DEPTH, device=DEVICE)[:, None] * 10 + torch.arange(WIDTH, device=DEVICE)).int()
        budgets = torch.full((PLACES,), NODES, dtype=torch.int32, device=DEVICE)
        build(
            ids.expand(PLACES, -1, -1), self.log_probs, budgets, budgets, torch.zeros_like(budgets), NODES,
            self.edges, self.trees,
        )  # fmt: skip
        lay_out(self.trees, self.roots, self.active, self.rows, self.token_ids)
        walk(self.trees, self.target_tokens, DEPTH, self.accepted)
        commit_rows(self.keys_values, self.rows, self.accepted)
        values = self.token_ids.reshape(-1, 1).float()
        keep_rows(gather_rows(values, self.accepted), self.features, self.rows, self.accepted)


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """Something that does the work again without looking at Python."""
    if DEVICE.type == "cpu":
        return work
    work()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def test_rounds_go_on_where_the_last_one_ended() -> None:
    """Two rounds with other trees, lengths and answers, by hand; the second place is empty throughout."""
    state = Round.new()
    play = captured(state.run)
    state.rows.lengths.copy_(torch.tensor([3, 9]))
    state.roots.copy_(torch.tensor([77, 88]))
    staged = state.keys_values[1, 1, :, 0, 0].clone()

    # Candidate 1 is best at the first position, and is followed by candidate 2: nodes 1, 12, 21, 0, 11.
    state.edges.copy_(torch.tensor([[-3.0, -1.0, -9.0], [-9.0, -9.0, -0.5], [-9.0, -0.25, -9.0]]))
    state.target_tokens.copy_(torch.tensor([[1, 12, 50, 0, 0, 0]]))
    play()
    assert state.trees.tokens[0].tolist() == [1, 12, 21, 0, 11]
    assert state.trees.parents[0].tolist() == [0, 1, 2, 0, 4]
    assert state.token_ids.tolist() == [[77, 1, 12, 21, 0, 11], [0] * 6]
    assert state.accepted.path_rows[0].tolist() == [0, 1, 2, 0]
    assert int(state.accepted.bonus_tokens[0]) == 50
    assert torch.equal(state.keys_values[1, 1, :, 0, 0], staged), "the path stood where it belongs"
    assert state.features[:7, 0].tolist() == [0, 0, 0, 77, 1, 12, 0]

    # The target wants the fourth node and its child, staged in the slots 10 and 11 behind the root's 6.
    state.rows.lengths.copy_(torch.tensor([6, 9]))
    state.roots.copy_(torch.tensor([50, 88]))
    state.target_tokens.copy_(torch.tensor([[0, 0, 0, 0, 11, 60]]))
    play()
    assert state.accepted.accepted_tokens[0].tolist() == [0, 11, 0]
    assert int(state.accepted.bonus_tokens[0]) == 60
    assert state.keys_values[1, 1, 6:10, 0, 0].tolist() == [6, 10, 11, 9]
    assert state.features[6:10, 0].tolist() == [50, 0, 11, 0]
    assert not state.features[PAGE * 8 :].any(), "nothing of the empty place is kept"
