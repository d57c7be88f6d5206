"""Guided decoding: which tokens a grammar allows next, by llguidance.

A `GrammarCompiler` belongs to one tokenizer; a `Matcher` is the state of one text. Forking a state costs
microseconds, so walking a tree forks at every node and nothing is ever rolled back. This module knows no
logits and no sessions, and is the only one that knows the library.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from ddtree.errors import InvalidArgument
from ddtree.sampling_spec import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MOST_BYTES: Final = 1 << 16
_MOST_LEVELS: Final = 32
_MOST_CHOICES: Final = 1024
_KEPT_PROTOTYPES: Final = 64
# Free whitespace lets a model that lost its thread write blanks until max_tokens, so the layout is fixed.
_JSON_LAYOUT: Final[Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Matcher:
    """Where one text stands in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def fork(self) -> Matcher:
        """Give an independent copy."""
        return Matcher(self._matcher.deep_copy())

    def advance(self, tokens: Sequence[int]) -> bool:
        """Take tokens as far as the grammar allows them; gives whether it took them all."""
        return self._matcher.try_consume_tokens(list(tokens)) == len(tokens)

    def allowed_words(self) -> torch.Tensor:
        """Which tokens may come next, a bit each, `[V / 32]` int32; after a complete text, the stop ids."""
        return torch.from_numpy(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32).copy())

    @property
    def failure(self) -> str | None:
        """Why the grammar cannot be followed any further: a limit on its complexity was reached."""
        return _one_line(self._matcher.get_error()) if self._matcher.is_error() else None


def unpack_words(
    words: torch.Tensor,  # [R, V / 32] int32
    vocab_size: int,
) -> torch.Tensor:
    """Turn `Matcher.allowed_words` into `[R, V]` bool."""
    bits = words[:, :, None] >> torch.arange(32, device=words.device)
    return (bits & 1).bool().flatten(1)[:, :vocab_size]


class GrammarCompiler:
    """Grammars over one tokenizer; safe to use from several threads."""

    def __init__(self, tokenizer: Any, *, vocab_size: int, stop_ids: Collection[int]) -> None:
        """Remember the tokenizer; the tables are made on first use, which takes about a second.

        Args:
            tokenizer: a fast tokenizer of transformers.
            vocab_size: V of the model, padding included.
            stop_ids: what ends a text; a grammar allows them where its text is complete.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = sorted(stop_ids)
        self._tables: LLTokenizer | None = None
        self._prototypes: OrderedDict[Grammar, Matcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, grammar: Grammar) -> Matcher:
        """Give a matcher at the beginning of a text.

        Raises:
            InvalidArgument: the grammar is none, or more than this server takes on.
        """
        with self._lock:
            prototype = self._prototypes.pop(grammar, None)
            if prototype is None:
                prototype = self._compile(grammar)
            self._prototypes[grammar] = prototype  # the last one used is the last to go
            if len(self._prototypes) > _KEPT_PROTOTYPES:
                self._prototypes.popitem(last=False)
            return prototype.fork()

    def warm_up(self) -> None:
        """Make the tables now rather than at the first request."""
        self.matcher(Grammar("regex", "a"))

    def _compile(self, grammar: Grammar) -> Matcher:
        from llguidance import LLMatcher

        field = f"guided_{grammar.kind}"
        if not self._stop_ids:
            raise InvalidArgument(f"{field} needs a target with a stop token, and this one names none")
        try:
            matcher = LLMatcher(self._get_tables(), _translate(field, grammar), log_level=0)
        except (
            ValueError
        ) as error:  # Python's JSON takes numbers and half characters that the library does not
            rule = f"cannot be used: {_one_line(str(error))}"
            raise InvalidArgument.of(field, rule, _shortened(grammar.source), "correct it") from error
        # What the first step allows costs more than it does later, and shows whether anything is possible.
        matcher.compute_bitmask()
        if matcher.is_error():
            rule = f"cannot be used: {_one_line(matcher.get_error())}"
            raise InvalidArgument.of(field, rule, _shortened(grammar.source), "correct it")
        return Matcher(matcher)

    def _get_tables(self) -> LLTokenizer:
        if self._tables is None:
            from llguidance.hf import from_tokenizer

            self._tables = from_tokenizer(
                self._tokenizer, n_vocab=self._vocab_size, eos_token=list(self._stop_ids)
            )
        return self._tables


def _translate(field: str, grammar: Grammar) -> str:
    """Give the library's own form of a grammar.

    Raises:
        InvalidArgument: it is too large, too deep or malformed.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    source = grammar.source
    if not source or len(source.encode()) > _MOST_BYTES:
        rule = f"must have 1 to {_MOST_BYTES} bytes"
        raise InvalidArgument.of(field, rule, len(source.encode()), "leave it out or shorten it")
    if grammar.kind == "json":
        schema = _parse_schema(field, source)
        return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_LAYOUT)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    if grammar.kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(re.escape(choice) for choice in _choices(field, source)))
    if "::=" not in source:
        return LLMatcher.grammar_from_lark(source)
    try:
        return LLMatcher.grammar_from_lark(gbnf_to_lark(source))
    except Exception as error:  # the translator raises whatever its parser trips over
        rule = f"cannot be read as EBNF: {_one_line(str(error))}"
        raise InvalidArgument.of(field, rule, _shortened(source), "correct it") from error


def _parse_schema(field: str, source: str) -> str:
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{field} must be JSON, and is none ({error}); send a JSON schema") from error
    if not isinstance(schema, dict):
        raise InvalidArgument.of(
            field, "must be an object", type(schema).__name__, 'send a JSON schema, {"type": …}'
        )
    levels = _levels(schema)
    if levels > _MOST_LEVELS:
        raise InvalidArgument.of(field, f"may be {_MOST_LEVELS} levels deep", levels, "flatten the schema")
    return source


def _levels(value: object) -> int:
    """How deep a JSON value is nested."""
    deepest, waiting = 0, [(value, 1)]
    while waiting:
        current, level = waiting.pop()
        deepest = max(deepest, level)
        children = current.values() if isinstance(current, dict) else current
        if isinstance(current, dict | list):
            waiting += [(child, level + 1) for child in children if isinstance(child, dict | list)]  # type: ignore[attr-defined]
    return deepest


def _choices(field: str, source: str) -> list[str]:
    choices: list[str] = json.loads(source)
    if not 0 < len(choices) <= _MOST_CHOICES or not all(choices):
        rule = f"must hold 1 to {_MOST_CHOICES} strings that are not empty"
        raise InvalidArgument.of(field, rule, choices[:8], "send at least one choice")
    return choices


def _one_line(text: str) -> str:
    """The gist of a library's message."""
    return " ".join(text.split("<state>", maxsplit=1)[0].split())[:200]


def _shortened(source: str) -> str:
    return source if len(source) <= 80 else f"{source[:77]}…"
