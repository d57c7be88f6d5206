"""Every rule about choosing tokens: what passes, what it becomes, and what a refusal says."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ddtree.errors import InvalidArgument
from ddtree.grammar import GrammarCompiler
from ddtree.limits import Limits
from ddtree.params import GenerationParams, validate
from ddtree.raw_request import RawRequest
from ddtree.sampling_spec import Grammar, SamplingSpec
from ddtree.text import TextCodec
from tests.fakes import tokenizers

LIMITS = Limits(vocab_size=400, context_length=64, max_nodes=32, max_prompt_bytes=1000)
NAN, INF = math.nan, math.inf


@pytest.fixture
def codec() -> TextCodec:
    return TextCodec(tokenizers.byte_level(), stop_ids=frozenset({1}))


def check(codec: TextCodec, **values: Any) -> GenerationParams:
    return validate(RawRequest(text_input=b"a fox", **values), LIMITS, codec)


def test_everything_about_choosing_tokens(codec: TextCodec) -> None:
    spec = check(
        codec, temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=2**64 - 1, repetition_penalty=1.25,
        presence_penalty=-0.5, frequency_penalty=0.75, logit_bias=b'{"9": -100, "3": 0.5}', min_tokens=3,
        return_log_probs=True, num_top_log_probs=4, bad_words=[b"fox", b""],
    ).sampling  # fmt: skip
    assert spec == SamplingSpec(
        temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=2**64 - 1, repetition_penalty=1.25,
        presence_penalty=-0.5, frequency_penalty=0.75, logit_bias=((3, 0.5), (9, -100.0)), min_tokens=3,
        stop_ids=(1,), top_log_probs=4,
        bad_words=(tuple(codec.encode_fragment("fox")), tuple(codec.encode_fragment(" fox"))),
    )  # fmt: skip
    assert SamplingSpec.from_json(spec.to_json()) == spec


def test_ignoring_stop_ids_leaves_min_tokens_nothing_to_forbid(codec: TextCodec) -> None:
    assert check(codec, min_tokens=3, ignore_eos=True).sampling.stop_ids == ()


def test_an_absent_seed_is_a_new_one_each_time_and_zero_is_a_seed(codec: TextCodec) -> None:
    seeds = {check(codec, temperature=1.0).sampling.seed for _ in range(8)}
    assert len(seeds) == 8
    assert check(codec, temperature=1.0, seed=0).sampling.seed == 0


@pytest.mark.parametrize(
    ("values", "grammar"),
    [
        ({"guided_json": b'{"type": "object"}'}, Grammar("json", '{"type": "object"}')),
        ({"guided_regex": b"a+"}, Grammar("regex", "a+")),
        ({"guided_grammar": b'root ::= "a"'}, Grammar("grammar", 'root ::= "a"')),
        ({"guided_choice": ["ä".encode(), b"b", b""]}, Grammar("choice", '["\\u00e4", "b"]')),
        ({"guided_decoding_guide_type": b"json"}, Grammar("json", '{"type": "object"}')),
        (
            {"guided_decoding_guide_type": b"regex", "guided_decoding_guide": b"a"},
            Grammar("regex", "a"),
        ),
        ({"guided_choice": [b""], "guided_json": b""}, None),
    ],
)
def test_every_way_to_name_a_grammar(
    codec: TextCodec, values: dict[str, Any], grammar: Grammar | None
) -> None:
    raw = RawRequest(text_input=b"a fox", **values)
    compiler = GrammarCompiler(tokenizers.byte_level(), vocab_size=400, stop_ids={1})
    assert validate(raw, LIMITS, codec, compiler).sampling.grammar == grammar


def test_a_grammar_is_refused_where_nothing_compiles_it(codec: TextCodec) -> None:
    with pytest.raises(InvalidArgument, match="guided_regex is not served here; leave it out"):
        check(codec, guided_regex=b"a")


@pytest.mark.parametrize(("value", "expected"), [(0.0, 1.0), (1.0, 1.0), (0.25, 0.25)])
def test_top_p_zero_is_off(codec: TextCodec, value: float, expected: float) -> None:
    assert check(codec, temperature=1.0, top_p=value).sampling.top_p == expected


@pytest.mark.parametrize("value", [-1, 0])
def test_top_k_is_off_by_two_values(codec: TextCodec, value: int) -> None:
    assert check(codec, temperature=1.0, top_k=value).sampling.top_k == 0


REFUSED = [
    ({"temperature": -0.5}, "temperature must be finite and 0 or more, got -0.5; send 0 for greedy"),
    ({"temperature": NAN}, "temperature must be finite"),
    ({"temperature": INF, "top_k": 1}, "temperature must be finite"),
    ({"top_p": -0.1}, r"top_p must be in \[0, 1\], got -0.1"),
    ({"top_p": 1.5}, r"top_p must be in \[0, 1\], got 1.5"),
    ({"runtime_top_p": NAN}, r"top_p must be in \[0, 1\], got nan"),
    ({"min_p": 1.1}, r"min_p must be in \[0, 1\]"),
    ({"min_p": NAN}, r"min_p must be in \[0, 1\]"),
    ({"top_k": -2}, "top_k must be -1 or 0"),
    ({"seed": -1}, r"seed must be in \[0, 18446744073709551615\]"),
    ({"seed": 2**64}, "seed must be in"),
    ({"repetition_penalty": 0.0}, "repetition_penalty must be finite and above 0"),
    ({"repetition_penalty": NAN}, "repetition_penalty must be finite"),
    ({"presence_penalty": INF}, "presence_penalty must be finite"),
    ({"frequency_penalty": NAN}, "frequency_penalty must be finite"),
    ({"length_penalty": NAN}, "length_penalty must be finite"),
    ({"min_tokens": -1}, "min_tokens must be 0 or more"),
    ({"min_tokens": 17}, "min_tokens must not be above max_tokens 16, got 17"),
    ({"min_length": 17}, "min_tokens must not be above max_tokens 16"),
    ({"num_return_sequences": 0}, r"num_return_sequences must be in \[1, 64\], got 0"),
    ({"logit_bias": b"{5: 1}"}, "logit_bias must be JSON"),
    ({"logit_bias": b"\xff"}, "logit_bias must be UTF-8"),
    ({"logit_bias": b"[5]"}, "logit_bias must be an object, got 'list'"),
    (
        {"logit_bias": b'{"400": 1}'},
        r"logit_bias must name token ids in .*\[0, 400\), got '400'",
    ),
    ({"logit_bias": b'{"-1": 1}'}, "logit_bias must name token ids"),
    ({"logit_bias": b'{"5": 101}'}, r"logit_bias\[5\] must be a number in \[-100, 100\], got '101'"),
    ({"logit_bias": b'{"5": NaN}'}, r"logit_bias\[5\] must be a number"),
    ({"logit_bias": b'{"5": true}'}, r"logit_bias\[5\] must be a number"),
    ({"bad_words": [b"a"] * 257}, "bad_words may hold 256 strings at most, got 257"),
    ({"bad_words": [b"a", b"b" * 257]}, r"bad_words\[1\] may have 256 bytes at most, got 257"),
    ({"bad_words": [b"\xff"]}, r"bad_words\[0\] must be UTF-8"),
    ({"num_return_sequences": 2}, "num_return_sequences above 1 needs a temperature above 0"),
    ({"num_return_sequences": 2, "temperature": 1.0, "top_k": 1}, "needs a temperature above 0"),
    ({"num_return_sequences": 65, "temperature": 1.0}, r"num_return_sequences must be in \[1, 64\], got 65"),
    ({"num_top_log_probs": 3}, "num_top_log_probs above 0 needs return_log_probs, got 3"),
    ({"num_top_log_probs": 21, "return_log_probs": True}, r"num_top_log_probs must be in \[0, 20\], got 21"),
    ({"guided_regex": b"a", "guided_json": b"{}"}, "got guided_json and guided_regex; send one of them"),
    ({"guided_choice": [b"a"], "ignore_eos": True}, "guided_choice and ignore_eos contradict each other"),
    ({"guided_regex": b"a", "min_tokens": 1}, "guided_regex and min_tokens contradict each other"),
    ({"guided_regex": b"a", "bad_words": [b"a"]}, "guided_regex and bad_words contradict each other"),
    ({"guided_json": b"\xff"}, "guided_json must be UTF-8"),
    (
        {"guided_decoding_guide_type": b"structural_tag"},
        "guided_decoding_guide_type must be one of json, json_schema, regex, ebnf_grammar, got 'struct",
    ),
]


@pytest.mark.parametrize(("values", "complaint"), REFUSED)
def test_refusals_name_field_rule_and_value(codec: TextCodec, values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^INVALID_ARGUMENT: .*{complaint}"):
        check(codec, **values)


@pytest.mark.parametrize(("values", "complaint"), REFUSED)
def test_refusals_come_before_the_tokenizer(
    monkeypatch: pytest.MonkeyPatch, codec: TextCodec, values: dict[str, Any], complaint: str
) -> None:
    del complaint
    tokenised: list[str] = []
    monkeypatch.setattr(codec, "encode", tokenised.append)
    monkeypatch.setattr(codec, "encode_fragment", tokenised.append)
    with pytest.raises(InvalidArgument):
        check(codec, **values)
    assert not tokenised
