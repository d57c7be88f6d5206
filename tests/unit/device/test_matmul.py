"""Products of few rows as kernels, against float64: on the GPU, or in the interpreter where there is none.

Where roundings are told apart the dtype is float16: the interpreter cuts bfloat16 off instead of rounding it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from ddtree.device.kernels.matmul import RowTile, _weight_rows, multiply
from ddtree.device.matmul_candidates import Config
from tests.fakes.device import DEVICE

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE = Config("dot", 32, 32, 1, 4, 3)
SPLIT = Config("dot", 16, 16, 3, 4, 2)
ROW = Config("gemv", 4, 32, 1, 4, 1)


@dataclass(frozen=True)
class Case:
    """Inputs of one product."""

    rows: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    gated: bool

    def run(self, config: Config) -> torch.Tensor:
        return multiply(self.rows, self.weight, config, self.bias, self.residual, gated=self.gated)

    def farthest(self, found: torch.Tensor) -> float:
        """Distance from the exact product, in parts of what roundings and float32 sums may cost."""
        rows, weight = self.rows.double(), self.weight.double()
        exact = functional.linear(rows, weight, None if self.bias is None else self.bias.double())
        epsilon = torch.finfo(found.dtype).eps
        allowed = 1e-5 + 2e-6 * functional.linear(rows.abs(), weight.abs()) + epsilon * exact.abs()
        if self.gated:
            (gate, up), (near_gate, near_up) = exact.chunk(2, dim=-1), allowed.chunk(2, dim=-1)
            exact = functional.silu(gate) * up
            allowed = (
                1.2 * near_gate * (up.abs() + near_up) + gate.abs() * near_up + 2 * epsilon * exact.abs()
            )
        if self.residual is not None:
            exact = exact + self.residual.double()
            allowed = allowed + epsilon * exact.abs()
        assert found.shape == exact.shape
        assert torch.isfinite(found).all()
        return float(((found.double() - exact).abs() / allowed).max())


def make(
    rows: int, outputs: int, size: int, dtype: torch.dtype = torch.float32, seed: int = 0,
    *, bias: bool = False, residual: bool = False, gated: bool = False,
) -> Case:  # fmt: skip
    """Everything is a part of something larger that is full of NaN: a read outside of it shows."""
    generator = torch.Generator().manual_seed(seed)
    weights = outputs * (2 if gated else 1)

    def inside(*shape: int, scale: float = 1.0, margin: int = 0) -> torch.Tensor:
        whole = torch.full((shape[0] + 2, *(side + margin for side in shape[1:])), float("nan"))
        part = whole[1:-1, margin // 2 : margin // 2 + shape[1]] if len(shape) > 1 else whole[1:-1]
        part.copy_(scale * torch.randn(shape, generator=generator))
        moved = whole.to(DEVICE, dtype)
        return moved[1:-1, margin // 2 : margin // 2 + shape[1]] if len(shape) > 1 else moved[1:-1]

    return Case(
        inside(rows, size, margin=6),
        inside(weights, size, scale=size**-0.5),
        inside(weights) if bias else None,
        inside(rows, outputs, margin=4) if residual else None,
        gated,
    )


@st.composite
def configs(draw: st.DrawFn, rows: int) -> Config:
    if rows == 1 and draw(st.booleans()):
        return Config("gemv", draw(st.sampled_from((2, 8))), draw(st.sampled_from((16, 64))), 1, 4, 2)
    block_n, block_k = draw(st.sampled_from((16, 64))), draw(st.sampled_from((16, 32)))
    return Config("dot", block_n, block_k, draw(st.integers(1, 4)), 4, draw(st.integers(1, 3)))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_sizes_that_are_no_multiples_of_anything(data: st.DataObject) -> None:
    rows = data.draw(st.just(1) | st.integers(1, 40))
    outputs, size = data.draw(st.integers(1, 50)), data.draw(st.integers(1, 80))
    has = {name: data.draw(st.booleans()) for name in ("bias", "residual", "gated")}
    case = make(rows, outputs, size, data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(0, 9)), **has)
    assert case.farthest(case.run(data.draw(configs(rows)))) <= 1.0


@pytest.mark.parametrize(
    ("rows", "config"),
    [(64, TILE), (65, TILE), (80, SPLIT), (81, TILE), (129, TILE), (145, SPLIT), (257, TILE)],
)
def test_row_counts_of_full_trees(rows: int, config: Config) -> None:
    """A tree's root takes a narrow tile beside a wide one; still more rows take several."""
    case = make(rows, 36, 48, residual=True)
    assert case.farthest(case.run(config)) <= 1.0


