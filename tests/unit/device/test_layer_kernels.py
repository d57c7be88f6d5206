"""The kernels of a decoder layer against transformers' own functions, in every dtype a target may have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from ddtree.device.kernels import layer
from ddtree.device.kernels.layer import Heads, add_norm, gate, turn
from tests.fakes.device import DEVICE

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5
# Triton's interpreter cuts digits off where a GPU, and NumPy for float16, rounds to the nearest bfloat16.
IS_CUT = DEVICE.type == "cpu"


def normal(*sizes: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=generator).to(DEVICE, dtype)


def assert_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Float32 to its last digits; others the same numbers, but for a few that rounded to a neighbour."""
    assert found.dtype == expected.dtype
    step = torch.finfo(found.dtype).eps
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    elif found.dtype == torch.bfloat16 and IS_CUT:
        torch.testing.assert_close(found, expected, rtol=4 * step, atol=4 * step)
    else:
        torch.testing.assert_close(found, expected, rtol=2 * step, atol=2 * step)
        share = float((found != expected).float().mean())
        assert share <= 0.01, "rounded in other places than transformers"


def norm_of(weight: torch.Tensor) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(len(weight), eps=EPS).to(DEVICE, weight.dtype)
    norm.weight.data.copy_(weight)
    return norm.requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 576, 1000])
def test_add_norm_is_the_sum_and_the_norm_of_transformers(dtype: torch.dtype, width: int) -> None:
    hidden, update = normal(5, width, dtype=dtype), normal(5, width, dtype=dtype, seed=1) * 3
    weight = normal(width, dtype=dtype, seed=2)
    normed, summed = add_norm(hidden, update, weight, EPS)
    assert_alike(summed, hidden + update)
    assert_alike(normed, norm_of(weight)(hidden + update))
    normed, summed = add_norm(hidden, None, weight, EPS)
    assert summed is hidden
    assert_alike(normed, norm_of(weight)(hidden))


def test_a_row_of_zeros_has_a_finite_norm() -> None:
    zeros = torch.zeros(2, 64, device=DEVICE)
    normed, _ = add_norm(zeros, zeros, torch.ones(64, device=DEVICE), EPS)
    assert (normed == 0).all()


@pytest.mark.filterwarnings("ignore:overflow encountered")  # which is what the two large gates are there for
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 1500])
def test_gate_is_silu_of_the_gate_times_the_up(dtype: torch.dtype, width: int) -> None:
    gate_up = normal(3, 2 * width, dtype=dtype) * 6
    gate_up[0, :2] = torch.tensor([-120.0, 120.0])  # where an exponential leaves the range
    gates, ups = gate_up.chunk(2, dim=-1)
    assert_alike(gate(gate_up), functional.silu(gates) * ups)


class Turned:
    """One call of `turn` beside what transformers makes of the same rows."""

    def __init__(self, heads: Heads, dtype: torch.dtype, *, rows: int = 3, width: int | None = None) -> None:
        self.heads, self.width = heads, width or heads.size
        self.slots = torch.tensor([7, -1, 0, 3, 9, 2, 1, 4])[:rows].to(DEVICE)
        self.packed = normal(rows, heads.width, dtype=dtype)
        angles = normal(rows, self.width // 2, dtype=torch.float32, seed=1) * 9
        angles = torch.cat((angles, angles), dim=-1)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        # A slot before the first and one behind the last are somebody else's: -1 must not be taken for one.
        self.all_slots = normal(2, 12, heads.keys, heads.size, dtype=dtype, seed=2)
        self.pool = self.all_slots[:, 1:11]

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and pool as they should be afterwards."""
        sizes = [self.heads.queries, self.heads.keys, self.heads.keys]
        query, key, value = self.packed.view(len(self.packed), -1, self.heads.size).split(sizes, dim=1)
        if self.heads.query_norm is not None and self.heads.key_norm is not None:
            query, key = norm_of(self.heads.query_norm)(query), norm_of(self.heads.key_norm)(key)
        width = self.width
        turned = apply_rotary_pos_emb(query[..., :width], key[..., :width], self.cos, self.sin)
        query = torch.cat((turned[0], query[..., width:]), dim=-1)
        key = torch.cat((turned[1], key[..., width:]), dim=-1)
        pool = self.pool.clone()
        stored = self.slots >= 0
        pool[0, self.slots[stored]], pool[1, self.slots[stored]] = key[stored], value[stored]
        return torch.cat((query, key, value), dim=1).flatten(1), pool

    def run(self) -> None:
        turn(self.packed, self.cos, self.sin, self.heads, self.pool[0], self.pool[1], self.slots)

    def check(self) -> None:
        rows, pool = self.expected()
        self.run()
        assert_alike(self.packed, rows)
        assert_alike(self.pool, pool)


def with_norms(heads: Heads, dtype: torch.dtype) -> Heads:
    weights = normal(2, heads.size, dtype=dtype, seed=5)
    return replace(heads, query_norm=weights[0], key_norm=weights[1], eps=EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("heads", [Heads(4, 2, 16), Heads(9, 3, 12)], ids=str)
def test_turn_is_the_norm_and_the_rotation_of_transformers(
    dtype: torch.dtype, is_normed: bool, heads: Heads
) -> None:
    Turned(with_norms(heads, dtype) if is_normed else heads, dtype).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_normed", [False, True])
def test_a_narrow_rotation_leaves_the_rest_of_a_head(dtype: torch.dtype, is_normed: bool) -> None:
    heads = Heads(4, 2, 24)
    Turned(with_norms(heads, dtype) if is_normed else heads, dtype, width=16).check()


def test_a_row_without_a_slot_is_turned_and_stored_nowhere() -> None:
    case = Turned(Heads(4, 2, 16), torch.float32)
    case.slots.fill_(-1)
    rows, pool = case.packed.clone(), case.all_slots.clone()
    case.run()
    assert torch.equal(case.all_slots, pool)
    assert not torch.equal(case.packed, rows)


def test_many_rows_are_turned_like_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "_MANY_PROGRAMS", 1)
    Turned(with_norms(Heads(9, 3, 8), torch.float32), torch.float32, rows=8).check()
