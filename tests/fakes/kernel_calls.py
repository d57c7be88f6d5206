"""Calls of every wrapper that launches kernels, with tensors that are all shape, of targets and drafters.

Each call is one case of `compile_kernels`, which decides what is called in which sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ddtree.device.kernels.attention import Scoring, store, tree_attention
from ddtree.device.kernels.build import build
from ddtree.device.kernels.draft_rows import Angles, ContextKv, begin, convolve, keep_context
from ddtree.device.kernels.layer import Heads, add_norm, gate, turn
from ddtree.device.kernels.layout import lay_out
from ddtree.device.kernels.matmul import multiply
from ddtree.device.kernels.move import commit_rows, gather_rows, keep_rows
from ddtree.device.kernels.top import top_candidates
from ddtree.device.kernels.walk import walk
from ddtree.device.matmul_candidates import Bucket, Config, ProductKind
from ddtree.device.rows import DeviceRows, Sight
from ddtree.device.trees import DeviceAcceptance, DeviceTrees
from ddtree.train.kernels import choose_tokens, decode_attention

META = torch.device("meta")
_SLOTS = 8192  # of a pool


@dataclass(frozen=True)
class Family:
    """The shape of a target's layers."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocabulary: int
    turned: int  # columns of sine and cosine
    has_norms: bool = False
    sinks: bool = False
    window: int | None = None
    softcap: float | None = None

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.head_dim**-0.5, self.window, self.softcap)


QWEN3_8B = Family("qwen3_8b", 32, 8, 128, 4096, 12288, 151936, 128, has_norms=True)
SMOLLM2 = Family("smollm2", 9, 3, 64, 576, 1536, 49152, 64)
QWEN_27B = Family("qwen3_6_27b", 24, 4, 256, 5120, 17408, 248320, 64, has_norms=True)
GPT_OSS = Family("gpt_oss", 64, 8, 64, 2880, 2880, 201088, 64, sinks=True, window=128)
GEMMA = Family("gemma", 16, 8, 256, 3584, 14336, 256000, 256, window=4096, softcap=50.0)
FAMILIES = (QWEN3_8B, SMOLLM2, QWEN_27B, GPT_OSS, GEMMA)


@dataclass(frozen=True)
class Call:
    """One case."""

    name: str
    make: Callable[[], object]


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor that is all shape."""
    return torch.empty(shape, dtype=dtype, device=META)


def ints(*shape: int) -> torch.Tensor:
    """The same, int32."""
    return tensor(*shape, dtype=torch.int32)


def longs(*shape: int) -> torch.Tensor:
    """The same, int64."""
    return tensor(*shape, dtype=torch.int64)


def step_rows(count: int, places: int = 1, context: int = 4096, page_size: int = 64) -> DeviceRows:
    """Rows of a step."""
    return DeviceRows.empty(places, count, context // page_size, page_size, META)


def attention_calls(
    family: Family, counts: tuple[int, ...], sight: Sight = Sight.TREE, dtype: torch.dtype = torch.bfloat16,
    places: int = 1, context: int = 4096, page_size: int = 64,
) -> Iterator[Call]:  # fmt: skip
    """Rows of merged projections against a pool."""

    def attend_rows(count: int) -> None:
        packed = tensor(places, count, family.heads + 2 * family.kv_heads, family.head_dim, dtype=dtype)
        query, keys, values = packed.split([family.heads, family.kv_heads, family.kv_heads], dim=2)
        pool = tensor(2, _SLOTS, family.kv_heads, family.head_dim, dtype=dtype)
        rows = step_rows(count, places, context, page_size)
        sinks = tensor(family.heads, dtype=dtype) if family.sinks else None
        tree_attention(query, keys, values, pool[0], pool[1], rows, sight, family.scoring, sinks=sinks)
        store(keys, values, pool[0], pool[1], rows.slots)

    for count in counts:
        case = f"{family.name} {places} x {count} rows, {sight.name}, {dtype}, {context} by {page_size}"
        yield Call(f"attention {case}", lambda count=count: attend_rows(count))  # type: ignore[misc]


def layer_calls(family: Family, count: int, dtype: torch.dtype = torch.bfloat16) -> Iterator[Call]:
    """What stands between products."""

    def turn_rows() -> None:
        norm = tensor(family.head_dim, dtype=dtype) if family.has_norms else None
        heads = Heads(family.heads, family.kv_heads, family.head_dim, norm, norm, 1e-6)
        pool = tensor(2, _SLOTS, family.kv_heads, family.head_dim, dtype=dtype)
        cos = tensor(count, family.turned, dtype=dtype)
        turn(tensor(count, heads.width, dtype=dtype), cos, cos, heads, pool[0], pool[1], longs(count))

    def add_norms() -> None:
        hidden, weight = tensor(count, family.hidden, dtype=dtype), tensor(family.hidden, dtype=dtype)
        add_norm(hidden, None, weight, 1e-6)
        add_norm(hidden, hidden, weight, 1e-6)

    case = f"{family.name} {count} rows, {dtype}"
    yield Call(f"turn {case}", turn_rows)
    yield Call(f"add_norm {case}", add_norms)
    yield Call(f"gate {case}", lambda: gate(tensor(count, 2 * family.inner, dtype=dtype)))


def product_kinds(family: Family) -> tuple[ProductKind, ...]:
    """Weights of a layer and of the head."""
    width = family.heads * family.head_dim
    merged = width + 2 * family.kv_heads * family.head_dim
    return (
        ProductKind(merged, family.hidden, torch.bfloat16),
        ProductKind(family.hidden, width, torch.bfloat16),
        ProductKind(2 * family.inner, family.hidden, torch.bfloat16, gated=True),
        ProductKind(family.hidden, family.inner, torch.bfloat16),
        ProductKind(family.vocabulary, family.hidden, torch.bfloat16),
    )


def product_calls(
    kind: ProductKind, bucket: Bucket, config: Config, residual: bool = False
) -> Iterator[Call]:
    """One config of a product."""

    def product() -> None:
        beside = tensor(bucket.timed, kind.weight_rows, dtype=kind.dtype) if residual else None
        bias = tensor(kind.weight_rows, dtype=kind.dtype) if residual else None
        rows, weight = (
            tensor(count, kind.size, dtype=kind.dtype) for count in (bucket.timed, kind.weight_rows)
        )
        multiply(rows, weight, config, bias, beside, gated=kind.gated)

    yield Call(f"multiply {kind.name}, {bucket.timed} rows, {config}", product)


def tree_calls(nodes: int, edges: bool = False, places: int = 1) -> Iterator[Call]:
    """A round's tree, from candidates to the commit."""
    rows, candidates_, positions = step_rows(nodes + 1, places), min(64, max(nodes, 8)), 15
    trees = DeviceTrees.unwritten(places, nodes, META)
    accepted = DeviceAcceptance.unwritten(places, positions, META)

    def grow() -> None:
        scores = tensor(places, positions, candidates_, dtype=torch.float32)
        own = tensor(*scores.shape, candidates_, dtype=torch.float32) if edges else None
        is_chain = tensor(places, dtype=torch.bool)
        build(ints(*scores.shape), scores, ints(places), ints(places), is_chain, nodes, own)

    def commit() -> None:
        commit_rows(tensor(36, 2, _SLOTS, 8, 128), rows, accepted)
        gathered = gather_rows(tensor(places * (nodes + 1), 4096), accepted)
        keep_rows(gathered, tensor(_SLOTS, 4096), rows, accepted)

    case = f"{places} x {nodes} nodes{', edges' if edges else ''}"
    active = tensor(places, dtype=torch.bool)
    yield Call(f"build {case}", grow)
    yield Call(
        f"lay_out {case}", lambda: lay_out(trees, longs(places), active, rows, longs(*rows.depths.shape))
    )
    yield Call(f"walk {case}", lambda: walk(trees, longs(places, nodes + 1), positions))
    yield Call(f"commit {case}", commit)


