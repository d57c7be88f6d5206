"""Tree attention against the obvious answer, in memory that is poisoned wherever nothing may be read.

Everything runs in Triton's interpreter or on a GPU. What a launch is compiled for is listed; lengths, counts
and trees are what Hypothesis draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ddtree.device.kernels.attention import Scoring, store, tree_attention
from ddtree.device.kernels.attention_tiling import AttentionShape, Tiling, tiling_for
from ddtree.device.rows import DeviceRows, Sight
from tests.fakes.attention_cases import NAN, WILD, Case, Form, expected, make_case, moved_to
from tests.fakes.device import DEVICE

# Half of the digits of the weights and of the values; bfloat16's product the interpreter does not know.
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
HALVES = [torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
SMALL = Tiling(rows=16, keys=16, splits=1)
FORMS = {
    "tree": (Form(), SMALL),
    "tree, three splits": (Form(groups=3, kv_heads=1), replace(SMALL, splits=3)),
    "windowed tree": (Form(scoring=Scoring(0.2, window=5), page_size=64), replace(SMALL, splits=2)),
    "capped": (Form(scoring=Scoring(0.5, softcap=2.0), head_dim=24, page_size=7, merged=False), SMALL),
    "sinks": (Form(sinks=True, groups=4, kv_heads=1), SMALL),
    "sinks, four splits": (Form(sinks=True, page_size=1), replace(SMALL, splits=4)),
    "block": (Form(sight=Sight.BLOCK, rows=20, groups=1), replace(SMALL, splits=2)),
    "windowed block": (Form(sight=Sight.BLOCK, rows=9, kv_heads=1, scoring=Scoring(0.3, window=4)), SMALL),
    "chain": (Form(sight=Sight.CAUSAL, rows=17, groups=1, head_dim=80), replace(SMALL, keys=32)),
    "many heads share one": (Form(rows=3, groups=16, kv_heads=1), SMALL),
    "all at once": (
        Form(rows=9, groups=4, kv_heads=1, scoring=Scoring(0.3, 19, 3.0), sinks=True, head_dim=8),
        Tiling(rows=32, keys=32, splits=3),
    ),
}


def attend(case: Case, tiling: Tiling | None = None) -> torch.Tensor:
    form, (keys, values) = case.form, case.pool
    return tree_attention(
        case.query, case.keys, case.values, keys, values, case.rows, form.sight, form.scoring,
        sinks=case.sinks, tiling=tiling,
    )  # fmt: skip


def check(case: Case, found: torch.Tensor) -> None:
    assert found.shape == case.query.shape
    assert found.dtype == case.form.dtype
    assert found.is_contiguous()
    wanted = expected(case)
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=0, atol=CLOSE[case.form.dtype])
    for place, count in enumerate(case.rows.counts.tolist()):
        assert not found[place, count:].any(), "padding rows are zeros"


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=3, deadline=None, phases=[Phase.reuse, Phase.generate])  # shrinking takes minutes
@given(data=st.data())
def test_every_form(name: str, data: st.DataObject) -> None:
    form, tiling = FORMS[name]
    page, keys = form.page_size, tiling.keys
    edges = {0, 1, page - 1, page, page + 1, keys - 1, keys, keys + 1, 2 * keys + 3, 4 * keys}
    sequence = st.tuples(
        st.sampled_from(sorted(edges)) | st.integers(0, 70),
        st.sampled_from([0, 1, form.rows - 1, form.rows]) | st.integers(0, form.rows),
    )
    lengths, counts = zip(*data.draw(st.lists(sequence, min_size=1, max_size=2)), strict=True)
    case = make_case(form, lengths, counts, data.draw(st.integers(0, 99)))
    check(case, attend(case, tiling))


@pytest.mark.parametrize(("rows", "keys"), [(1, 64), (64, 64), (65, 32), (65, 128), (129, 64), (129, 128)])
def test_trees_of_several_words(rows: int, keys: int) -> None:
    """Bit 63 is a word's sign, row 64 begins the second word, and a block of 128 keys has two words."""
    form = Form(rows=rows, groups=2, kv_heads=1)
    case = make_case(form, [37, 130], [rows, max(1, rows - 1)], seed=rows)
    check(case, attend(case, Tiling(rows=128, keys=keys, splits=1)))


@pytest.mark.parametrize("splits", [1, 2, 5, 13])
def test_any_number_of_splits(splits: int) -> None:
    """More than there are blocks, too, and with an empty place and one without a prefix."""
    case = make_case(Form(rows=17, groups=1, kv_heads=1), [85, 0, 40], [17, 3, 0], seed=4)
    check(case, attend(case, replace(SMALL, splits=splits)))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", [16, 96, 256])
def test_half_precision_as_it_is_tiled_by_default(dtype: torch.dtype, head_dim: int) -> None:
    form = Form(dtype=dtype, groups=4, kv_heads=1, head_dim=head_dim, rows=6, scoring=Scoring(head_dim**-0.5))
    case = make_case(replace(form, page_size=64), [70, 3], [6, 2])
    check(case, attend(case))


def test_a_window_skips_the_blocks_before_it() -> None:
    """They hold NaN: were they read, 0 x NaN would be seen."""
    form = Form(rows=3, scoring=Scoring(0.3, window=10))
    case = make_case(form, [77], [3], seed=1)
    wanted = expected(case)
    case.pool[:, case.slots[0][:64]] = NAN
    found = attend(case, SMALL)
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sight", Sight)
def test_a_window_ends_among_the_own_rows(sight: Sight) -> None:
    """Deep rows see nothing of the prefix, and the first of their own sequence's rows no more either."""
    form = Form(rows=40, groups=1, kv_heads=1, sight=sight, scoring=Scoring(0.3, window=5))
    case = make_case(form, [3, 20], [40, 37])
    check(case, attend(case, SMALL))


