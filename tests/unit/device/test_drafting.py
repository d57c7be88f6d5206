"""The drafter's pass over device rows against the drafter stage, itself tested against the public package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddtree.device.kernels.top import TopKernels
from tests.fakes.device import DEVICE
from tests.fakes.device_draft import (
    BLOCK,
    HIDDEN,
    PAGE,
    VOCABULARY,
    WIDTH,
    Pair,
    small,
    small_dflash2,
    small_speculators,
)
from tests.fakes.random_draft import DFLASH2

SMALL_TOP = TopKernels(groups=8, group=2)
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}

V1 = [
    pytest.param({"is_causal": True}, id="full, causal"),
    pytest.param({**WINDOWED, "sliding_window": 6}, id="sliding layers causal unless told otherwise"),
    pytest.param({**WINDOWED, "sliding_window": 6, "is_causal": False}, id="wider than the block, both ways"),
    pytest.param({**WINDOWED, "sliding_window": 3, "is_causal": False}, id="narrower, both ways"),
    pytest.param({**WINDOWED, "sliding_window": 3, "is_causal": True}, id="narrower, causal"),
    pytest.param({"attention_bias": True, "num_hidden_layers": 1, "layer_types": None}, id="biases"),
    pytest.param(
        {
            "dflash_config": {
                "mask_token_id": 49, "target_layer_ids": [1, 3, 5], "output_multiplier": 0.5,
                "final_logit_softcapping": 2.0, "input_embedding_scale": 3.0,
            },
            "num_hidden_layers": 1, "layer_types": None,
        },
        id="scaled and capped",
    ),
    pytest.param(
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 700.0, "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            "num_hidden_layers": 1, "layer_types": None,
        },
        id="yarn",
    ),
]  # fmt: skip


@pytest.mark.parametrize("changes", V1)
def test_candidates_are_the_drafter_stages(tmp_path: Path, changes: dict[str, Any]) -> None:
    Pair(small(tmp_path, **changes), [True]).round([7], [3])


def test_sequences_of_all_lengths_and_an_empty_place(tmp_path: Path) -> None:
    """Contexts of nothing, up to a page's edge, and behind one; an empty place's root is not looked at."""
    pair = Pair(small(tmp_path, num_hidden_layers=1, layer_types=None), [True, False, True])
    pair.round([PAGE, 0, 0], [3, 1 << 40, 4], at_most=4)
    pair.round([0, 0, 1], [7, -5, 40], at_most=1)
    pair.round([2, 0, 3], [7, -5, 40], at_most=3)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"is_causal": None}, id="sliding layers causal"),
        pytest.param({"dflash_config": {"conv_kernel_size": 3, "conv_group_size": 32}}, id="one group"),
        pytest.param({"dflash_config": {"conv_kernel_size": 1, "conv_group_size": 1}}, id="no row before"),
    ],
)  # fmt: skip
def test_candidates_of_dflash2(tmp_path: Path, changes: dict[str, Any]) -> None:
    one_layer = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    Pair(small_dflash2(tmp_path, **changes, **one_layer), [True]).round([3], [5])


def test_edges_beside_an_empty_place(tmp_path: Path) -> None:
    found = Pair(small_dflash2(tmp_path), [False, True]).round([0, 6], [1 << 40, 6])
    top_k = DFLASH2["selector_top_k"]
    assert found.edge_log_probs is not None
    assert found.edge_log_probs.shape == (2, BLOCK - 1, top_k, top_k)


def test_a_draft_with_a_vocabulary_of_its_own(tmp_path: Path) -> None:
    pair = Pair(small_speculators(tmp_path), [True])
    found = pair.round([5], [3])
    assert pair.target_ids is not None
    assert set(found.ids.flatten().tolist()) <= set(pair.target_ids.tolist())


def test_half_floats(tmp_path: Path) -> None:
    folder = small(tmp_path, **WINDOWED, sliding_window=5, is_causal=False)
    Pair(folder, [True], HALF).round([6], [3])


class Product(nn.Module):
    """A product that gates by itself, and counts how often it is asked."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool = False) -> None:
        super().__init__()
        self.weight, self.bias, self.gated, self.calls = weight, bias, gated, 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        output = nn.functional.linear(rows, self.weight, self.bias)
        if not self.gated:
            return output
        gate, up = output.chunk(2, -1)
        return nn.functional.silu(gate) * up


