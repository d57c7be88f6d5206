"""What the kernels of a round compute, in PyTorch on the host: slow words, but a round in milliseconds.

The interpreter takes seconds for a round, so what strings kernels together is tested over these; that the
kernels compute the same is tested kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ddtree.accept import walk as host_walk
from ddtree.device import attend, keeping, round_parts, steps
from ddtree.device.kernels.attention import Scoring
from ddtree.device.rows import DeviceRows, Sight
from ddtree.device.trees import DeviceAcceptance, DeviceTrees
from ddtree.tree import build_trees
from ddtree.tree_mask import ancestor_bits, expand
from ddtree.types import TreeBatch, TreeRequest


def slot_of(rows: DeviceRows, place: int, position: int) -> int:
    page = int(rows.page_table[place, position // rows.page_size])
    return page * rows.page_size + position % rows.page_size


def tree_attention(
    query: torch.Tensor,
    tail_keys: torch.Tensor,
    tail_values: torch.Tensor,
    pool_keys: torch.Tensor,
    pool_values: torch.Tensor,
    rows: DeviceRows,
    sight: Sight,
    scoring: Scoring,
    *,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Trees without windows, caps and sinks."""
    assert sight is Sight.TREE
    assert (scoring.window, scoring.softcap, sinks) == (None, None, None)
    output = torch.zeros_like(query)
    sees = expand(rows.bits)
    for place, (length, count) in enumerate(zip(rows.lengths.tolist(), rows.counts.tolist(), strict=True)):
        if not count:
            continue
        slots = torch.tensor([slot_of(rows, place, at) for at in range(length)], dtype=torch.int64)
        keys = torch.cat((pool_keys[slots], tail_keys[place, :count]))
        values = torch.cat((pool_values[slots], tail_values[place, :count]))
        groups = query.shape[2] // keys.shape[1]
        keys, values = (part.repeat_interleave(groups, 1).transpose(0, 1) for part in (keys, values))
        scores = query[place, :count].transpose(0, 1) @ keys.transpose(1, 2) * scoring.scaling
        seen = torch.nn.functional.pad(sees[place, :count, :count], (length, 0), value=True)
        shares = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        output[place, :count] = (shares @ values).transpose(0, 1)
    return output


def store(
    keys: torch.Tensor,
    values: torch.Tensor,
    pool_keys: torch.Tensor,
    pool_values: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    is_kept = slots >= 0
    pool_keys[slots[is_kept]] = keys[is_kept]
    pool_values[slots[is_kept]] = values[is_kept]


def build(
    top_ids: torch.Tensor,
    top_log_probs: torch.Tensor,
    budgets: torch.Tensor,
    depths: torch.Tensor,
    is_chain: torch.Tensor,
    nodes: int,
    edge_log_probs: torch.Tensor | None = None,
    *,
    into: DeviceTrees,
) -> DeviceTrees:
    assert edge_log_probs is None
    assert into.nodes == nodes
    trees = into
    log_probs = top_log_probs.clone()
    for place, depth in enumerate(depths.tolist()):
        log_probs[place, depth:] = -torch.inf
    built = build_trees(TreeRequest(top_ids, log_probs, budgets, is_chain.bool(), torch.zeros(0)))
    width = built.tokens.shape[1]
    for name in ("tokens", "parents", "depths"):
        getattr(trees, name).zero_()[:, :width] = getattr(built, name)
    trees.counts.copy_(built.counts)
    trees.log_probs.fill_(-torch.inf)
    for place, count in enumerate(built.counts.tolist()):
        paths = [0.0]
        for node in range(count):
            depth, token = int(built.depths[place, node]) - 1, built.tokens[place, node]
            rank = int((top_ids[place, depth] == token).nonzero()[0])
            paths.append(paths[int(built.parents[place, node])] + float(log_probs[place, depth, rank]))
        trees.log_probs[place, :count] = torch.tensor(paths[1:])
    return trees


def lay_out(
    trees: DeviceTrees, roots: torch.Tensor, active: torch.Tensor, rows: DeviceRows, token_ids: torch.Tensor
) -> None:
    counts = torch.where(active, trees.counts + 1, 0)
    rows.counts.copy_(counts)
    rows.bits.copy_(ancestor_bits(trees.parents, (counts - 1).clamp(min=0)))
    for place, count in enumerate(counts.tolist()):
        token_ids[place] = rows.depths[place] = 0
        rows.slots[place] = -1
        if count:
            token_ids[place, 0] = roots[place]
            token_ids[place, 1:count] = trees.tokens[place, : count - 1]
            rows.depths[place, 1:count] = trees.depths[place, : count - 1]
            start = int(rows.lengths[place])
            rows.slots[place, :count] = torch.tensor(
                [slot_of(rows, place, start + at) for at in range(count)]
            )


def walk(
    trees: DeviceTrees, target_tokens: torch.Tensor, depth: int, *, into: DeviceAcceptance
) -> DeviceAcceptance:
    batch = TreeBatch(trees.tokens, trees.parents, trees.depths, trees.counts)
    found = host_walk(batch, target_tokens, max_depth=depth)
    accepted = into
    accepted.accepted_counts.copy_(found.accepted_counts)
    accepted.bonus_tokens.copy_(found.bonus_tokens)
    accepted.path_rows.copy_(found.path_nodes)
    steps_ = torch.arange(depth)
    tokens = torch.where(steps_ < found.accepted_counts[:, None], found.accepted_tokens, 0)
    accepted.accepted_tokens.copy_(tokens)
    return accepted


def commit_rows(pool_keys_values: torch.Tensor, rows: DeviceRows, acceptance: DeviceAcceptance) -> None:
    for place, count in enumerate(rows.counts.tolist()):
        if count:
            length = int(acceptance.accepted_counts[place]) + 1
            source = rows.slots[place][acceptance.path_rows[place, :length].long()]
            moved = pool_keys_values.index_select(2, source)
            pool_keys_values.index_copy_(2, rows.slots[place, :length], moved)


def gather_rows(values: torch.Tensor, acceptance: DeviceAcceptance) -> torch.Tensor:
    places, width = acceptance.path_rows.shape
    by_place = values.unflatten(0, (places, -1))
    gathered = torch.stack([by_place[place, acceptance.path_rows[place].long()] for place in range(places)])
    is_path = torch.arange(width) <= acceptance.accepted_counts[:, None]
    return gathered.masked_fill(~is_path[..., None], 0)


def keep_rows(
    values: torch.Tensor, pool: torch.Tensor, rows: DeviceRows, acceptance: DeviceAcceptance
) -> None:
    for place, count in enumerate(rows.counts.tolist()):
        length = int(acceptance.accepted_counts[place]) + 1 if count else 0
        pool[rows.slots[place, :length]] = values[place, :length]


@contextmanager
def in_place_of_kernels() -> Iterator[None]:
    """Let rounds run over these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend, "attend_to_tree", tree_attention)
        patch.setattr(attend, "store", store)
        patch.setattr(steps, "lay_out", lay_out)
        patch.setattr(round_parts, "build", build)
        for function in (walk, commit_rows, gather_rows, keep_rows):
            patch.setattr(keeping, function.__name__, function)
        yield
