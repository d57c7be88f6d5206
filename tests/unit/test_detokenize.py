"""Whatever comes, in whatever pieces: the deltas join to the text of all ids at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.detokenize import IncrementalDetokenizer
from ddtree.text import TextCodec
from tests.fakes import tokenizers

TOKENIZERS = pytest.mark.parametrize("build", [tokenizers.byte_level, tokenizers.metaspace])
MIXED = "The quick fox 😀👩‍🚀 Köln 你好 <think> a\ufffdb"


def codec_of(build: Callable[[], object]) -> TextCodec:
    return TextCodec(build(), stop_ids=frozenset())


load_demo = cache(TextCodec.from_folder)


def deltas_of(codec: TextCodec, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(codec)
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    pieces = [ids[start:end] for start, end in pairwise(edges)]
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.finish()]


@TOKENIZERS
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_deltas_join_to_the_text_of_all_ids(build: Callable[[], object], data: st.DataObject) -> None:
    codec = codec_of(build)
    # Two beyond the vocabulary: models pad theirs.
    tokens = st.integers(0, len(build()) + 1)  # type: ignore[arg-type]
    # Runs of a few ids make the rare cases common: bytes of one character, replacement characters, specials.
    runs = st.lists(st.tuples(tokens, st.integers(1, 5)), max_size=20)
    ids = [token for token, count in data.draw(runs) for _ in range(count)]
    deltas = deltas_of(codec, ids, data.draw(st.lists(st.integers(0, 100), max_size=8)))
    assert "".join(deltas) == codec.decode(ids)


@TOKENIZERS
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_ids_at_once_give_what_they_give_one_by_one(build: Callable[[], object], data: st.DataObject) -> None:
    """So a round's text is shown with the round, however many tokens it has."""
    codec = codec_of(build)
    runs = st.lists(st.tuples(st.integers(0, len(build()) + 1), st.integers(1, 5)), max_size=5)  # type: ignore[arg-type]
    at_once, one_by_one = IncrementalDetokenizer(codec), IncrementalDetokenizer(codec)
    for drawn in data.draw(st.lists(runs, max_size=6)):
        ids = [token for token, count in drawn for _ in range(count)]
        assert at_once.push(ids) == "".join(one_by_one.push([token]) for token in ids)


@pytest.mark.demo
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_deltas_of_the_demo_target_join_to_the_text_of_all_ids(
    demo_target: Path, data: st.DataObject
) -> None:
    codec = load_demo(demo_target)
    text = st.text(max_size=10).map(codec.encode)
    ids = [
        token
        for run in data.draw(st.lists(st.lists(st.integers(0, 49_160)) | text, max_size=8))
        for token in run
    ]
    assert "".join(
        deltas_of(codec, ids, data.draw(st.lists(st.integers(0, 100), max_size=8)))
    ) == codec.decode(ids)
    assert "".join(deltas_of(codec, ids, range(len(ids)))) == codec.decode(ids)


@TOKENIZERS
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_any_text_comes_back_token_by_token(build: Callable[[], object], text: str) -> None:
    codec = codec_of(build)
    ids = codec.encode(text)
    assert "".join(deltas_of(codec, ids, range(len(ids)))) == codec.decode(ids)


@TOKENIZERS
@pytest.mark.parametrize("lead", ["", "The", "é"])
@pytest.mark.parametrize("filler", ["\ufffd", "é", " a"])
def test_long_runs_of_one_text_stay_exact(build: Callable[[], object], lead: str, filler: str) -> None:
    codec = codec_of(build)
    ids = codec.encode(lead) + codec.encode(filler) * 60 + codec.encode("é")[:-1] + codec.encode("b")
    assert "".join(deltas_of(codec, ids, range(len(ids)))) == codec.decode(ids)


@settings(max_examples=200, deadline=None)
@given(broken=st.lists(st.sampled_from([*"é😀你".encode(), 0x41, 0x80, 0xFF, 0xEF, 0xBF, 0xBD]), max_size=60))
def test_broken_utf8_stays_exact(broken: list[int]) -> None:
    codec = codec_of(tokenizers.byte_level)
    vocabulary = tokenizers.byte_level().get_vocab()
    alphabet = {byte: _letter(byte) for byte in broken}
    ids = [vocabulary[alphabet[byte]] for byte in broken]
    assert "".join(deltas_of(codec, ids, range(len(ids)))) == codec.decode(ids)


def _letter(byte: int) -> str:
    """The character that stands for a byte in byte-level vocabularies: itself if printable."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(0x100 + [b for b in range(256) if b not in printable].index(byte))


def test_an_emoji_comes_out_whole_and_the_space_before_it_at_once() -> None:
    codec = codec_of(tokenizers.byte_level)
    ids = codec.encode("a \N{ROCKET}b")
    deltas = deltas_of(codec, ids, range(len(ids)))
    assert "".join(deltas) == "a \N{ROCKET}b"
    assert not any("\ufffd" in delta for delta in deltas)
    assert deltas.index(" ") < deltas.index("\N{ROCKET}")


@TOKENIZERS
def test_incomplete_bytes_at_the_end_are_shown_as_such(build: Callable[[], object]) -> None:
    codec = codec_of(build)
    ids = codec.encode("a\N{ROCKET}")[:-1]
    detokenizer = IncrementalDetokenizer(codec)
    assert "\ufffd" not in detokenizer.push(ids)
    assert detokenizer.finish().endswith("\ufffd")


def test_special_tokens_have_no_text_and_added_ones_have() -> None:
    codec = codec_of(tokenizers.byte_level)
    ids = codec.encode("a<|end|><think>b")
    assert "".join(deltas_of(codec, ids, range(len(ids)))) == "a<think>b"


class CountingDecoder:
    """Counts how many ids were decoded."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self.decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.decoded += len(token_ids)
        return self._codec.decode(token_ids)

    def is_silent(self, token_id: int) -> bool:
        return self._codec.is_silent(token_id)

    def is_byte(self, token_id: int) -> bool:
        return self._codec.is_byte(token_id)


@TOKENIZERS
@pytest.mark.parametrize("text", ["a", "\ufffd", "é", "😀", "<|end|>", "The quick "])
def test_the_cost_of_a_token_does_not_grow(build: Callable[[], object], text: str) -> None:
    ids = codec_of(build).encode(text) * 500
    for size in (1, 5):
        decoder = CountingDecoder(codec_of(build))
        detokenizer = IncrementalDetokenizer(decoder)
        for start in range(0, len(ids), size):
            detokenizer.push(ids[start : start + size])
        detokenizer.finish()
        assert decoder.decoded <= 40 * len(ids)


def test_the_tokens_of_a_round_are_decoded_together() -> None:
    codec = codec_of(tokenizers.byte_level)
    decoder = CountingDecoder(codec)
    detokenizer = IncrementalDetokenizer(decoder)
    ids = codec.encode("The quick brown fox jumps over the lazy dog. ") * 8
    for start in range(0, len(ids), 8):
        detokenizer.push(ids[start : start + 8])
    assert decoder.decoded <= 1.5 * len(ids)
