"""What a caller asks for, and the one place where it is checked.

`validate` turns a `RawRequest` into `GenerationParams`, which the engine trusts, or says what is wrong.
Checks run from cheap to expensive: the text is tokenised last. Knows no transport and no stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, cast, get_args

from ddtree.errors import InvalidArgument
from ddtree.grammar import GrammarCompiler
from ddtree.limits import Limits
from ddtree.raw_request import RawRequest, merge_aliases
from ddtree.sampling_params import check_sampling, finish_sampling
from ddtree.sampling_spec import SamplingSpec
from ddtree.text import TextCodec, decode_utf8, parse_messages, parse_template_variables
from ddtree.types import AUTO_BUDGET

DraftMode = Literal["tree", "chain", "off"]

DEFAULT_MAX_TOKENS: Final = 16
_MOST_SALT_BYTES: Final = 256


@dataclass(frozen=True)
class GenerationParams:
    """One validated row, from which `num_return_sequences` sequences are made."""

    prompt_ids: tuple[int, ...]
    max_tokens: int = DEFAULT_MAX_TOKENS
    deadline_ms: int = 0  # from arrival; 0 for none
    draft_mode: DraftMode = "tree"
    tree_budget: int = AUTO_BUDGET  # most draft nodes, or AUTO_BUDGET
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False  # no stop id ends the sequence
    exclude_input_in_output: bool = True
    stream: bool = False
    sampling: SamplingSpec = field(default_factory=SamplingSpec)
    num_return_sequences: int = 1
    cache_salt: str = ""  # cached prompt pages are shared only under the same one

    def sequences(self) -> list[GenerationParams]:
        """The row once for each of its sequences, which differ by their noise."""
        return [
            replace(self, sampling=replace(self.sampling, sequence_index=index))
            for index in range(self.num_return_sequences)
        ]


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


def validate(
    raw: RawRequest, limits: Limits, text: TextCodec, grammars: GrammarCompiler | None = None
) -> GenerationParams:
    """Check one row and complete it with defaults.

    Args:
        raw: the row.
        limits: what the target can do.
        text: the target's tokenizer.
        grammars: sees whether a grammar can be compiled; without it none is accepted.

    Raises:
        InvalidArgument: names the field, its rule, the value and the way out.
    """
    raw = merge_aliases(raw)
    max_tokens = DEFAULT_MAX_TOKENS if raw.max_tokens is None else raw.max_tokens
    for name in ("max_tokens", "beam_width", "deadline_ms"):
        value = getattr(raw, name)
        if value is not None and value <= 0:
            raise InvalidArgument.of(name, "must be above 0", value, "leave it out for the default")
    if (raw.min_tokens or 0) > max_tokens:
        raise InvalidArgument.of(
            "min_tokens", f"must not be above max_tokens {max_tokens}", raw.min_tokens, "lower it"
        )
    draft_mode, tree_budget = _draft_mode(raw), _tree_budget(raw, limits)
    stop_ids, stop_strings = _stop_ids(raw, limits, text), _stop_strings(raw, limits)
    sampling = check_sampling(raw, limits, frozenset() if raw.ignore_eos else stop_ids)
    for refusal in _REFUSALS:
        if refusal.is_asked(raw):
            got = getattr(raw, refusal.field)
            raise InvalidArgument.of(refusal.field, refusal.rule, got, refusal.way_out)
    cache_salt = _cache_salt(raw)
    prompt_ids = _prompt_ids(raw, limits, text)
    if len(prompt_ids) + max_tokens > limits.context_length:
        raise InvalidArgument(
            f"prompt of {len(prompt_ids)} tokens and max_tokens of {max_tokens} do not fit the context of "
            f"{limits.context_length} tokens together; shorten the prompt or lower max_tokens"
        )
    return GenerationParams(
        prompt_ids=tuple(prompt_ids),
        max_tokens=max_tokens,
        deadline_ms=_deadline_ms(raw),
        draft_mode=draft_mode,
        tree_budget=tree_budget,
        stop_ids=stop_ids,
        stop_strings=stop_strings,
        ignore_eos=bool(raw.ignore_eos),
        exclude_input_in_output=raw.exclude_input_in_output is not False,
        stream=bool(raw.stream),
        sampling=finish_sampling(sampling, raw, limits, text, grammars),
        num_return_sequences=raw.num_return_sequences or 1,
        cache_salt=cache_salt,
    )


def _deadline_ms(raw: RawRequest) -> int:
    """The earlier of what the request says and what its transport waits for."""
    given = [raw.deadline_ms or 0, math.ceil((raw.timeout_us or 0) / 1000)]
    return min((value for value in given if value > 0), default=0)


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


def _cache_salt(raw: RawRequest) -> str:
    salt = raw.cache_salt or b""
    if len(salt) > _MOST_SALT_BYTES:
        rule = f"may have {_MOST_SALT_BYTES} bytes at most"
        raise InvalidArgument.of("cache_salt", rule, len(salt), "send a shorter one, such as a hash")
    return decode_utf8("cache_salt", salt)


def _stop_ids(raw: RawRequest, limits: Limits, text: TextCodec) -> frozenset[int]:
    """Add a caller's ids to the model's own: clients take `end_id` from a tokenizer, and those err."""
    given = {f"stop_token_ids[{index}]": token_id for index, token_id in enumerate(raw.stop_token_ids or ())}
    if raw.end_id is not None:
        given["end_id"] = raw.end_id
    for name, token_id in given.items():
        if not 0 <= token_id < limits.vocab_size:
            rule = f"must be in the vocabulary [0, {limits.vocab_size})"
            way_out = "leave it out for the model's own, or send ignore_eos for none"
            raise InvalidArgument.of(name, rule, token_id, way_out)
    return text.stop_ids | set(given.values())


def _stop_strings(raw: RawRequest, limits: Limits) -> tuple[str, ...]:
    words = list(raw.stop_words or ())
    while words and not words[-1]:
        words.pop()  # pads the shorter rows of a batch, and is what `"stop_words": ""` means
    if len(words) > limits.max_stop_strings:
        rule = f"may hold {limits.max_stop_strings} strings at most"
        raise InvalidArgument.of("stop_words", rule, len(words), "send fewer")
    for index, word in enumerate(words):
        name = f"stop_words[{index}]"
        if not 0 < len(word) <= limits.max_stop_bytes:
            rule = f"must have 1 to {limits.max_stop_bytes} bytes"
            raise InvalidArgument.of(name, rule, len(word), "leave it out or shorten it")
    return tuple(decode_utf8(f"stop_words[{index}]", word) for index, word in enumerate(words))


def _prompt_ids(raw: RawRequest, limits: Limits, text: TextCodec) -> Sequence[int]:
    given = [name for name in ("text_input", "input_ids", "messages") if getattr(raw, name) is not None]
    if len(given) != 1:
        got = " and ".join(given) or "none of them"
        raise InvalidArgument(
            f"exactly one of text_input, input_ids and messages is the prompt, got {got}; send one"
        )
    if raw.chat_template_kwargs and raw.messages is None:
        raise InvalidArgument.of(
            "chat_template_kwargs", "needs messages, which alone are rendered", given[0], "leave it out"
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
    if field == "text_input":
        ids = text.encode(decoded)
    else:
        ids = text.render_messages(parse_messages(decoded), _template_variables(raw, limits))
    if not ids:
        raise InvalidArgument.of(field, "must not be empty", decoded, "send a prompt that has tokens")
    outside = next((token_id for token_id in ids if token_id >= limits.vocab_size), None)
    assert outside is None, f"the tokenizer gives id {outside} to a model of {limits.vocab_size}"
    return ids


def _template_variables(raw: RawRequest, limits: Limits) -> Mapping[str, Any]:
    value = raw.chat_template_kwargs or b""
    if len(value) > limits.max_prompt_bytes:
        rule = f"may have {limits.max_prompt_bytes} bytes at most"
        raise InvalidArgument.of("chat_template_kwargs", rule, len(value), "shorten it")
    return parse_template_variables(decode_utf8("chat_template_kwargs", value)) if value else {}


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
