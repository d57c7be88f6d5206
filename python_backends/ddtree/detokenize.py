"""Token ids to text, as they come: the pieces join to what decoding everything at once gives.

Decoding token by token is wrong: a character may be split over tokens, and decoders treat the first token
specially (the leading space of sentencepiece). So a short window of tokens is decoded again with every
push, and what it grew by is the new text. Knows nothing of stop strings, requests or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character (yet)
# An unfinished UTF-8 character is three bytes at most, hence lies in the last three tokens.
_UNFINISHED_TOKENS = 3
_LONGEST_UNCLEAN_WINDOW = 16


class Decoder(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Give the text of all ids, special tokens left out."""
        ...

    def is_silent(self, token_id: int) -> bool:
        """Tell whether the id never has text: a special token, or none of the tokenizer's."""
        ...

    def is_byte(self, token_id: int) -> bool:
        """Tell whether the id stands for one byte of a character the vocabulary lacks (byte fallback)."""
        ...


class IncrementalDetokenizer:
    r"""Turns one sequence's ids into text deltas; `"".join(deltas) == decode(all ids)`.

    Worked example on byte-level tokens; the second ends with the first two bytes of 😀:

        push        window's text   given out
        Hi          Hi              "Hi"
        ␣\xf0\x9f   Hi␣�            " "        � may still become a character: held back
        \x98\x80    Hi␣😀           "😀"       a clean border: only this token stays in the window
        !           ��!             "!"        what stayed was given out, however it reads by itself

    One token stays before the new ones, because a decoder may strip what comes first.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        self._given = 0  # characters of the window's text already given out

    def fork(self) -> IncrementalDetokenizer:
        """Another one that stands where this one does."""
        other = IncrementalDetokenizer(self._decoder)
        other._window, other._given = [*self._window], self._given
        return other

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids and give the text that is now certain, at a cost bounded per token.

        How ids are divided among pushes does not matter: a round's at once cost little more than one.
        """
        decoder = self._decoder
        audible = [token_id for token_id in token_ids if not decoder.is_silent(token_id)]
        # One more byte can turn a whole run of byte tokens, valid so far, into replacement characters.
        settled = len(audible)
        while settled and decoder.is_byte(audible[settled - 1]):
            settled -= 1
        delta = self._settle(audible[:settled]) if settled else ""
        self._window += audible[settled:]
        return delta

    def finish(self) -> str:
        """Give out what was held back; nothing may be pushed afterwards."""
        text = self._decoder.decode(self._window)
        return self._give(text, len(text))

    def _settle(self, token_ids: Sequence[int]) -> str:
        """Take ids of which the last is no byte token."""
        self._window += token_ids
        text = self._decoder.decode(self._window)
        is_clean = not text.endswith(_REPLACEMENT)
        delta = self._give(text, len(text) if is_clean else len(text) - 1)
        if is_clean:
            self._slide(len(self._window) - 1)
        elif len(self._window) > _LONGEST_UNCLEAN_WINDOW:
            # Text full of replacement characters: a lead byte restarts UTF-8, so earlier tokens may go.
            self._slide(len(self._window) - _UNFINISHED_TOKENS - 1)
            self._given -= 1
        return delta

    def _give(self, text: str, end: int) -> str:
        start, self._given = self._given, max(self._given, end)
        return text[start:end]

    def _slide(self, count: int) -> None:
        """Drop `count` tokens from the window, all of the rest's text counting as given out."""
        del self._window[:count]
        self._given = len(self._decoder.decode(self._window))