def test_with_products_of_a_maker(tmp_path: Path) -> None:
    """A stage's pass over device rows is made with its products, once for all who ask for it."""
    folder = small(tmp_path, attention_bias=True, num_hidden_layers=1, layer_types=None)
    made: list[Product] = []

    def make(weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool = False) -> Product:
        made.append(Product(weight, bias, gated=gated))
        return made[-1]

    pair = Pair(folder, [True], linear=make)
    pair.round([2], [3])
    assert [product.calls for product in made] == [1] * 5  # qkv, output, gate and up, down, context
    made.clear()
    plain = pair.drafter.on_device()
    pair.drafter.choose_products(make)
    assert pair.drafter.on_device() is pair.drafter.on_device() is not plain
    assert len(made) == 6, "and the head"


def test_with_the_kernels_that_pick_candidates(tmp_path: Path) -> None:
    pair = Pair(small(tmp_path, num_hidden_layers=1, layer_types=None), [True], top=SMALL_TOP.top)
    pair.round([2], [3])


def test_context_kept_bit_by_bit_where_it_belongs(tmp_path: Path) -> None:
    """Slots behind the new context, and those of empty places and of other sequences, stay untouched."""
    pair = Pair(small(tmp_path), [True, False, True])
    pair.extend([6, 0, 5], 7)
    before = pair.pool.keys_values.clone()
    pair.extend([3, 0, 0], 4)
    is_new = (before.isnan() & ~pair.pool.keys_values.isnan()).all(-1).all(-1)
    table, offsets = pair.rows.page_table[0].long(), torch.arange(PAGE, device=DEVICE)
    slots = (table[:, None] * PAGE + offsets).flatten()
    expected = torch.zeros_like(is_new)
    expected[:, :, slots[6:9]] = True
    assert torch.equal(is_new, expected)
    was_there = ~before.isnan()
    assert torch.equal(before[was_there], pair.pool.keys_values[was_there])


def test_context_in_parts_is_context_at_once(tmp_path: Path) -> None:
    features = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    kept = []
    for parts in ((5,), (3, 2)):
        pair, start = Pair(small(tmp_path), [True, True]), 0
        for part in parts:
            counts = torch.full((2,), part, dtype=torch.int32, device=DEVICE)
            pair.draft.extend(features[:, start : start + part], counts, pair.rows)
            pair.rows.lengths.add_(counts)
            start += part
        kept.append(pair.pool.keys_values.nan_to_num(0))
    torch.testing.assert_close(kept[0], kept[1], rtol=0, atol=1e-5)


def test_the_width_is_what_there_is_and_what_a_selector_takes(tmp_path: Path) -> None:
    assert Pair(small(tmp_path / "a"), [True]).draft.width(64) == VOCABULARY
    assert Pair(small_speculators(tmp_path / "b"), [True]).draft.width(64) == 20
    assert Pair(small_dflash2(tmp_path / "c"), [True]).draft.width(64) == DFLASH2["selector_top_k"]


class NoLooks(TorchDispatchMode):
    """Fails when a value comes to the host or decides a shape."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "equal"), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("write", [small, small_dflash2, small_speculators])
def test_nothing_looks_at_values(tmp_path: Path, write: Callable[..., Path]) -> None:
    """Neither on a CPU, nor while it is captured; what is captured gives the same."""
    pair = Pair(write(tmp_path), [True])
    features, counts = torch.randn(1, 2, HIDDEN).to(DEVICE), torch.tensor([2]).int().to(DEVICE)
    roots = torch.tensor([1], device=DEVICE)
    with NoLooks():
        pair.draft.extend(features, counts, pair.rows)
        pair.rows.lengths.add_(counts)
        plain = pair.draft.draft(roots, pair.rows, WIDTH)
    if DEVICE.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = pair.draft.draft(roots, pair.rows, WIDTH)
        graph.replay()
        assert torch.equal(captured.ids, plain.ids)
        assert torch.equal(captured.log_probs, plain.log_probs)
