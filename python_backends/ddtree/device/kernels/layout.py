"""Lays trees out as the rows of a verify step: who sees whom, where a row is staged, which token it holds.

Row t of a place is node t of its tree, the root first. A row walks up to the root and notes whom it meets,
which takes as many steps as the deepest row is deep: no mask is built for pairs of rows. Staging slots go by
row, not by depth: siblings need slots of their own. This module knows neither drafters nor the target.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree.device.rows import DeviceRows
from ddtree.device.trees import DeviceTrees

_BLOCK = 64  # rows of a program
_WORD = tl.constexpr(64)


@triton.jit(do_not_specialize=["nodes", "pages", "page_size", "words"])
def _layout_kernel(
    tokens, parents, node_depths, node_counts, roots, active, page_table, lengths,
    counts, depths, bits, slots, token_ids,
    nodes, pages, page_size, words,
    BLOCK: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    sequence, block = tl.program_id(0), tl.program_id(1)
    own = sequence.to(tl.int64)
    rows = nodes + 1
    count = tl.where(tl.load(active + sequence) != 0, tl.load(node_counts + sequence) + 1, 0)
    if block == 0:
        tl.store(counts + sequence, count)
    row = block * BLOCK + tl.arange(0, BLOCK)
    is_inside = row < rows
    is_row = row < count
    is_node = is_row & (row > 0)
    node = own * nodes + row - 1
    out = own * rows + row

    depth = tl.load(node_depths + node, mask=is_node, other=0)
    tl.store(depths + out, depth, mask=is_inside)
    token = tl.load(tokens + node, mask=is_node, other=0).to(tl.int64)
    root = tl.load(roots + sequence)
    tl.store(token_ids + out, tl.where(is_row & (row == 0), root, token), mask=is_inside)

    position = tl.load(lengths + sequence) + row
    column = position // page_size
    has_slot = is_row & (column < pages)
    page = tl.load(page_table + own * pages + column, mask=has_slot, other=0).to(tl.int64)
    slot = tl.where(has_slot, page * page_size + position % page_size, -1)
    tl.store(slots + out, slot, mask=is_inside)

    word = tl.arange(0, WORDS)
    one = tl.full((BLOCK, WORDS), 1, tl.int64)
    sees = tl.zeros((BLOCK, WORDS), tl.int64)
    met = row
    for _ in range(tl.max(depth, axis=0) + 1):
        bit = one << (met % _WORD).to(tl.int64)[:, None]
        sees |= tl.where((met // _WORD)[:, None] == word[None, :], bit, 0)
        met = tl.load(parents + own * nodes + met - 1, mask=is_node & (met > 0), other=0)
    root_bit = tl.where(word[None, :] == 0, one, 0)  # padding walks nowhere and sees the root all the same
    at = out[:, None] * words + word[None, :]
    tl.store(bits + at, sees | root_bit, mask=is_inside[:, None] & (word < words)[None, :])


def lay_out(
    trees: DeviceTrees,
    roots: torch.Tensor,  # [S] int64
    active: torch.Tensor,  # [S] bool
    rows: DeviceRows,
    token_ids: torch.Tensor,  # [S, T] int64, written
) -> None:
    """Fill `counts`, `depths`, `bits` and `slots` of the rows, and their tokens, in place and in one launch.

    `rows.page_table` and `rows.lengths` are read. A place that is not active gets no rows, whatever its tree
    holds. Padding rows have token 0, depth 0, no slot, and see themselves and the root; a row that the page
    table has no page for has no slot either.
    """
    places, nodes = trees.tokens.shape
    assert rows.rows == nodes + 1, f"{nodes} nodes and the root need {nodes + 1} rows, not {rows.rows}"
    assert token_ids.shape == rows.depths.shape, f"a token per row, not {list(token_ids.shape)}"
    words = rows.bits.shape[2]
    _layout_kernel[(places, triton.cdiv(nodes + 1, _BLOCK))](
        trees.tokens, trees.parents, trees.depths, trees.counts, roots, active.view(torch.uint8),
        rows.page_table, rows.lengths, rows.counts, rows.depths, rows.bits, rows.slots, token_ids,
        nodes, rows.page_table.shape[1], rows.page_size, words,
        BLOCK=_BLOCK, WORDS=triton.next_power_of_2(words), num_warps=2,
    )  # fmt: skip