def draft_calls(family: Family, width: int, places: int = 1, layers: int = 5) -> Iterator[Call]:
    """A drafter's pass over blocks of 16."""
    size, count = 16, 16 * places
    half = family.head_dim // 2
    rows = step_rows(size, places)
    angles = Angles(tensor(half, dtype=torch.float32), tensor(1, dtype=torch.float32))
    groups, kernel = family.hidden // 64, 4

    def keep() -> None:
        size_of_kv = 2 * family.kv_heads * family.head_dim
        norm = tensor(layers, family.head_dim)
        context = ContextKv(tensor(count, layers * size_of_kv), norm, 1e-6, angles)
        pool = tensor(layers, 2, _SLOTS, family.kv_heads, family.head_dim)
        keep_context(context, ints(places), rows, pool)

    def embed() -> None:
        begin(longs(places), tensor(family.vocabulary, family.hidden), rows, angles, mask_token=7, scale=1.0)

    def convolve_rows() -> None:
        dynamic, base = tensor(count, 2 * kernel * groups), tensor(2, kernel, family.hidden)
        convolve(tensor(count, family.hidden), dynamic, base, 1, size)

    yield Call(f"begin {family.name}", embed)
    yield Call(f"keep_context {family.name}", keep)
    yield Call(f"convolve {family.name}", convolve_rows)
    yield from top_calls(family, width, count - places)


def top_calls(family: Family, width: int, count: int, dtype: torch.dtype = torch.bfloat16) -> Iterator[Call]:
    """The best candidates."""
    name = f"top {width} of {family.vocabulary}, {dtype}"
    yield Call(name, lambda: top_candidates(tensor(count, family.vocabulary, dtype=dtype), width))


def training_calls(family: Family, slots: int = 32) -> Iterator[Call]:
    """Generation of training data."""

    def decode() -> None:
        query = tensor(slots, family.heads, family.head_dim)
        key = tensor(slots, family.kv_heads, family.head_dim)
        cached = tensor(slots, family.kv_heads, 2048, family.head_dim)
        decode_attention(query, key, key, cached, cached, longs(slots), family.head_dim**-0.5)

    temperatures = tensor(slots, dtype=torch.float32)
    logits = tensor(slots, family.vocabulary)
    yield Call(f"decode_attention {family.name}", decode)
    yield Call(f"choose_tokens {family.name}", lambda: choose_tokens(logits, temperatures, longs(1)))
