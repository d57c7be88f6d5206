"""Steps for tree attention, poisoned wherever nothing may be read, and the obvious float64 answer to them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ddtree.device.kernels.attention import Scoring
from ddtree.device.rows import DeviceRows, Sight
from ddtree.tree_mask import ancestor_bits
from tests.fakes.device import DEVICE
from tests.fakes.random_trees import depths_of, random_parents, sees_of

NAN = float("nan")
PLAIN = Scoring(0.3)
WILD = 2**30  # a page far outside of any pool: whoever looks there crashes


@dataclass(frozen=True)
class Form:
    """All that a launch is compiled for."""

    rows: int = 5
    groups: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 16
    sight: Sight = Sight.TREE
    scoring: Scoring = PLAIN
    sinks: bool = False
    merged: bool = True  # query, keys and values are columns of one projection
    dtype: torch.dtype = torch.float32
    pages: int = 0  # columns of the page table; 0: one more than are needed

    @property
    def heads(self) -> int:
        return self.groups * self.kv_heads


@dataclass(frozen=True)
class Case:
    """One step, and per place what the oracle needs to know of it."""

    form: Form
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    pool: torch.Tensor  # [2, slots, kv_heads, head_dim]
    rows: DeviceRows
    sinks: torch.Tensor | None
    parents: tuple[list[int], ...]  # of each place's tree; its count is one more, except in empty places
    slots: tuple[list[int], ...]  # pool slot of each committed position

    @property
    def places(self) -> int:
        return len(self.slots)


def make_case(form: Form, lengths: Sequence[int], counts: Sequence[int], seed: int = 0) -> Case:
    """Random numbers where something is committed or staged, NaN and wild pages everywhere else."""
    source, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    places, page_size = len(lengths), form.page_size
    needed = [-(-length // page_size) for length in lengths]
    columns = form.pages or max(needed) + 1
    pages = list(range(places * columns))
    source.shuffle(pages)
    rows = DeviceRows.empty(places, form.rows, columns, page_size, DEVICE)
    rows.page_table.fill_(WILD)
    stale = [length if count else WILD for length, count in zip(lengths, counts, strict=True)]
    rows.lengths.copy_(torch.tensor(stale))
    rows.counts.copy_(torch.tensor(counts))
    pool = torch.full((2, len(pages) * page_size, form.kv_heads, form.head_dim), NAN)
    all_slots, all_parents = [], []
    for place, length in enumerate(lengths):
        own = [pages.pop() for _ in range(needed[place])]
        rows.page_table[place, : len(own)] = torch.tensor(own, dtype=torch.int32)
        slots = [own[at // page_size] * page_size + at % page_size for at in range(length)]
        pool[:, slots] = torch.randn((2, length, *pool.shape[2:]), generator=generator)
        parents = random_parents(source, max(0, counts[place] - 1), reach=source.choice([None, 2]))
        all_slots.append(slots)
        all_parents.append(parents)
        _write_tree(rows, place, parents, counts[place], form.sight, source)
    merged = torch.randn(
        (places, form.rows, form.heads + 2 * form.kv_heads, form.head_dim), generator=generator
    )
    for place, count in enumerate(counts):
        merged[place, count:] = NAN
    # The rows of another projection stand beside ours, as they do in a merged one.
    wide = torch.full((*merged.shape[:2], merged.shape[2] + 1, form.head_dim), NAN).to(DEVICE, form.dtype)
    wide[:, :, :-1] = merged.to(DEVICE, form.dtype)
    query, keys, values, _ = wide.split([form.heads, form.kv_heads, form.kv_heads, 1], dim=2)
    if not form.merged:
        # Rows of values lie apart by head, so that no stride is another's.
        query, keys = query.contiguous(), keys.contiguous()
        values = values.transpose(1, 2).contiguous().transpose(1, 2)
    sinks = torch.randn(form.heads, generator=generator).to(DEVICE, form.dtype) if form.sinks else None
    pool = pool.to(DEVICE, form.dtype)
    return Case(form, query, keys, values, pool, rows, sinks, tuple(all_parents), tuple(all_slots))


def _write_tree(
    rows: DeviceRows, place: int, parents: list[int], count: int, sight: Sight, source: random.Random
) -> None:
    words = rows.bits.shape[2]
    garbage = torch.tensor([[source.getrandbits(63) for _ in range(words)] for _ in range(rows.rows)])
    rows.bits[place] = garbage.to(DEVICE)
    rows.depths[place] = 12345
    if not count:
        return
    padding = torch.zeros(1, rows.rows - 1, dtype=torch.int64)
    padding[0, : len(parents)] = torch.tensor(parents, dtype=torch.int64)
    exact = ancestor_bits(padding, torch.tensor([len(parents)]))[0, :count]
    for word in range(words):
        # Bits of rows that are not there may be set: nothing may come of them.
        own = max(0, min(64, count - 64 * word))
        beyond = 0 if own == 64 else -(1 << own)
        rows.bits[place, :count, word] = (exact[:, word] | (garbage[:count, word] & beyond)).to(DEVICE)
    # Two positions a row in a chain: a window counts positions, not rows.
    depths = depths_of(parents) if sight == Sight.TREE else list(range(0, 2 * count, 2))
    rows.depths[place, :count] = torch.tensor(depths, dtype=torch.int32).to(DEVICE)


def moved_to(case: Case, other: Case) -> Case:
    """Another step of the same form in this one's memory, as a captured graph finds it."""
    for name in ("query", "keys", "values", "pool"):
        getattr(case, name).copy_(getattr(other, name))
    for name in ("page_table", "lengths", "counts", "depths", "bits"):
        getattr(case.rows, name).copy_(getattr(other.rows, name))
    if case.sinks is not None and other.sinks is not None:
        case.sinks.copy_(other.sinks)
    return replace(
        other, query=case.query, keys=case.keys, values=case.values, pool=case.pool, rows=case.rows
    )


