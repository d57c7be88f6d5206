"""Packed masks and offsets, read back by an attention that knows only the recorded form."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ddtree.attention.plan import Segment
from ddtree.kv_cache import Pages
from ddtree.tree_mask import ancestor_bits, expand
from ddtree.trtllm.masks import PackedTrees, pack
from tests.fakes.trtllm_attention import causal_attention, sees, tree_attention, turn

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
PAGES = Pages((), torch.zeros(0, dtype=torch.int64), None)
ROTARY = LlamaRotaryEmbedding(
    LlamaConfig(hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, max_position_embeddings=1024)
)
# The tree of 25 rows in NVIDIA's unit test (test_modeling_llama.py at 151c21c): its mask words and offsets.
GOLDEN_WORDS = [
    1, 3, 5, 9, 17, 33, 65, 129, 257, 513, 1025, 2051, 4099, 8195, 16387, 32771, 65541, 131077, 262153,
    524297, 1048593, 2097169, 4194321, 8388641, 16842757,
]  # fmt: skip
GOLDEN_OFFSETS = [0, *[1] * 10, *[2] * 13, 3]


def segment(parents: list[int], prefix: int = 0) -> Segment:
    """A tree by the parent of each node; node 0 is the root."""
    row = torch.tensor([parents], dtype=torch.int32)
    bits = expand(ancestor_bits(row, torch.tensor([len(parents)], dtype=torch.int32)))[0]
    return Segment(0, len(parents) + 1, PAGES, prefix, bits.sum(1) - 1, bits)


def random_parents(source: random.Random, nodes: int) -> list[int]:
    """Bushy, or one long chain with a few branches: chains reach the last bit of each word."""
    reach = source.choice([1, 2, nodes + 1])
    return [source.randrange(max(0, i + 1 - reach), i + 1) for i in range(nodes)]


def golden_parents() -> list[int]:
    """From the words themselves: the highest bit below a node's own is its parent's."""
    parents = []
    for node, word in enumerate(GOLDEN_WORDS[1:], start=1):
        parents.append((word - (1 << node)).bit_length() - 1)
    return parents


def test_the_tree_of_nvidias_unit_test_gives_its_words_and_offsets() -> None:
    packed = pack([segment(golden_parents())], 25)
    assert packed.mask[0, :, 0].tolist() == GOLDEN_WORDS
    assert packed.mask.shape == (1, 25, 1)
    assert packed.offsets[0].tolist() == GOLDEN_OFFSETS


def test_its_words_mean_what_we_believe() -> None:
    """Its last node sees itself, the root and the nodes 2 and 16; each offset counts ancestors."""
    assert [j for j in range(25) if sees([GOLDEN_WORDS[24]], j)] == [0, 2, 16, 24]
    assert [word.bit_count() - 1 for word in GOLDEN_WORDS] == GOLDEN_OFFSETS


@pytest.mark.parametrize("rows", [31, 32, 33, 63, 64, 65, 257])
def test_a_chain_fills_words_up_to_the_sign_bit(rows: int) -> None:
    packed = pack([segment(list(range(rows - 1)))], rows)
    words = packed.mask[0, rows - 1].tolist()
    full, rest = divmod(rows, 32)
    assert words == [-1] * full + ([(1 << rest) - 1] if rest else [])
    assert packed.offsets[0].tolist() == list(range(rows))


def test_padding_sees_the_root_and_itself_and_nobody_sees_it() -> None:
    packed = pack([segment([0, 1]), segment(random_parents(random.Random(1), 39))], 40)
    rows = packed.mask[0].tolist()
    for row in range(3, 40):
        assert [j for j in range(40) if sees(rows[row], j)] == [0, row]
    assert not any(sees(rows[row], j) for row in range(3) for j in range(3, 40))
    assert packed.offsets[0].tolist() == [0, 1, 2, *[1] * 37]


def rows_of(packed: PackedTrees, index: int, count: int) -> list[list[int]]:
    bits = packed.mask[index].tolist()
    return [[j for j in range(packed.width) if sees(bits[row], j)] for row in range(count)]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 130), min_size=1, max_size=4), st.integers(0, 9))
def test_packed_rows_are_self_and_ancestors(seed: int, sizes: list[int], more: int) -> None:
    source = random.Random(seed)
    trees = [random_parents(source, nodes) for nodes in sizes]
    packed = pack([segment(tree) for tree in trees], max(sizes) + 1 + more)
    for index, tree in enumerate(trees):
        for node, row in enumerate(rows_of(packed, index, len(tree) + 1)):
            path = [node]
            while path[-1]:
                path.append(tree[path[-1] - 1])
            assert row == sorted(path)
            assert packed.offsets[index, node] == len(path) - 1


@pytest.mark.parametrize("nodes", [0, 1, 2, 30, 31, 32, 62, 63, 64, 95, 96, 128, 200, 256])
@pytest.mark.parametrize("prefix", [0, 37])
def test_tree_attention_equals_causal_attention_of_every_path(nodes: int, prefix: int) -> None:
    """Keys turned to base + offset, as a kernel does it, against a plain sequence of each node's path."""
    source = random.Random(nodes * 100 + prefix)
    torch.manual_seed(nodes)
    parents = random_parents(source, nodes)
    rows = nodes + 1
    packed = pack([segment(parents, prefix)], rows)
    base = torch.arange(prefix)
    query, key, value = (torch.randn(prefix + rows, HEADS, HEAD_DIM) for _ in range(3))
    key, value = key[:, :KV_HEADS], value[:, :KV_HEADS]
    places = torch.cat([base, prefix + packed.offsets[0]])
    turned = turn(ROTARY, key, places)
    got = tree_attention(
        turn(ROTARY, query[prefix:], places[prefix:]), [turned], [value], packed.mask, [rows], [prefix + rows]
    )
    nodes_tried = (
        range(rows) if rows < 40 else sorted({0, 31, 32, 33, rows - 1, *source.sample(range(rows), 20)})
    )
    for node in nodes_tried:
        path = [node]
        while path[0]:
            path.insert(0, parents[path[0] - 1])
        order = [*range(prefix), *(prefix + step for step in path)]
        positions = torch.arange(len(order))
        plain = causal_attention(
            turn(ROTARY, query[order], positions)[-1:], turn(ROTARY, key[order], positions), value[order]
        )
        torch.testing.assert_close(got[node], plain[0], atol=1e-5, rtol=1e-5)


def test_requests_of_a_batch_are_told_apart_in_the_flat_mask() -> None:
    """Two trees of unlike shape, padded to one width, attend as each does alone."""
    torch.manual_seed(3)
    trees, prefixes, width = [random_parents(random.Random(2), 20), [0, 0, 1]], [3, 11], 40
    segments = [segment(tree, prefix) for tree, prefix in zip(trees, prefixes, strict=True)]
    packed = pack(segments, width)
    query = torch.randn(2 * width, HEADS, HEAD_DIM)
    keys = [torch.randn(prefix + width, KV_HEADS, HEAD_DIM) for prefix in prefixes]
    lens = [prefix + width for prefix in prefixes]
    both = tree_attention(query, keys, keys, packed.mask, [width] * 2, lens)
    for index, item in enumerate(segments):
        alone = pack([item], item.count)
        start, stop = index * width, index * width + item.count
        kept = keys[index][: item.prefix + item.count]
        own = tree_attention(query[start:stop], [kept], [kept], alone.mask, [item.count], [len(kept)])
        torch.testing.assert_close(both[start:stop], own)