@pytest.mark.parametrize(
    ("rows", "width", "beside"),
    [(1, 16, 0), (16, 16, 0), (17, 32, 0), (64, 64, 0), (65, 64, 16), (80, 64, 16), (81, 128, 0),
     (128, 128, 0), (129, 128, 16), (144, 128, 16), (145, 128, 0), (500, 128, 0)],
)  # fmt: skip
def test_tiles_of_rows(rows: int, width: int, beside: int) -> None:
    assert RowTile.of(rows) == RowTile(width, beside)
    assert RowTile.of(rows).rows == width + beside


@triton.jit  # type: ignore[untyped-decorator]
def _list_rows(found, first, outputs, BLOCK: tl.constexpr, GATED: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    tl.store(found + tl.arange(0, BLOCK), _weight_rows(first, outputs, BLOCK, GATED))


@pytest.mark.parametrize(
    ("gated", "rows"), [(False, [8, 9, 10, 10, 10, 10, 10, 10]), (True, [8, 19, 9, 20, 10, 21, 10, 21])]
)
def test_lanes_past_the_end_read_the_last_row(gated: bool, rows: list[int]) -> None:
    """Nothing of them is stored, so what they read could not be seen, but where."""
    found = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    _list_rows[(1,)](found, 8, 11, BLOCK=8, GATED=gated)
    assert found.tolist() == rows


def test_more_parts_than_blocks() -> None:
    """Parts of K without a block add nothing."""
    case = make(3, 20, 33)
    assert case.farthest(case.run(Config("dot", 16, 32, 7, 4, 2))) <= 1.0


@pytest.mark.parametrize("config", [TILE, SPLIT, ROW])
def test_a_residual_meets_the_rounded_product(config: Config) -> None:
    """1 + 3/8192 rounds to 1, and so does what 3/8192 makes of it; the exact sum would round up."""
    step = 3 / 8192
    rows = torch.tensor([[1.0, step]], dtype=torch.float16, device=DEVICE)
    weight = torch.ones((4, 2), dtype=torch.float16, device=DEVICE)
    residual = torch.full((1, 4), step, dtype=torch.float16, device=DEVICE)
    found = multiply(rows, weight, config, residual=residual)
    assert found.tolist() == [[1.0] * 4]
    assert torch.tensor(1 + 2 * step).to(torch.float16) > 1


@pytest.mark.parametrize("config", [TILE, SPLIT, ROW])
def test_a_gated_product_rounds_as_eager_mode(config: Config) -> None:
    """One row of the unit matrix picks the weights themselves, so that nothing but the gate is rounded."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn((2 * 80, 8), generator=generator).to(DEVICE, torch.float16)
    rows = torch.eye(8, dtype=torch.float16, device=DEVICE)[2:3]
    gate, up = weight[:, 2].chunk(2)
    eager = functional.silu(gate) * up
    assert float((multiply(rows, weight, config, gated=True)[0] == eager).float().mean()) >= 0.99
    unrounded = (functional.silu(gate.float()) * up.float()).to(torch.float16)
    assert float((unrounded == eager).float().mean()) < 0.95


@pytest.mark.parametrize("config", [TILE, SPLIT])
def test_the_same_bits_every_time(config: Config) -> None:
    """And for a row whatever rows come with it, as long as they are cut alike."""
    case = make(9, 40, 60, torch.bfloat16, bias=True)
    first = case.run(config)
    assert all(torch.equal(first, case.run(config)) for _ in range(2))
    alone = multiply(case.rows[4:5], case.weight, config, case.bias)
    assert torch.equal(alone, first[4:5])


def played(run: Callable[[], torch.Tensor], change: Callable[[], object]) -> torch.Tensor:
    """The result after a change of inputs: on a GPU by playing back a graph that was captured before it."""
    if DEVICE.type == "cpu":
        change()
        return run()
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    change()
    graph.replay()
    return found


@pytest.mark.parametrize("config", [TILE, SPLIT, ROW])
def test_a_launch_can_be_played_back(config: Config) -> None:
    case = make(1, 24, 50, bias=True, residual=True)
    found = played(lambda: case.run(config), lambda: case.rows.mul_(-2.0))
    assert case.farthest(found) <= 1.0


def test_without_tensor_cores_there_is_one_row() -> None:
    with pytest.raises(AssertionError, match="one row"):
        make(2, 8, 8).run(ROW)
