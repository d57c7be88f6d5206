"""Prompts to ids, conversations through the chat template, and which ids end a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from ddtree.errors import CheckpointError, InvalidArgument
from ddtree.text import (
    TextCodec,
    decode_utf8,
    parse_messages,
    parse_template_variables,
    read_stop_ids,
)
from tests.fakes import tokenizers
from tests.fakes.tiny_models import make_target


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec(tokenizers.byte_level(), stop_ids=frozenset({1}))


def test_text_comes_back(codec: TextCodec) -> None:
    assert codec.decode(codec.encode("Grüße, 你好 😀")) == "Grüße, 你好 😀"


def test_spaces_before_punctuation_are_left_alone(codec: TextCodec) -> None:
    assert codec.decode(codec.encode("a , b . c n't")) == "a , b . c n't"


class Shouting(PreTrainedTokenizerFast):  # type: ignore[misc]
    """Has a way of its own to decode, as some tokenizers of transformers do."""

    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return str(super()._decode(*args, **kwargs)).upper()


def test_a_tokenizer_that_decodes_in_its_own_way_keeps_it(codec: TextCodec) -> None:
    backend = tokenizers.byte_level().backend_tokenizer
    own = TextCodec(Shouting(tokenizer_object=backend, eos_token="</s>"), frozenset())
    ids = codec.encode("The quick fox</s>")
    assert own.decode(ids) == "THE QUICK FOX"
    assert codec.decode(ids) == "The quick fox"


def test_messages_go_through_the_chat_template_up_to_the_answer(codec: TextCodec) -> None:
    ids = codec.render_messages([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
    assert ids == codec.encode("<|system|>a<|end|><|user|>b<|end|><|assistant|>")


def test_a_target_without_chat_template_says_so() -> None:
    tokenizer = tokenizers.without_chat_template()
    with pytest.raises(
        InvalidArgument, match=r"messages needs a target with a chat template.*send .* text_input"
    ):
        TextCodec(tokenizer, frozenset()).render_messages([{"role": "user", "content": "a"}])


def test_what_the_template_refuses_is_the_callers(codec: TextCodec) -> None:
    with pytest.raises(InvalidArgument, match="unknown role robot"):
        codec.render_messages([{"role": "robot", "content": "a"}])


def test_special_and_unknown_ids_are_silent(codec: TextCodec) -> None:
    size = len(tokenizers.byte_level())
    assert codec.is_silent(0)
    assert codec.is_silent(size + 5)
    assert not codec.is_silent(codec.encode("a")[0])
    think = codec.encode("<think>")
    assert not codec.is_silent(think[0])


def test_only_byte_fallback_tokens_are_bytes(codec: TextCodec) -> None:
    other = TextCodec(tokenizers.metaspace(), frozenset())
    rocket = other.encode("\N{ROCKET}")
    assert [other.is_byte(token) for token in rocket] == [False, True, True, True, True]
    assert not any(codec.is_byte(token) for token in codec.encode("\N{ROCKET}"))


@pytest.mark.parametrize(
    ("eos", "generation_eos", "expected"),
    [(2, None, {2}), (2, [3, 4], {2, 3, 4}), ([5, 6], 2, {2, 5, 6}), (None, 7, {7}), (None, None, set())],
)
def test_stop_ids_are_the_models_own(
    tmp_path: Path, eos: int | list[int] | None, generation_eos: int | list[int] | None, expected: set[int]
) -> None:
    # The tokenizer's own eos is 1, which no case expects.
    tokenizers.save_target(tmp_path, tokenizers.byte_level(), eos, generation_eos)
    assert TextCodec.from_folder(tmp_path).stop_ids == expected


def test_stop_ids_of_a_nested_text_configuration_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [1, 106]}}))
    assert read_stop_ids(tmp_path) == {1, 106}


def test_a_loaded_folder_encodes_and_renders(tmp_path: Path, codec: TextCodec) -> None:
    loaded = TextCodec.from_folder(tokenizers.save_target(tmp_path, tokenizers.byte_level(), 2))
    assert loaded.encode("fox 😀") == codec.encode("fox 😀")
    messages = [{"role": "user", "content": "b"}]
    assert loaded.render_messages(messages) == codec.render_messages(messages)


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        TextCodec.from_folder(tmp_path / "nothing")


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_folder_without_tokenizer_says_what_is_missing(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(
        CheckpointError, match=r"its tokenizer cannot be loaded; expected tokenizer\.json"
    ) as refusal:
        TextCodec.from_folder(tmp_path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("content", ["{", "[]", "\udc80"])
def test_a_broken_configuration_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(
        CheckpointError, match=r"config\.json: (cannot be read as JSON|expected a JSON object)"
    ):
        read_stop_ids(tmp_path)


def test_bytes_that_are_no_utf8_are_shown() -> None:
    assert decode_utf8("text_input", "ä".encode()) == "ä"
    with pytest.raises(InvalidArgument, match=r"text_input must be UTF-8 \(byte 2 is not\), got b'\\xffc'"):
        decode_utf8("text_input", b"ab\xffc")


def test_content_parts_are_joined_and_other_keys_kept() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = json.dumps([{"role": "user", "content": parts, "name": "n"}, {"role": "assistant", "content": ""}])
    assert parse_messages(text) == [
        {"role": "user", "content": "ab", "name": "n"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "messages must be JSON"),
        ("hello", "messages must be JSON"),
        ("[" * 100_000, "messages must be JSON"),
        ("9" * 10_000, "messages must be"),
        ("{}", "messages must be a list of one message or more, got 'an empty dict'"),
        ("[]", "messages must be a list of one message or more, got 'an empty list'"),
        ('"hi"', "messages must be a list of one message or more, got 'str'"),
        ('[{"role": "user", "content": "a"}, 7]', r"messages\[1\] must be an object, got 'int'"),
        ('[{"content": "a"}]', r"messages\[0\] must have 'role', got \['content'\]"),
        ('[{"role": "user"}]', r"messages\[0\] must have 'content', got \['role'\]"),
        ('[{"role": 1, "content": "a"}]', r"messages\[0\]\.role must be a non-empty string, got 'int'"),
        (
            '[{"role": "", "content": "a"}]',
            r"messages\[0\]\.role must be a non-empty string, got 'an empty str'",
        ),
        ('[{"role": "user", "content": null}]', r"messages\[0\]\.content must be text or a list of parts"),
        (
            '[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]',
            r"messages\[0\]\.content\[1\] must be a part of type 'text', got 'image_url'",
        ),
        (
            '[{"role": "user", "content": ["a"]}]',
            r"messages\[0\]\.content\[0\] must be a part of type 'text', got 'str'",
        ),
        ('[{"role": "user", "content": "\\ud83d"}]', r"messages\[0\] must be Unicode text"),
    ],
)
def test_messages_of_another_form_are_refused_where_they_break_it(text: str, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        parse_messages(text)


def test_variables_reach_the_template_and_cannot_steer_the_renderer(tmp_path: Path) -> None:
    codec = TextCodec.from_folder(make_target(tmp_path))
    messages = [{"role": "user", "content": "hi"}]
    assert codec.decode(codec.render_messages(messages, {"note": "psst "})) == "user: hi\npsst assistant:"
    assert codec.render_messages(messages, {"other": 1}) == codec.render_messages(messages)
    for name in ("tokenize", "add_generation_prompt", "chat_template", "tools", "messages"):
        with pytest.raises(InvalidArgument, match=f"{name}|cannot be rendered"):
            codec.render_messages(messages, {name: "x"})
    with pytest.raises(InvalidArgument, match="Unicode"):
        codec.render_messages(messages, {"note": "\ud83d"})


def test_variables_are_an_object() -> None:
    assert parse_template_variables('{"enable_thinking": false}') == {"enable_thinking": False}
    for text, complaint in (
        ("", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
        ("[]", "must be an object"),
    ):
        with pytest.raises(InvalidArgument, match=f"chat_template_kwargs {complaint}"):
            parse_template_variables(text)
