"""The loss through the frozen head, and the optimizer, against the plain ways to compute them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ddtree.errors import InvalidArgument
from ddtree.train.loss import IGNORED, HeadLoss, position_weights
from ddtree.train.optimizers import Muon, make_optimizers, orthogonalised


@pytest.mark.parametrize("rows_at_once", [3, 64])
def test_loss_and_gradient_equal_weighted_cross_entropy(rows_at_once: int) -> None:
    hidden = torch.randn(10, 8, requires_grad=True)
    head, labels, weights = torch.randn(50, 8), torch.randint(0, 50, (10,)), torch.rand(10)
    labels[4] = labels[9] = IGNORED
    loss = HeadLoss(head, rows_at_once)(hidden, labels, weights)
    (3 * loss).backward()
    ours, hidden.grad = hidden.grad, None
    each = F.cross_entropy(hidden @ head.T, labels, ignore_index=IGNORED, reduction="none")
    expected = (each * weights)[labels != IGNORED].sum() / weights[labels != IGNORED].sum()
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours, hidden.grad)


def test_rows_without_labels_alone_give_no_loss() -> None:
    hidden = torch.randn(2, 8, requires_grad=True)
    loss = HeadLoss(torch.randn(5, 8))(hidden, torch.full((2,), IGNORED), torch.ones(2))
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None
    assert float(hidden.grad.abs().max()) == 0


def test_weights_fall_by_e_every_decay_positions() -> None:
    weights = position_weights(15, 7.0, torch.device("cpu"))
    assert weights[0] == 1
    torch.testing.assert_close(weights[7], torch.tensor(1 / torch.e))


def test_a_decay_of_none_weights_all_positions_alike_and_a_negative_one_is_refused() -> None:
    assert position_weights(5, 0.0, torch.device("cpu")).tolist() == [1.0] * 5
    stronger, usual = (position_weights(5, decay, torch.device("cpu")) for decay in (3.0, 7.0))
    assert bool((stronger[1:] < usual[1:]).all())
    with pytest.raises(InvalidArgument, match=r"decay must be 0 or more, got -2\.0"):
        position_weights(5, -2.0, torch.device("cpu"))


@pytest.mark.parametrize("shape", [(2, 12, 6), (2, 6, 12)])
def test_orthogonalised_keeps_directions_and_evens_their_sizes(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape)
    result = orthogonalised(matrices).float()
    for before, after in zip(matrices, result, strict=True):
        sizes = torch.linalg.svdvals(after)
        assert sizes.max() < 1.35
        assert sizes.min() > 0.5
        left, _, right = torch.linalg.svd(before, full_matrices=False)
        assert float((left.T @ after @ right.T).diagonal().min()) > 0.5


def test_muon_moves_against_the_gradient_by_its_rate() -> None:
    matrix = nn.Parameter(torch.zeros(6, 6))
    matrix.grad = torch.eye(6) * 1e-4
    Muon([matrix], lr=0.1).step()
    moved = matrix.detach().diagonal()
    assert -0.14 < float(moved.min()) <= float(moved.max()) < -0.06


def test_only_matrices_of_the_layers_are_muons() -> None:
    model = nn.Module()
    model.fc = nn.Linear(2, 3, bias=False)
    model.layers = nn.ModuleList([nn.Linear(4, 5)])
    adam, muon = make_optimizers(model, matrix_rate=0.02, rate=1e-3)
    assert [tuple(weight.shape) for weight in muon.param_groups[0]["params"]] == [(5, 4)]
    assert [tuple(weight.shape) for weight in adam.param_groups[0]["params"]] == [(3, 2), (5,)]
    (only,) = make_optimizers(model, matrix_rate=None, rate=1e-3)
    assert len(only.param_groups[0]["params"]) == 3
