"""Every rule of a request: what passes, what it becomes, and what a refusal says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.errors import DDTreeError, InvalidArgument
from ddtree.limits import Limits
from ddtree.params import GenerationParams, validate
from ddtree.raw_request import RawRequest
from ddtree.sampling_spec import SamplingSpec
from ddtree.text import TextCodec
from ddtree.types import AUTO_BUDGET
from tests.fakes import tokenizers

LIMITS = Limits(vocab_size=400, context_length=64, max_nodes=32, max_prompt_bytes=1000)
NAN, INF = math.nan, math.inf


class WatchedCodec(TextCodec):
    """Counts how often the expensive part was reached."""

    def __init__(self) -> None:
        super().__init__(tokenizers.byte_level(), stop_ids=frozenset({1}))
        self.encoded = 0

    def encode(self, text: str) -> list[int]:
        self.encoded += 1
        return super().encode(text)

    def render_messages(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        self.encoded += 1
        return super().render_messages(messages, variables)


@pytest.fixture
def codec() -> WatchedCodec:
    return WatchedCodec()


def check(codec: TextCodec, **values: Any) -> GenerationParams:
    if not {"text_input", "input_ids", "messages"} & values.keys():
        values["text_input"] = b"a fox"
    return validate(RawRequest(**values), LIMITS, codec)


def test_a_bare_prompt_gets_the_defaults(codec: WatchedCodec) -> None:
    assert check(codec, text_input=b"a fox") == GenerationParams(
        prompt_ids=tuple(codec.encode("a fox")),
        max_tokens=16,
        draft_mode="tree",
        tree_budget=AUTO_BUDGET,
        stop_ids=frozenset({1}),
        sampling=SamplingSpec(),
        stream=False,
        exclude_input_in_output=True,
    )


def test_the_three_kinds_of_prompt(codec: WatchedCodec) -> None:
    assert check(codec, input_ids=[5, 0, 399]).prompt_ids == (5, 0, 399)
    assert check(codec, input_ids=[5, 6, 0, 0], input_lengths=2).prompt_ids == (5, 6)
    messages = b'[{"role": "user", "content": "a"}]'
    assert check(codec, messages=messages).prompt_ids == tuple(codec.encode("<|user|>a<|end|><|assistant|>"))


def test_everything_a_caller_may_set(codec: WatchedCodec) -> None:
    params = check(
        codec, max_tokens=3, stream=True, exclude_input_in_output=False, draft_mode=b"chain", tree_budget=32,
        end_id=9, stop_token_ids=[7, 8], ignore_eos=True, stop_words=["ä".encode(), b"b", b"", b""],
    )  # fmt: skip
    assert (params.max_tokens, params.stream, params.exclude_input_in_output) == (3, True, False)
    assert (params.draft_mode, params.tree_budget) == ("chain", 32)
    assert (params.stop_ids, params.ignore_eos) == (frozenset({1, 7, 8, 9}), True)
    assert params.stop_strings == ("ä", "b")
    assert check(codec, cache_salt="ß".encode()).cache_salt == "ß"
    assert check(codec).cache_salt == ""


def test_other_dialects_mean_the_same(codec: WatchedCodec) -> None:
    ours = check(codec, max_tokens=9, stream=True, top_k=1, top_p=0.5, min_tokens=0, seed=4, temperature=1.0)
    theirs = check(
        codec, request_output_len=9, streaming=True, runtime_top_k=1, runtime_top_p=0.5, min_length=0,
        random_seed=4, temperature=1.0, return_kv_cache_reuse_stats=False,
    )  # fmt: skip
    assert ours == theirs
    assert check(codec, temperature=1.0, seed=4, random_seed=4).sampling.seed == 4


def test_what_existing_clients_send_unasked_is_greedy(codec: WatchedCodec) -> None:
    params = check(
        codec, temperature=1.0, top_k=1, top_p=0.0, repetition_penalty=1.0, length_penalty=1.0, min_length=0,
        presence_penalty=0.0, frequency_penalty=0.0, random_seed=0, beam_width=1, num_return_sequences=1,
        return_log_probs=False, return_context_logits=False, return_generation_logits=False,
        return_perf_metrics=False, stop_words=[b""], bad_words=[b""], logit_bias=b"",
    )  # fmt: skip
    assert params == check(codec)


@pytest.mark.parametrize("value", [AUTO_BUDGET, 0, 32])
def test_budgets_up_to_the_limit(codec: WatchedCodec, value: int) -> None:
    assert check(codec, tree_budget=value).tree_budget == value


def test_the_context_may_be_filled_to_the_last_token(codec: WatchedCodec) -> None:
    assert check(codec, input_ids=[5] * 60, max_tokens=4).max_tokens == 4


@pytest.mark.parametrize(
    ("deadline_ms", "timeout_us", "expected"),
    [
        (None, None, 0),
        (None, 0, 0),  # how a transport without a timeout says so
        (1500, None, 1500),
        (1500, 0, 1500),
        (None, 2_000_001, 2001),
        (1500, 2_000_000, 1500),
        (3000, 2_000_000, 2000),
        (None, 1, 1),
    ],
)
def test_the_earlier_of_deadline_and_transports_timeout_counts(
    codec: WatchedCodec, deadline_ms: int | None, timeout_us: int | None, expected: int
) -> None:
    assert check(codec, deadline_ms=deadline_ms, timeout_us=timeout_us).deadline_ms == expected


MESSAGE = b'[{"role": "user", "content": "a"}]'
REFUSED = [
    ({"text_input": b""}, "text_input must not be empty"),
    ({"input_ids": []}, "input_ids must not be empty"),
    ({"input_ids": [1, 2], "input_lengths": 0}, "input_ids must not be empty"),
    ({"input_ids": [1, 2], "input_lengths": 3}, r"input_lengths must be in \[0, 2\].*got 3"),
    ({"input_ids": [1, 2], "input_lengths": -1}, r"input_lengths must be in \[0, 2\].*got -1"),
    ({"messages": b""}, "messages must not be empty"),
    ({"text_input": b"a", "input_ids": [1]}, "exactly one of .* got text_input and input_ids; send one"),
    ({"text_input": b"a", "messages": MESSAGE}, "got text_input and messages"),
    ({"text_input": b"ab\xff"}, "text_input must be UTF-8"),
    ({"messages": b"\xff"}, "messages must be UTF-8"),
    ({"messages": b"{}"}, "messages must be a list"),
    (
        {"text_input": b"a" * 10_000_000},
        "text_input may have 1000 bytes at most.*got 10000000; shorten the prompt",
    ),
    ({"deadline_ms": 0}, "deadline_ms must be above 0, got 0; leave it out"),
    ({"deadline_ms": -5}, "deadline_ms must be above 0, got -5; leave it out"),
    ({"messages": b"[" * 1001}, "messages may have 1000 bytes at most"),
    ({"input_ids": [5] * 60, "max_tokens": 5}, "60 tokens and max_tokens of 5 do not fit the context of 64"),
    ({"input_ids": [5] * 49}, "49 tokens and max_tokens of 16 do not fit the context of 64"),
    ({"max_tokens": 2**31 - 1}, "max_tokens of 2147483647 do not fit the context of 64"),
    ({"input_ids": [3, 400]}, r"input_ids\[1\] must be in the vocabulary \[0, 400\), got 400"),
    ({"input_ids": [-1]}, r"input_ids\[0\] must be in the vocabulary"),
    ({"max_tokens": 0}, "max_tokens must be above 0, got 0"),
    ({"max_tokens": -3}, "max_tokens must be above 0, got -3"),
    ({"request_output_len": 0}, "max_tokens must be above 0, got 0"),
    ({"tree_budget": 33}, r"tree_budget must be in \[0, 32\] draft nodes, or -1 .*got 33; .* at most 32"),
    ({"tree_budget": -2}, "tree_budget must be in"),
    ({"draft_mode": b"forest"}, "draft_mode must be one of tree, chain, off, got 'forest'"),
    ({"draft_mode": b""}, "draft_mode must be one of"),
    ({"cache_salt": b"s" * 257}, "cache_salt may have 256 bytes at most, got 257; send a shorter one"),
    ({"cache_salt": b"\xff"}, "cache_salt must be"),
    ({"draft_mode": b"\xff"}, "draft_mode must be one of"),
    ({"end_id": 400}, r"end_id must be in the vocabulary \[0, 400\), got 400.*ignore_eos"),
    ({"end_id": -1}, "end_id must be in the vocabulary"),
    ({"stop_words": [b"a"] * 17}, "stop_words may hold 16 strings at most, got 17"),
    ({"stop_words": [b"a" * 257]}, r"stop_words\[0\] must have 1 to 256 bytes, got 257"),
    ({"stop_words": [b"", b"a"]}, r"stop_words\[0\] must have 1 to 256 bytes, got 0"),
    ({"stop_words": [b"a", b"\xc3"]}, r"stop_words\[1\] must be UTF-8"),
    ({"beam_width": 0}, "beam_width must be above 0"),
    (
        {"max_tokens": 5, "request_output_len": 6},
        "request_output_len is another name of max_tokens, which is 5, got 6",
    ),
    ({"stream": True, "streaming": False}, "streaming is another name of stream"),
    ({"top_k": 1, "runtime_top_k": 2}, "runtime_top_k is another name of top_k"),
    ({"min_tokens": 0, "min_length": 1}, "min_length is another name of min_tokens"),
    (
        {"seed": 1, "random_seed": 2},
        "random_seed is another name of seed, which is 1, got 2; send one of them",
    ),
    ({"stop_token_ids": [5, 400]}, r"stop_token_ids\[1\] must be in the vocabulary \[0, 400\), got 400"),
    # Well formed, but nothing serves it (yet).
    ({"return_perf_metrics": True}, "return_perf_metrics is not supported yet"),
    ({"return_kv_cache_reuse_stats": True}, "return_perf_metrics is not supported yet"),
    ({"beam_width": 2}, "beam_width above 1 is not supported: .*got 2"),
    ({"return_context_logits": True}, "return_context_logits is not supported"),
    ({"return_generation_logits": True}, "return_generation_logits is not supported"),
]


@pytest.mark.parametrize(("values", "complaint"), REFUSED)
def test_refusals_name_field_rule_and_value(
    codec: WatchedCodec, values: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"^INVALID_ARGUMENT: .*{complaint}"):
        check(codec, **values)


def test_no_prompt_at_all_is_refused(codec: WatchedCodec) -> None:
    with pytest.raises(InvalidArgument, match=r"exactly one of .* got none of them; send one"):
        validate(RawRequest(max_tokens=3), LIMITS, codec)


@pytest.mark.parametrize(("values", "complaint"), [case for case in REFUSED if "do not fit" not in case[1]])
def test_refusals_come_before_the_tokenizer(
    codec: WatchedCodec, values: dict[str, Any], complaint: str
) -> None:
    del complaint
    with pytest.raises(InvalidArgument):
        check(codec, **values)
    assert codec.encoded == 0


def test_messages_never_repeat_a_huge_value(codec: WatchedCodec) -> None:
    for values in ({"text_input": b"a" * 10_000_000}, {"stop_words": [b"a" * 100_000]}):
        with pytest.raises(InvalidArgument) as refusal:
            check(codec, **values)
        assert len(str(refusal.value)) < 300


def test_ids_of_a_padded_vocabulary_are_allowed(codec: WatchedCodec) -> None:
    assert check(codec, input_ids=[399]).prompt_ids == (399,)


SHARED = WatchedCodec()
ANY_VALUE = {
    "int | None": st.integers(-(2**31), 2**31),
    "float | None": st.floats(width=32),
    "bool | None": st.booleans(),
    "bytes | None": st.binary(max_size=8),
    "Sequence[int] | None": st.lists(st.integers(-(2**31), 2**31), max_size=4),
    "Sequence[bytes] | None": st.lists(st.binary(max_size=4), max_size=4),
}


@given(
    values=st.fixed_dictionaries({}, optional={f.name: ANY_VALUE[str(f.type)] for f in fields(RawRequest)})
)
def test_any_values_give_parameters_or_a_refusal(values: dict[str, Any]) -> None:
    try:
        params = validate(RawRequest(**values), LIMITS, SHARED)
    except DDTreeError:
        return
    assert 0 < len(params.prompt_ids) <= LIMITS.context_length - params.max_tokens
    assert math.isfinite(params.sampling.temperature)
