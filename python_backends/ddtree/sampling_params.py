"""Checks what a request says about choosing tokens and makes a `SamplingSpec` of it.

Numbers are checked first, whether or not they are put to use; words are tokenised and grammars compiled in a
second step, once nothing else can be refused. Knows no stage and no transport.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, cast

from ddtree.errors import InvalidArgument
from ddtree.grammar import GrammarCompiler
from ddtree.limits import Limits
from ddtree.raw_request import RawRequest
from ddtree.sampling_spec import NO_LOG_PROBS, Grammar, SamplingSpec
from ddtree.text import TextCodec, decode_utf8

MOST_SEQUENCES: Final = 64
_LARGEST_SEED: Final = 2**64 - 1
_LARGEST_BIAS: Final = 100.0
_MOST_TOP_LOG_PROBS: Final = 20
_MOST_BAD_WORDS: Final = 256
# TensorRT-LLM's way to say the same: guided_decoding_guide_type to ours.
_GUIDE_TYPES: Final = {"json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}


def check_sampling(raw: RawRequest, limits: Limits, stop_ids: frozenset[int]) -> SamplingSpec:
    """Check everything but words and grammar, and complete it with defaults.

    Args:
        raw: one row, aliases merged.
        limits: what the target can do.
        stop_ids: what ends the sequence; empty when nothing does.

    Raises:
        InvalidArgument: names the field, its rule, the value and the way out.
    """
    _check_numbers(raw)
    _bad_words(raw, limits)
    is_greedy = not raw.temperature or raw.top_k == 1
    if (raw.num_return_sequences or 1) > 1 and is_greedy:
        rule = "above 1 needs a temperature above 0, as greedy sequences are all the same"
        raise InvalidArgument.of(
            "num_return_sequences", rule, raw.num_return_sequences, "set temperature, or leave it out"
        )
    if raw.num_top_log_probs and not raw.return_log_probs:
        rule = "above 0 needs return_log_probs"
        raise InvalidArgument.of("num_top_log_probs", rule, raw.num_top_log_probs, "send both or neither")
    spec = SamplingSpec(
        repetition_penalty=1.0 if raw.repetition_penalty is None else raw.repetition_penalty,
        presence_penalty=raw.presence_penalty or 0.0,
        frequency_penalty=raw.frequency_penalty or 0.0,
        logit_bias=_logit_bias(raw.logit_bias or b"", limits),
        min_tokens=raw.min_tokens or 0,
        stop_ids=tuple(sorted(stop_ids)) if raw.min_tokens else (),
        top_log_probs=raw.num_top_log_probs or 0 if raw.return_log_probs else NO_LOG_PROBS,
        grammar=_grammar(raw),
    )
    if spec.grammar is not None:
        _check_guided(raw, f"guided_{spec.grammar.kind}")
    if is_greedy:
        return spec
    return replace(
        spec,
        temperature=cast("float", raw.temperature),
        top_k=max(raw.top_k or 0, 0),
        top_p=raw.top_p or 1.0,
        min_p=raw.min_p or 0.0,
        seed=secrets.randbits(64) if raw.seed is None else raw.seed,
    )


def finish_sampling(
    spec: SamplingSpec, raw: RawRequest, limits: Limits, text: TextCodec, grammars: GrammarCompiler | None
) -> SamplingSpec:
    """Tokenise the bad words and see that the grammar can be compiled.

    Raises:
        InvalidArgument: a word or the grammar cannot be used.
    """
    if spec.grammar is not None:
        if grammars is None:
            raise InvalidArgument(f"guided_{spec.grammar.kind} is not served here; leave it out")
        grammars.matcher(spec.grammar)
    # Inside a text a word mostly comes with its space, which makes other tokens of it.
    forms = [form for word in _bad_words(raw, limits) for form in (word, f" {word}")]
    words = dict.fromkeys(tuple(text.encode_fragment(form)) for form in forms)
    return replace(spec, bad_words=tuple(word for word in words if word))


def _check_numbers(raw: RawRequest) -> None:
    def must(field: str, is_right: Callable[[Any], bool], rule: str, way_out: str) -> None:
        value = getattr(raw, field)
        if value is not None and not is_right(value):
            raise InvalidArgument.of(field, rule, value, way_out)

    def is_share(value: float) -> bool:
        return 0 <= value <= 1  # false for NaN

    off = "send 0 to turn it off"
    must("min_tokens", lambda n: n >= 0, "must be 0 or more", off)
    must(
        "num_return_sequences",
        lambda n: 0 < n <= MOST_SEQUENCES,
        f"must be in [1, {MOST_SEQUENCES}]",
        "leave it out for 1",
    )
    must("temperature", lambda t: 0 <= t < math.inf, "must be finite and 0 or more", "send 0 for greedy")
    must("top_k", lambda k: k >= -1, "must be -1 or 0 (off) or more", off)
    must("top_p", is_share, "must be in [0, 1]", "send 1 (or 0) to turn it off")
    must("min_p", is_share, "must be in [0, 1]", off)
    must(
        "seed", lambda n: 0 <= n <= _LARGEST_SEED, f"must be in [0, {_LARGEST_SEED}]", "send one in the range"
    )
    must(
        "repetition_penalty",
        lambda p: 0 < p < math.inf,
        "must be finite and above 0",
        "send 1 to turn it off",
    )
    for field in ("presence_penalty", "frequency_penalty", "length_penalty"):
        must(field, math.isfinite, "must be finite", "leave it out")
    must(
        "num_top_log_probs",
        lambda n: 0 <= n <= _MOST_TOP_LOG_PROBS,
        f"must be in [0, {_MOST_TOP_LOG_PROBS}]",
        "leave it out for none",
    )


def _logit_bias(value: bytes, limits: Limits) -> tuple[tuple[int, float], ...]:
    form = 'send {"token id": number, …}'
    if not value:
        return ()
    try:
        biases = json.loads(decode_utf8("logit_bias", value))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"logit_bias must be JSON, and is none ({error}); {form}") from error
    if not isinstance(biases, dict):
        raise InvalidArgument.of("logit_bias", "must be an object", type(biases).__name__, form)
    found: dict[int, float] = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and int(key[:20]) < limits.vocab_size):
            rule = f"must name token ids in the vocabulary [0, {limits.vocab_size})"
            raise InvalidArgument.of("logit_bias", rule, key[:20], form)
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not is_number or not -_LARGEST_BIAS <= bias <= _LARGEST_BIAS:
            rule = f"must be a number in [-{_LARGEST_BIAS:g}, {_LARGEST_BIAS:g}]"
            raise InvalidArgument.of(f"logit_bias[{key}]", rule, str(bias)[:20], form)
        found[int(key)] = float(bias)
    return tuple(sorted(found.items()))


def _grammar(raw: RawRequest) -> Grammar | None:
    given = {
        "json": raw.guided_json,
        "regex": raw.guided_regex,
        "grammar": raw.guided_grammar,
        "choice": raw.guided_choice,
    }
    grammars = []
    for kind, value in given.items():
        if not value:
            continue
        if kind == "choice":
            choices = [decode_utf8("guided_choice", choice) for choice in cast("list[bytes]", value)]
            if any(choices):
                grammars.append(Grammar("choice", json.dumps([choice for choice in choices if choice])))
        else:
            grammars.append(Grammar(kind, decode_utf8(f"guided_{kind}", cast("bytes", value))))  # type: ignore[arg-type]
    if raw.guided_decoding_guide_type or raw.guided_decoding_guide:
        grammars.append(_guide(raw.guided_decoding_guide_type or b"", raw.guided_decoding_guide or b""))
    if len(grammars) > 1:
        names = " and ".join(f"guided_{grammar.kind}" for grammar in grammars)
        raise InvalidArgument(f"one grammar can guide a sequence, got {names}; send one of them")
    return grammars[0] if grammars else None


def _guide(kind: bytes, guide: bytes) -> Grammar:
    name = decode_utf8("guided_decoding_guide_type", kind)
    if name == "json":
        return Grammar("json", '{"type": "object"}')
    if name not in _GUIDE_TYPES:
        rule = f"must be one of json, {', '.join(_GUIDE_TYPES)}"
        raise InvalidArgument.of("guided_decoding_guide_type", rule, name, "send one of them")
    source = decode_utf8("guided_decoding_guide", guide)
    return Grammar(_GUIDE_TYPES[name], source)  # type: ignore[arg-type]


def _check_guided(raw: RawRequest, field: str) -> None:
    """A grammar alone says what may come and where the text ends."""
    for other, is_set in (
        ("min_tokens", bool(raw.min_tokens)),
        ("ignore_eos", bool(raw.ignore_eos)),
        ("bad_words", any(raw.bad_words or ())),
    ):
        if is_set:
            raise InvalidArgument(
                f"{field} and {other} contradict each other, as together they may leave no token to choose; "
                f"leave {other} out"
            )


def _bad_words(raw: RawRequest, limits: Limits) -> list[str]:
    words = [word for word in raw.bad_words or () if word]
    if len(words) > _MOST_BAD_WORDS:
        rule = f"may hold {_MOST_BAD_WORDS} strings at most"
        raise InvalidArgument.of("bad_words", rule, len(words), "send fewer")
    for index, word in enumerate(words):
        field = f"bad_words[{index}]"
        if len(word) > limits.max_stop_bytes:
            rule = f"may have {limits.max_stop_bytes} bytes at most"
            raise InvalidArgument.of(field, rule, len(word), "shorten it")
    return [decode_utf8(f"bad_words[{index}]", word) for index, word in enumerate(words)]
