"""Whole steps of tiny targets on the device: several places, random trees, and the obvious answer to each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, MistralConfig, PretrainedConfig

from ddtree.attention.plan import Segment, StepPlan
from ddtree.device.fused_layers import FusedLayer
from ddtree.device.plan import DevicePlan
from ddtree.device.rows import DeviceRows
from ddtree.kv_cache import KvPool, Pages
from ddtree.models.target import TargetModel
from ddtree.tree_mask import ancestor_bits
from tests.fakes.device import DEVICE
from tests.fakes.random_trees import depths_of, path_to, random_parents
from tests.fakes.target_families import COMMON, FAMILIES, WINDOW, save_checkpoint

ROWS, PAGE = 5, 16
LAYERS = 2  # one of each type where a family has two


def config_of(family: str) -> PretrainedConfig:
    """A family of `FAMILIES`, or Mistral, with two layers."""
    common = MistralConfig(**COMMON, sliding_window=WINDOW) if family == "mistral" else FAMILIES[family]()
    common.num_hidden_layers = LAYERS
    if getattr(common, "layer_types", None):
        common.layer_types = common.layer_types[:LAYERS]
    return common


@dataclass(frozen=True)
class Place:
    """One sequence: what is committed, and the tree behind it; node 0 is the root."""

    prompt: Sequence[int]
    tokens: Sequence[int]  # of the root and of nodes 1, 2, …
    parents: list[int]  # of nodes 1, 2, …


EMPTY = Place((), (), [])


def random_place(source: random.Random, prompt: int, nodes: int) -> Place:
    """A random prompt, and behind it a tree that grows deeper rather than wider."""
    tokens = [source.randrange(256) for _ in range(prompt + nodes + 1)]
    return Place(tokens[:prompt], tokens[prompt:], random_parents(source, nodes, reach=3))


def load(folder: Path, config: PretrainedConfig, dtype: str = "float32") -> TargetModel:
    saved = save_checkpoint(folder, config)
    return TargetModel.load(saved, dtype=dtype, device=DEVICE, taps=(0, 1))


def new_pool(target: TargetModel) -> KvPool:
    budget = 8 * PAGE * target.cache_shape(0).bytes_per_slot
    return KvPool(target.cache_shape(0), budget_bytes=budget, page_size=PAGE, device=DEVICE)


def prefilled(target: TargetModel, pool: KvPool, prompt: Sequence[int]) -> Pages:
    """Commit a prompt by the model's own forward."""
    pages = pool.reserve(2 * PAGE)
    assert pages is not None
    depths = torch.arange(len(prompt), device=DEVICE)
    plan = StepPlan.build(pool, (Segment(0, len(prompt), pages, 0, depths, None),))
    target.forward(torch.tensor(prompt, device=DEVICE), plan, torch.tensor([0], device=DEVICE))
    return pages


def staged(target: TargetModel, pool: KvPool, places: Sequence[Place]) -> DeviceRows:
    """Rows of all places on the device; what is padding holds whatever an earlier step left there."""
    rows = DeviceRows.empty(len(places), ROWS, 2, PAGE, DEVICE)
    rows.depths.fill_(3)
    rows.bits.fill_(-1)
    for index, place in enumerate(places):
        count = len(place.tokens)
        if count == 0:
            continue
        pages = prefilled(target, pool, place.prompt)
        start = len(place.prompt)
        parents = torch.tensor([place.parents], dtype=torch.int32)
        rows.page_table[index] = torch.tensor(pages.indices)
        rows.lengths[index], rows.counts[index] = start, count
        rows.depths[index, :count] = torch.tensor(depths_of(place.parents))
        rows.bits[index, :count] = ancestor_bits(parents, torch.tensor([count - 1]))[0]
        rows.slots[index, :count] = pages.slots[start : start + count]
    return rows


def run(target: TargetModel, places: Sequence[Place]) -> torch.Tensor:
    """Logits of one step on the device, `[S, T, V]`."""
    pool = new_pool(target)
    plan = DevicePlan(staged(target, pool, places), pool)
    tokens = torch.full((len(places), ROWS), 7, device=DEVICE)
    for index, place in enumerate(places):
        tokens[index, : len(place.tokens)] = torch.tensor(place.tokens)
    logits = target.model(
        input_ids=tokens.view(1, -1), position_ids=plan.rows.positions.view(1, -1), use_cache=False,
        ddtree_plan=plan,
    ).logits  # fmt: skip
    return logits.view(len(places), ROWS, -1)  # type: ignore[no-any-return]


def plainly(model: Any, place: Place) -> torch.Tensor:
    """Logits of every node by a forward of its path alone, `[nodes + 1, V]`."""
    logits = []
    for node in range(len(place.tokens)):
        ids = [*place.prompt, *(place.tokens[step] for step in path_to(place.parents, node))]
        logits.append(model(torch.tensor([ids], device=DEVICE)).logits[0, -1])
    return torch.stack(logits)


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").to(DEVICE)


def prefill_logits(target: TargetModel, place: Place) -> torch.Tensor:
    """Logits of every token of a place's prompt by the model's own forward, `[prompt, V]`."""
    pool = new_pool(target)
    pages = pool.reserve(PAGE)
    assert pages is not None
    count = len(place.prompt)
    plan = StepPlan.build(pool, (Segment(0, count, pages, 0, torch.arange(count, device=DEVICE), None),))
    rows = torch.arange(count, device=DEVICE)
    return target.forward(torch.tensor(place.prompt, device=DEVICE), plan, rows).logits


def fused_of(model: nn.Module) -> list[str]:
    """Names of the layers that run fused."""
    return [name for name, part in model.named_modules() if isinstance(vars(part).get("forward"), FusedLayer)]
