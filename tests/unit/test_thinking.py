"""Advice about drafters that were trained without thinking."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddtree.raw_request import RawRequest
from ddtree.thinking import ThinkingAdvice, trained_without_thinking

THINKING = "{% if enable_thinking is not false %}<think>{% endif %}"


def draft(folder: Path, card: str | None = None, config: Any = None) -> Path:
    if card is not None:
        (folder / "README.md").write_text(card, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({} if config is None else config))
    return folder


@pytest.mark.parametrize(
    ("card", "config", "expected"),
    [
        ("Use `enable_thinking=False`, as in training.", None, True),
        ('chat_template_kwargs={"enable_thinking": False}', None, True),
        ("Trained on non-thinking answers.", None, True),
        ("Trained with thinking mode disabled.", None, True),
        ("Trained with thinking.", None, False),
        ("enable_thinking=True", None, False),
        (None, None, False),
        (None, {"dflash_config": {"enable_thinking": False}}, True),
        ("enable_thinking=False", {"enable_thinking": True}, False),  # what programs read counts more
        ("enable_thinking=False", [], True),
    ],
)
def test_cards_and_configurations_are_read(
    tmp_path: Path, card: str | None, config: Any, expected: bool
) -> None:
    assert trained_without_thinking(draft(tmp_path, card, config)) is expected


def test_a_folder_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    assert not trained_without_thinking(tmp_path / "none")


def test_only_requests_that_think_are_advised(tmp_path: Path) -> None:
    advice = ThinkingAdvice(draft(tmp_path, "enable_thinking=False"), THINKING)
    thinks = RawRequest(messages=b"[]")
    assert "enable_thinking" in advice.about([thinks])
    assert advice.about([RawRequest(messages=b"[]", chat_template_kwargs=b'{"enable_thinking": true}')])
    for row in (
        RawRequest(text_input=b"x"),
        RawRequest(messages=b"[]", chat_template_kwargs=b'{"enable_thinking": false}'),
        RawRequest(messages=b"[]", chat_template_kwargs=b"{"),
    ):
        assert advice.about([row]) == ""
    assert ThinkingAdvice(tmp_path, "no such variable").about([thinks]) == ""
    assert ThinkingAdvice(draft(tmp_path, "thinks"), THINKING).about([thinks]) == ""
