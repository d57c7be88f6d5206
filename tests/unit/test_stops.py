"""Stop strings against a search in the whole text, in whatever pieces the text comes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ddtree.stops import StopFinder

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)
TEXTS = st.text("abc", max_size=24)


def slow_search(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first stop string to be complete, the longest of those that are; and what comes before it."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def scan(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    finder = StopFinder(stops)
    shown = []
    for piece in pieces:
        result = finder.push(piece)
        shown.append(result.text)
        if result.stop is not None:
            return shown, result.stop
    return [*shown, finder.finish()], None


@given(STOPS, TEXTS, st.lists(st.integers(0, 24), max_size=6))
def test_pieces_give_what_a_search_in_the_whole_text_gives(
    stops: list[str], text: str, cuts: list[int]
) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    shown, stop = scan(stops, pieces)
    assert ("".join(shown), stop) == slow_search(text, stops)


@given(STOPS, TEXTS)
def test_nothing_is_held_back_that_cannot_become_a_stop_string(stops: list[str], text: str) -> None:
    finder = StopFinder(stops)
    shown = ""
    for count, character in enumerate(text, start=1):
        result = finder.push(character)
        shown += result.text
        if result.stop is not None:
            return
        held = text[len(shown) : count]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_a_beginning_is_held_back_across_pieces_and_given_back_when_it_was_none() -> None:
    assert scan(["END"], ["one E", "N", "d two E"]) == (["one ", "", "ENd two ", "E"], None)
    assert scan(["END"], ["one E", "N", "D two"]) == (["one ", "", ""], "END")


def test_the_stop_string_complete_first_wins() -> None:
    assert scan(["bcd", "c"], ["abcd"]) == (["ab"], "c")
    assert scan(["ab", "abc"], ["xabc"]) == (["x"], "ab")


def test_of_two_complete_at_one_character_the_longest_wins() -> None:
    assert scan(["c", "abc"], ["xabc"]) == (["x"], "abc")
    assert scan(["abc", "c"], ["xabc"]) == (["x"], "abc")


def test_a_beginning_inside_another_beginning_is_not_forgotten() -> None:
    assert scan(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], "aab")


def test_without_stop_strings_text_passes() -> None:
    assert scan([], ["any", " text"]) == (["any", " text", ""], None)
