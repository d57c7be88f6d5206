"""What a sequence keeps of the tokens it is given, what it shows of them, and what it counts."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.log_probs import TokenLogProbs
from ddtree.params import GenerationParams
from ddtree.sampling_spec import SamplingSpec
from ddtree.sequence import Delta, FinishReason, Sequence, SequenceState
from ddtree.text import TextCodec
from tests.fakes import tokenizers

EOS = 1
NEVER = "\U0010ffff"  # no draw of ids is likely to spell it


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec(tokenizers.byte_level(), stop_ids=frozenset({EOS}))


class OneByOne(Sequence):
    """Looks at every token by itself."""

    def _take(self, tokens: Tokens[int]) -> tuple[list[int], str, FinishReason]:
        return self._take_one_by_one(tokens)


def start(codec: TextCodec, kind: type[Sequence] = Sequence, **params: Any) -> Sequence:
    settings = {"prompt_ids": (7, 8), "max_tokens": 100, "stop_ids": frozenset({EOS}), **params}
    return kind(GenerationParams(**settings), session_id=3, decoder=codec, clock=count(5).__next__)


def letters(codec: TextCodec, text: str) -> list[int]:
    """One token per ASCII character."""
    return [token for letter in text for token in codec.encode(letter)]


def test_a_round_gives_its_text_and_goes_on(codec: TextCodec) -> None:
    sequence = start(codec)
    ids = letters(codec, "abc")
    assert sequence.append(ids[:1]) == Delta("a", (ids[0],))
    assert sequence.append(ids[1:], draft_tokens=4) == Delta("bc", tuple(ids[1:]))
    assert sequence.all_ids == [7, 8, *ids]
    assert sequence.length == 5
    assert sequence.root_token == ids[-1]
    assert sequence.remaining_tokens == 97
    assert not sequence.is_finished


@settings(max_examples=200, deadline=None)
@given(data=st.data(), max_tokens=st.integers(1, 30), end=st.integers(0, 329))
def test_a_round_at_once_gives_what_its_tokens_give_one_by_one(
    codec: TextCodec, data: st.DataObject, max_tokens: int, end: int
) -> None:
    """A stop string that never comes changes nothing; nor does a look at every token."""
    common: dict[str, Any] = {"max_tokens": max_tokens, "stop_ids": frozenset({EOS, end})}
    at_once = start(codec, **common)
    others = [start(codec, kind=kind, stop_strings=(NEVER,), **common) for kind in (Sequence, OneByOne)]
    for tokens in data.draw(st.lists(st.lists(st.integers(2, 331), min_size=1, max_size=9), max_size=6)):
        if not at_once.is_finished:
            delta = at_once.append(tokens, 8)
            assert [other.append(tokens, 8) for other in others] == [delta, delta]
    assert [other.is_finished for other in others] == [at_once.is_finished] * 2
    assert [other.stats for other in others] == [at_once.stats] * 2


def test_a_stop_id_is_kept_in_the_ids_and_not_in_the_text(codec: TextCodec) -> None:
    sequence = start(codec)
    a, b, c = letters(codec, "abc")
    assert sequence.append([a, b, EOS, c], draft_tokens=8) == Delta("ab", (a, b, EOS), "stop")
    assert sequence.output_ids == [a, b, EOS]
    assert sequence.state is SequenceState.FINISHED


def test_a_stop_id_that_has_text_is_not_shown(codec: TextCodec) -> None:
    a, b = letters(codec, "ab")
    assert start(codec, stop_ids=frozenset({b})).append([a, b]) == Delta("a", (a, b), "stop")


def test_ignore_eos_goes_on(codec: TextCodec) -> None:
    a, b = letters(codec, "ab")
    assert start(codec, ignore_eos=True).append([a, EOS, b]) == Delta("ab", (a, EOS, b))


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, "a"), (1, "a"), (2, "ab|a"), (4, "ab|a"), (5, "ab|ab|a")]
)
def test_stop_strings_are_looked_for_after_min_tokens(codec: TextCodec, min_tokens: int, text: str) -> None:
    """In text that ends within the first tokens, or that begins there, no stop string is found."""
    sequence = start(codec, stop_strings=("b|",), sampling=SamplingSpec(min_tokens=min_tokens))
    delta = sequence.append(letters(codec, "ab|ab|ab|"))
    assert (delta.text, delta.finish_reason) == (text, "stop")


def test_log_probs_follow_the_tokens_that_are_kept(codec: TextCodec) -> None:
    sequence = start(codec)
    ids = [*letters(codec, "ab"), EOS, *letters(codec, "c")]
    entries = [TokenLogProbs(-1.0 * place, 0.0) for place in range(4)]
    assert sequence.append(ids, 4, entries).log_probs == tuple(entries[:3])
    assert start(codec).append(ids, 4).log_probs == ()


def test_max_tokens_is_never_overshot(codec: TextCodec) -> None:
    ids = letters(codec, "abcdef")
    sequence = start(codec, max_tokens=4)
    sequence.append(ids[:1])
    assert sequence.append(ids[1:], draft_tokens=9) == Delta("bcd", tuple(ids[1:4]), "length")


def test_a_stop_id_in_the_last_place_counts_as_stop(codec: TextCodec) -> None:
    a, b = letters(codec, "ab")
    assert start(codec, max_tokens=2).append([a, EOS, b]).finish_reason == "stop"


def test_a_stop_string_inside_a_round_cuts_text_and_ids(codec: TextCodec) -> None:
    ids = letters(codec, "abXYcd")
    sequence = start(codec, stop_strings=("XY",))
    assert sequence.append(ids, draft_tokens=7) == Delta("ab", tuple(ids[:4]), "stop")


def test_a_stop_string_over_two_rounds_never_leaks(codec: TextCodec) -> None:
    ids = letters(codec, "abXYcd")
    sequence = start(codec, stop_strings=("XY",))
    assert sequence.append(ids[:3]) == Delta("ab", tuple(ids[:3]))
    assert sequence.append(ids[3:], draft_tokens=7) == Delta("", (ids[3],), "stop")


def test_a_character_cut_by_a_round_outlives_a_closer_look(codec: TextCodec) -> None:
    """The second round's tokens are taken one by one after all, to see which completes the stop string."""
    sequence, rocket = start(codec, stop_strings=("XY",)), codec.encode("\N{ROCKET}")
    assert sequence.append(rocket[:1]).text == ""
    assert sequence.append([*rocket[1:], *letters(codec, "aXYb")]).text == "\N{ROCKET}a"
    assert len(sequence.output_ids) == len(rocket) + 3


