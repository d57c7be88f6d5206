"""What a caller asks for, and the one place where it is checked.

`validate` turns a `RawRequest` into `GenerationParams`, which the engine trusts, or says what is wrong.
Checks run from cheap to expensive: the text is tokenised last. Knows no transport and no stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast, get_args

from ddtree.errors import InvalidArgument
from ddtree.limits import Limits
from ddtree.raw_request import RawRequest, merge_aliases
from ddtree.text import TextCodec, decode_utf8, parse_messages
from ddtree.types import AUTO_BUDGET

DraftMode = Literal["tree", "chain", "off"]

DEFAULT_MAX_TOKENS: Final = 16
_LARGEST_SEED: Final = 2**64 - 1


@dataclass(frozen=True)
class GenerationParams:
    """One validated sequence. Off has one value: temperature 0 is greedy; top_k 0 and top_p 1 cut nothing."""

    prompt_ids: tuple[int, ...]
    max_tokens: int = DEFAULT_MAX_TOKENS
    draft_mode: DraftMode = "tree"
    tree_budget: int = AUTO_BUDGET  # most draft nodes, or AUTO_BUDGET
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False  # no stop id ends the sequence
    exclude_input_in_output: bool = True
    stream: bool = False
    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    min_p: float = 0.0  # 0 = off
    seed: int = 0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    num_return_sequences: int = 1


@dataclass(frozen=True)
class _Refusal:
    """A value that is well formed and still refused, as what serves it is missing."""

    field: str
    is_asked: Callable[[RawRequest], bool]
    rule: str
    way_out: str = "leave it out"


_NOT_YET: Final = "is not supported yet"
_NO_LOGITS: Final = "is not supported: logits never leave the verifier"

# Whoever adds a feature removes its row. Neutral values pass, since existing clients send them.
_REFUSALS: Final[tuple[_Refusal, ...]] = (
    _Refusal(
        "temperature",
        lambda raw: bool(raw.temperature) and raw.top_k != 1,
        f"above 0 {_NOT_YET} (decoding is greedy)",
        "send temperature 0, or top_k 1, or leave temperature out",
    ),
    _Refusal(
        "repetition_penalty", lambda raw: raw.repetition_penalty not in (None, 1), f"other than 1 {_NOT_YET}"
    ),
    _Refusal("presence_penalty", lambda raw: bool(raw.presence_penalty), f"other than 0 {_NOT_YET}"),
    _Refusal("frequency_penalty", lambda raw: bool(raw.frequency_penalty), f"other than 0 {_NOT_YET}"),
    _Refusal("logit_bias", lambda raw: bool(raw.logit_bias), _NOT_YET),
    _Refusal("bad_words", lambda raw: any(raw.bad_words or ()), _NOT_YET),
    _Refusal(
        "min_tokens",
        lambda raw: bool(raw.min_tokens),
        f"above 0 {_NOT_YET}",
        "leave it out (ignore_eos goes on until max_tokens)",
    ),
    _Refusal(
        "num_return_sequences",
        lambda raw: raw.num_return_sequences not in (None, 1),
        f"above 1 {_NOT_YET}",
        "send the prompt in several rows, or leave it out",
    ),
    _Refusal("return_log_probs", lambda raw: bool(raw.return_log_probs), _NOT_YET),
    _Refusal(
        "return_perf_metrics",
        lambda raw: bool(raw.return_perf_metrics),
        _NOT_YET,
        "leave it out (num_rounds, acceptance_rate and the totals need no flag)",
    ),
    _Refusal(
        "beam_width",
        lambda raw: raw.beam_width not in (None, 1),
        "above 1 is not supported: a draft tree belongs to one sequence, not to beams",
    ),
    _Refusal("return_context_logits", lambda raw: bool(raw.return_context_logits), _NO_LOGITS),
    _Refusal("return_generation_logits", lambda raw: bool(raw.return_generation_logits), _NO_LOGITS),
)


def validate(raw: RawRequest, limits: Limits, text: TextCodec) -> GenerationParams:
    """Check one row and complete it with defaults.

    Raises:
        InvalidArgument: names the field, its rule, the value and the way out.
    """
    raw = merge_aliases(raw)
    _check_numbers(raw)
    max_tokens = DEFAULT_MAX_TOKENS if raw.max_tokens is None else raw.max_tokens
    if (raw.min_tokens or 0) > max_tokens:
        raise InvalidArgument.of(
            "min_tokens", f"must not be above max_tokens {max_tokens}", raw.min_tokens, "lower it"
        )
    draft_mode, tree_budget = _draft_mode(raw), _tree_budget(raw, limits)
    stop_ids, stop_strings = _stop_ids(raw, limits, text), _stop_strings(raw, limits)
    for refusal in _REFUSALS:
        if refusal.is_asked(raw):
            got = getattr(raw, refusal.field)
            raise InvalidArgument.of(refusal.field, refusal.rule, got, refusal.way_out)
    prompt_ids = _prompt_ids(raw, limits, text)
    if len(prompt_ids) + max_tokens > limits.context_length:
        raise InvalidArgument(
            f"prompt of {len(prompt_ids)} tokens and max_tokens of {max_tokens} do not fit the context of "
            f"{limits.context_length} tokens together; shorten the prompt or lower max_tokens"
        )
    is_greedy = not raw.temperature or raw.top_k == 1
    return GenerationParams(
        prompt_ids=tuple(prompt_ids),
        max_tokens=max_tokens,
        draft_mode=draft_mode,
        tree_budget=tree_budget,
        stop_ids=stop_ids,
        stop_strings=stop_strings,
        ignore_eos=bool(raw.ignore_eos),
        exclude_input_in_output=raw.exclude_input_in_output is not False,
        stream=bool(raw.stream),
        temperature=0.0 if is_greedy else cast("float", raw.temperature),
        top_k=0 if is_greedy else max(raw.top_k or 0, 0),
        top_p=raw.top_p or 1.0,
        min_p=raw.min_p or 0.0,
        seed=raw.seed or 0,
        min_tokens=raw.min_tokens or 0,
        repetition_penalty=1.0 if raw.repetition_penalty is None else raw.repetition_penalty,
        presence_penalty=raw.presence_penalty or 0.0,
        frequency_penalty=raw.frequency_penalty or 0.0,
        num_return_sequences=raw.num_return_sequences or 1,
    )


def _check_numbers(raw: RawRequest) -> None:
    """Check each number by itself, whether or not it is put to use."""

    def must(field: str, is_right: Callable[[Any], bool], rule: str, way_out: str) -> None:
        value = getattr(raw, field)
        if value is not None and not is_right(value):
            raise InvalidArgument.of(field, rule, value, way_out)

    def is_share(value: float) -> bool:
        return 0 <= value <= 1  # false for NaN

    must("max_tokens", lambda n: n > 0, "must be above 0", f"leave it out for {DEFAULT_MAX_TOKENS}")
    must("min_tokens", lambda n: n >= 0, "must be 0 or more", "send 0 to turn it off")
    must("num_return_sequences", lambda n: n > 0, "must be above 0", "leave it out for 1")
    must("beam_width", lambda n: n > 0, "must be above 0", "leave it out for 1")
    must(
        "temperature",
        lambda t: t >= 0 and math.isfinite(t),
        "must be finite and 0 or more",
        "send 0 for greedy",
    )
    must("top_k", lambda k: k >= -1, "must be -1 or 0 (off) or more", "send 0 to turn it off")
    must("top_p", is_share, "must be in [0, 1]", "send 1 (or 0) to turn it off")
    must("min_p", is_share, "must be in [0, 1]", "send 0 to turn it off")
    must(
        "seed", lambda n: 0 <= n <= _LARGEST_SEED, f"must be in [0, {_LARGEST_SEED}]", "send one in the range"
    )
    must(
        "repetition_penalty",
        lambda p: p > 0 and math.isfinite(p),
        "must be finite and above 0",
        "send 1 to turn it off",
    )
    for field in ("presence_penalty", "frequency_penalty", "length_penalty"):
        must(field, math.isfinite, "must be finite", "leave it out")


def _draft_mode(raw: RawRequest) -> DraftMode:
    if raw.draft_mode is None:
        return "tree"
    mode = raw.draft_mode.decode("utf-8", errors="replace")
    if mode not in get_args(DraftMode):
        raise InvalidArgument.of(
            "draft_mode", f"must be one of {', '.join(get_args(DraftMode))}", mode, "send one of them"
        )
    return cast("DraftMode", mode)


def _tree_budget(raw: RawRequest, limits: Limits) -> int:
    budget = AUTO_BUDGET if raw.tree_budget is None else raw.tree_budget
    if budget != AUTO_BUDGET and not 0 <= budget <= limits.max_nodes:
        rule = f"must be in [0, {limits.max_nodes}] draft nodes, or {AUTO_BUDGET} to let the server choose"
        raise InvalidArgument.of(
            "tree_budget", rule, budget, f"leave it out or send at most {limits.max_nodes}"
        )
    return budget


def _stop_ids(raw: RawRequest, limits: Limits, text: TextCodec) -> frozenset[int]:
    """Add a caller's `end_id` to the model's own ids: clients take it from a tokenizer, and those err."""
    if raw.end_id is None:
        return text.stop_ids
    if not 0 <= raw.end_id < limits.vocab_size:
        rule = f"must be in the vocabulary [0, {limits.vocab_size})"
        way_out = "leave it out for the model's own, or send ignore_eos for none"
        raise InvalidArgument.of("end_id", rule, raw.end_id, way_out)
    return text.stop_ids | {raw.end_id}


def _stop_strings(raw: RawRequest, limits: Limits) -> tuple[str, ...]:
    words = list(raw.stop_words or ())
    while words and not words[-1]:
        words.pop()  # pads the shorter rows of a batch, and is what `"stop_words": ""` means
    if len(words) > limits.max_stop_strings:
        rule = f"may hold {limits.max_stop_strings} strings at most"
        raise InvalidArgument.of("stop_words", rule, len(words), "send fewer")
    for index, word in enumerate(words):
        field = f"stop_words[{index}]"
        if not 0 < len(word) <= limits.max_stop_bytes:
            rule = f"must have 1 to {limits.max_stop_bytes} bytes"
            raise InvalidArgument.of(field, rule, len(word), "leave it out or shorten it")
    return tuple(decode_utf8(f"stop_words[{index}]", word) for index, word in enumerate(words))


def _prompt_ids(raw: RawRequest, limits: Limits, text: TextCodec) -> Sequence[int]:
    given = [name for name in ("text_input", "input_ids", "messages") if getattr(raw, name) is not None]
    if len(given) != 1:
        got = " and ".join(given) or "none of them"
        raise InvalidArgument(
            f"exactly one of text_input, input_ids and messages is the prompt, got {got}; send one"
        )
    if raw.input_ids is not None:
        return _checked_ids(raw.input_ids, raw.input_lengths, limits)
    field = given[0]
    value = cast("bytes", getattr(raw, field))
    if not value:
        raise InvalidArgument.of(field, "must not be empty", value, "send a prompt")
    if len(value) > limits.max_prompt_bytes:
        rule = f"may have {limits.max_prompt_bytes} bytes at most, as more cannot fit the context"
        raise InvalidArgument.of(field, rule, len(value), "shorten the prompt")
    decoded = decode_utf8(field, value)
    ids = text.encode(decoded) if field == "text_input" else text.render_messages(parse_messages(decoded))
    if not ids:
        raise InvalidArgument.of(field, "must not be empty", decoded, "send a prompt that has tokens")
    outside = next((token_id for token_id in ids if token_id >= limits.vocab_size), None)
    assert outside is None, f"the tokenizer gives id {outside} to a model of {limits.vocab_size}"
    return ids


def _checked_ids(ids: Sequence[int], length: int | None, limits: Limits) -> Sequence[int]:
    if length is not None:
        if not 0 <= length <= len(ids):
            rule = f"must be in [0, {len(ids)}], as input_ids has {len(ids)}"
            raise InvalidArgument.of("input_lengths", rule, length, "send the count of ids of this row")
        ids = ids[:length]
    if not ids:
        raise InvalidArgument("input_ids must not be empty, got no ids; send a prompt")
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < limits.vocab_size:
            rule = f"must be in the vocabulary [0, {limits.vocab_size})"
            raise InvalidArgument.of(
                f"input_ids[{index}]", rule, token_id, "tokenise with the target's tokenizer"
            )
    return ids
