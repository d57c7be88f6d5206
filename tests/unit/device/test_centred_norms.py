"""Norms that scale by one plus their weight, in one launch, against transformers' own."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from ddtree.device.centred_norms import CentredNorm, fuse_norms
from tests.fakes.device import DEVICE


def norm_of(kind: Any, size: int, dtype: torch.dtype = torch.float32) -> Any:
    norm = kind(size, eps=1e-3)
    generator = torch.Generator().manual_seed(size)
    with torch.no_grad():
        norm.weight.copy_(0.3 * torch.randn(size, generator=generator))
    return norm.to(DEVICE, dtype)


@pytest.mark.parametrize("shape", [(3, 20), (1, 5, 2, 8), (2, 2049)])
@pytest.mark.parametrize("kind", [Qwen3NextRMSNorm, Qwen3_5RMSNorm])
@torch.inference_mode()
def test_one_launch_gives_what_eight_give(kind: Any, shape: tuple[int, ...]) -> None:
    """Rows of small values, where eps counts, and rows that do not lie side by side."""
    norm = norm_of(kind, shape[-1])
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    values[0] *= 0.01
    apart = torch.cat((values, values), dim=-1)[..., : shape[-1]]
    expected = norm(values)
    assert fuse_norms(norm) == 1
    assert isinstance(norm.forward, CentredNorm)
    for given in (values, apart):
        torch.testing.assert_close(norm(given), expected, rtol=1e-5, atol=1e-6)
    assert fuse_norms(norm) == 0, "it is fused already"


@torch.inference_mode()
def test_half_precision_stays_half_precision() -> None:
    norm = norm_of(Qwen3_5RMSNorm, 64, torch.bfloat16)
    values = torch.randn((4, 64), generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.bfloat16)
    expected = norm(values)
    assert fuse_norms(norm) == 1
    assert norm(values).dtype == torch.bfloat16
    torch.testing.assert_close(norm(values).float(), expected.float(), rtol=2**-7, atol=0.0)


class _Other(nn.Module):
    """Does something else; the test names it as one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6
        self.weight = nn.Parameter(torch.zeros(4, device=DEVICE))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return 2 * values


def test_what_is_off_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    other = type("Qwen3_5RMSNorm", (_Other,), {})()
    both = nn.ModuleList([norm_of(Qwen3_5RMSNorm, 8), other])
    with caplog.at_level(logging.WARNING):
        assert fuse_norms(both) == 0
    assert "1 of 2 are off" in caplog.text
    assert not any("forward" in vars(module) for module in both)
