"""The best candidates by our kernels against a stable sort: ties, -inf, chunks and strides."""

from __future__ import annotations

import pytest
import torch

from ddtree.device.kernels.top import Best, TopKernels, top_by_torch, top_candidates
from tests.fakes.device import DEVICE

SMALL = TopKernels(groups=16, group=4)  # chunks of 64


def expected(logits: torch.Tensor, width: int) -> Best:
    """Best first, equal ones in the order of their ids: what a stable sort gives."""
    rows = logits.float()
    ordered = rows.sort(dim=-1, descending=True, stable=True)
    log_probs = ordered.values - rows.logsumexp(-1, keepdim=True)
    return Best(ordered.indices[:, :width], log_probs[:, :width])


def check(kernels: TopKernels, logits: torch.Tensor, width: int) -> None:
    found, wanted = kernels.top(logits, width), expected(logits, width)
    assert torch.equal(found.ids, wanted.ids)
    assert found.log_probs.dtype is torch.float32
    torch.testing.assert_close(found.log_probs, wanted.log_probs, rtol=1e-5, atol=1e-5)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 4).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocabulary", "width"), [(17, 16), (63, 5), (64, 8), (65, 1), (300, 16)])
def test_best_candidates_and_their_log_probabilities(vocabulary: int, width: int, dtype: torch.dtype) -> None:
    check(SMALL, noise(3, vocabulary).to(dtype), width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sizes_of_a_gpu(dtype: torch.dtype) -> None:
    logits = noise(1, 20_000).to(dtype)
    check(TopKernels(), logits, 64)
    found, plain = top_candidates(logits, 64), top_by_torch(logits, 64)
    torch.testing.assert_close(found.log_probs, plain.log_probs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_come_in_the_order_of_their_ids(dtype: torch.dtype) -> None:
    few = noise(4, 200).round().clamp(-3, 3)
    few[1], few[2] = 0.0, -7.25
    few[3] = few[3].clamp(max=-1)
    few[3, 5:60:2], few[3, 6:60:2] = -0.0, 0.0  # the same
    check(SMALL, few.to(dtype), 16)


def test_all_of_the_best_in_one_group_or_one_in_each() -> None:
    packed = torch.arange(256, device=DEVICE).float().expand(2, -1).clone()
    packed[1] = packed[1].view(64, 4).T.reshape(-1)  # neighbours are 64 apart
    check(SMALL, packed, 16)
    check(SMALL, -packed, 16)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy: a row of nothing but -inf
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_impossible_tokens(dtype: torch.dtype) -> None:
    logits = noise(4, 150).to(dtype)
    logits[0, 10:140] = -torch.inf
    logits[1, :130] = -torch.inf
    logits[2, 3:] = -torch.inf  # fewer than wanted are possible
    logits[3] = -torch.inf
    found, wanted = SMALL.top(logits, 8), expected(logits, 8)
    assert torch.equal(found.ids, wanted.ids)
    torch.testing.assert_close(found.log_probs, wanted.log_probs, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number_gives_ids_of_the_vocabulary(dtype: torch.dtype) -> None:
    logits = noise(3, 70).to(dtype)
    logits[0, 5] = torch.nan
    logits[1] = -torch.tensor(torch.nan)
    found = SMALL.top(logits, 16)
    assert 5 not in found.ids[0].tolist()
    assert int(found.ids.min()) >= 0
    assert int(found.ids.max()) < 70
    assert found.log_probs[:2].isnan().all()
    assert found.log_probs[2].isfinite().all()


def test_large_values_do_not_overflow() -> None:
    logits = torch.stack((noise(130) + 3e4, noise(130) - 3e4, noise(130) * 1e4))
    check(SMALL, logits, 8)


def test_rows_that_lie_apart() -> None:
    wide = noise(3, 2, 100)
    check(SMALL, wide[:, 1, :90], 8)


def test_two_runs_are_equal_bit_by_bit() -> None:
    logits = noise(2, 300)
    first, second = SMALL.top(logits, 8), SMALL.top(logits, 8)
    assert torch.equal(first.ids, second.ids)
    assert torch.equal(first.log_probs, second.log_probs)


def test_many_candidates_are_left_to_torch() -> None:
    logits = noise(1, 400)
    found, plain = top_candidates(logits, 200), top_by_torch(logits, 200)
    assert torch.equal(found.ids, plain.ids)


@pytest.mark.parametrize(("vocabulary", "width"), [(10, 11), (10, 0), (300, 17)])
def test_widths_that_cannot_be_are_refused(vocabulary: int, width: int) -> None:
    most = min(vocabulary, SMALL.groups)
    with pytest.raises(
        ValueError, match=f"width must be between 1 and {most} for {vocabulary} .* got {width}"
    ):
        SMALL.top(noise(1, vocabulary), width)