def expected(case: Case) -> torch.Tensor:
    """What attention is: the softmax over all keys that a row sees. Float64; zeros for padding rows."""
    outputs = torch.zeros(case.query.shape, dtype=torch.float64)
    for place in range(case.places):
        count = int(case.rows.counts[place])
        if count:
            outputs[place, :count] = _one_place(case, place, count)
    return outputs


def _one_place(case: Case, place: int, count: int) -> torch.Tensor:
    form, scoring, slots = case.form, case.form.scoring, case.slots[place]
    is_tree = form.sight == Sight.TREE
    depths = case.rows.depths[place, :count].cpu()
    own = torch.ones(count, count, dtype=torch.bool)
    if form.sight == Sight.CAUSAL:
        own = own.tril()
    sees = torch.cat(
        (torch.ones(count, len(slots), dtype=torch.bool), sees_of(case.parents[place]) if is_tree else own),
        dim=1,
    )
    if scoring.window is not None:
        keys_at = torch.cat((torch.arange(len(slots)), len(slots) + depths))
        sees &= (len(slots) + depths[:, None] - keys_at).abs() < scoring.window
    keys = torch.cat((case.pool[0, slots], case.keys[place, :count])).cpu().double()
    values = torch.cat((case.pool[1, slots], case.values[place, :count])).cpu().double()
    keys, values = (tensor.repeat_interleave(form.groups, dim=1) for tensor in (keys, values))
    scores = torch.einsum("thd,khd->htk", case.query[place, :count].cpu().double(), keys) * scoring.scaling
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(~sees, float("-inf"))
    if case.sinks is not None:
        sink = case.sinks.cpu().double()[:, None, None].expand(-1, count, 1)
        scores, values = torch.cat((scores, sink), dim=2), torch.cat((values, torch.zeros_like(values[:1])))
    return torch.einsum("htk,khd->thd", scores.softmax(dim=2), values)