class CountingCodec(TextCodec):
    """Counts how often ids are decoded."""

    def decode(self, token_ids: Tokens[int]) -> str:
        self.calls = getattr(self, "calls", 0) + 1
        return super().decode(token_ids)


def test_a_round_is_decoded_once_though_a_stop_string_may_begin_in_it() -> None:
    calls = []
    for stops in ((), ("a|", "ab|")):
        counting = CountingCodec(tokenizers.byte_level(), stop_ids=frozenset({EOS}))
        sequence = start(counting, stop_strings=stops)
        for _ in range(20):
            assert not sequence.append(letters(counting, "abca"), draft_tokens=4).finish_reason
        calls.append(counting.calls)
    assert calls[1] == calls[0]


def test_held_back_text_comes_with_the_last_delta(codec: TextCodec) -> None:
    ids = letters(codec, "abX")
    assert start(codec, stop_strings=("XY",), max_tokens=3).append(ids) == Delta("abX", tuple(ids), "length")
    assert start(codec, stop_strings=("XY",)).append([*ids, EOS]) == Delta("abX", (*ids, EOS), "stop")
    sequence = start(codec, stop_strings=("XY",))
    sequence.append(ids)
    assert sequence.end("cancelled") == Delta("X", (), "cancelled")
    assert sequence.is_finished


def test_a_stop_string_of_broken_bytes_is_found_at_the_end(codec: TextCodec) -> None:
    ids = [*letters(codec, "a"), codec.encode("\N{ROCKET}")[0]]
    sequence = start(codec, stop_strings=("\ufffd",), max_tokens=2)
    assert sequence.append(ids) == Delta("a", tuple(ids), "stop")


def test_accepted_tokens_are_counted_over_what_was_emitted(codec: TextCodec) -> None:
    ids = letters(codec, "abcdefgh")
    sequence = start(codec)
    sequence.append(ids[:1])
    assert sequence.stats.rounds == sequence.stats.draft_tokens == sequence.stats.accepted_tokens == 0
    sequence.append(ids[1:4], draft_tokens=16)
    assert (sequence.stats.accepted_tokens, sequence.stats.emitted_tokens) == (2, 4)
    sequence.append([ids[4], EOS, *ids[5:]], draft_tokens=16)
    stats = sequence.stats
    assert (stats.rounds, stats.draft_tokens, stats.accepted_tokens, stats.emitted_tokens) == (2, 32, 4, 6)
    assert stats.acceptance_rate == 4 / 32
    assert stats.acceptance_length == 5 / 2
    assert (stats.prompt_tokens, stats.arrival_ns, stats.first_token_ns) == (2, 5, 6)


def test_a_whole_path_counts_its_draft_tokens_without_the_bonus_token(codec: TextCodec) -> None:
    sequence = start(codec, max_tokens=3)
    sequence.append(letters(codec, "abc"), draft_tokens=2)
    assert sequence.stats.accepted_tokens == 2


@settings(deadline=None)
@given(
    text=st.text("abXY ", max_size=20),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    stops=st.lists(st.text("abXY ", min_size=1, max_size=3), max_size=2),
    max_tokens=st.integers(1, 20),
    min_tokens=st.integers(0, 4),
)
def test_rounds_of_any_size_end_as_rounds_of_one_token(
    codec: TextCodec, text: str, cuts: list[int], stops: list[str], max_tokens: int, min_tokens: int
) -> None:
    ids = [*letters(codec, text), EOS]
    params = {"stop_strings": tuple(stops), "max_tokens": max_tokens}
    ends = []
    for kind, sizes in ((OneByOne, [1]), (Sequence, [1]), (Sequence, cuts)):
        sequence = start(codec, kind=kind, sampling=SamplingSpec(min_tokens=min_tokens), **params)
        position, shown = 0, ""
        for turn in count():
            size = sizes[turn % len(sizes)]
            delta = sequence.append(ids[position : position + size], draft_tokens=4)
            position, shown = position + size, shown + delta.text
            if delta.finish_reason:
                break
        ends.append((shown, delta.finish_reason, sequence.output_ids))
    assert ends[0] == ends[1] == ends[2]
    assert len(ends[0][2]) <= max_tokens
    assert min_tokens or not any(stop in ends[0][0] for stop in stops)