def test_equal_steps_give_equal_bits() -> None:
    case = make_case(Form(rows=6, kv_heads=1), [90, 31], [6, 2])
    for splits in (1, 5):
        first = attend(case, replace(SMALL, splits=splits))
        assert torch.equal(attend(case, replace(SMALL, splits=splits)), first)


def captured(call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The call as a graph plays it back; in the interpreter, the call itself."""
    if DEVICE.type != "cuda":
        return call
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()

    def replay() -> torch.Tensor:
        graph.replay()
        return output

    return replay


def test_a_captured_launch_follows_lengths_and_trees() -> None:
    """The same launch for other lengths and trees in the same memory, up to the end of the page table."""
    form = Form(rows=6, sinks=True, pages=5)
    case = make_case(form, [66, 5], [6, 1], seed=1)
    play = captured(lambda: attend(case, replace(SMALL, splits=3)))
    check(case, play())
    check(moved_to(case, make_case(form, [7, 64], [2, 6], seed=2)), play())
    check(moved_to(case, make_case(form, [79, 0], [1, 0], seed=3)), play())


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_rows_are_stored_where_their_slots_say(merged: bool, dtype: torch.dtype) -> None:
    case = make_case(Form(rows=4, kv_heads=3, head_dim=24, merged=merged, dtype=dtype), [20, 3], [4, 4])
    slots = torch.tensor([[9, -1, 0, 33], [-1, -1, 2, 7]])
    before = case.pool.clone()
    store(case.keys, case.values, case.pool[0], case.pool[1], slots.to(DEVICE))
    for place, row in ((0, 0), (0, 2), (0, 3), (1, 2), (1, 3)):
        before[0, slots[place, row]] = case.keys[place, row]
        before[1, slots[place, row]] = case.values[place, row]
    assert torch.equal(case.pool.nan_to_num(7), before.nan_to_num(7))


def test_rows_without_a_slot_touch_nothing() -> None:
    case = make_case(Form(rows=4), [20], [2])
    before = case.pool.clone()
    store(case.keys, case.values, case.pool[0], case.pool[1], case.rows.slots)
    assert torch.equal(case.pool.nan_to_num(7), before.nan_to_num(7))


def test_a_stored_chain_is_read_again_as_prefix() -> None:
    """What the later rows of a step see beside themselves, the next step's rows see committed."""
    form = Form(rows=8, sight=Sight.CAUSAL, page_size=4)
    case = make_case(form, [6], [8])
    whole = attend(case, SMALL)
    keys, values = torch.full((2, 16, form.kv_heads, form.head_dim), NAN, device=DEVICE)
    first_pages = [8, 9, 10, 11, 4, 5]
    keys[first_pages], values[first_pages] = case.pool[0, case.slots[0]], case.pool[1, case.slots[0]]
    slots = torch.tensor([[6, 7, 0, 1, 2, -1, -1, -1]], device=DEVICE)
    store(case.keys, case.values, keys, values, slots)
    later = DeviceRows.empty(1, 3, 4, form.page_size, DEVICE)
    later.page_table.copy_(torch.tensor([[2, 1, 0, WILD]]))
    later.lengths.fill_(11)
    later.counts.fill_(3)
    later.depths.copy_(torch.arange(3)[None])
    found = tree_attention(
        case.query[:, 5:], case.keys[:, 5:], case.values[:, 5:], keys, values, later, form.sight,
        form.scoring, tiling=SMALL,
    )  # fmt: skip
    torch.testing.assert_close(found, whole[:, 5:], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64), (32, 32, 80), (8, 4, 256)]
)
@pytest.mark.parametrize("rows", [1, 9, 17, 65, 129, 257])
def test_a_launch_fills_the_card_and_fits_it(heads: int, kv_heads: int, head_dim: int, rows: int) -> None:
    for places in (1, 2, 8, 32):
        for item_bytes in (2, 4):
            shape = AttentionShape(places, rows, heads, kv_heads, head_dim, 16384, item_bytes)
            cut = tiling_for(shape)
            work = places * kv_heads * -(-shape.folded // cut.rows)
            at_a_time = 132 if cut.warps == 8 else 264  # registers are for one of eight warps, or two of four
            assert 1 <= cut.splits <= 64
            waves = -(-work * cut.splits // at_a_time) / cut.splits
            assert waves <= 1.4 * work / at_a_time or cut.splits == 64 or work * (cut.splits + 1) > at_a_time
            width = 1 << (head_dim - 1).bit_length()
            assert (cut.rows + 2 * cut.stages * cut.keys) * width * item_bytes <= 227 * 1024
            assert cut.stages > 1


@pytest.mark.parametrize(
    ("rows", "places", "splits"), [(65, 1, 6), (17, 1, 16), (257, 1, 9), (128, 1, 4), (1, 1, 33), (65, 32, 1)]
)
def test_splits_fill_whole_waves(rows: int, places: int, splits: int) -> None:
    """Of Qwen3-8B on 264 programs at a time, behind a long context."""
    assert tiling_for(AttentionShape(places, rows, 32, 8, 128, 16640, 2)).splits == splits


def test_a_wish_for_a_tiling_is_kept() -> None:
    shape = AttentionShape(1, 17, 32, 8, 128, 1088, 2)
    wish = Tiling(32, 128, 5, warps=2, stages=4, join_warps=1)
    assert tiling_for(shape, wish) == wish
    assert tiling_for(shape, Tiling(splits=3)).splits == 3
