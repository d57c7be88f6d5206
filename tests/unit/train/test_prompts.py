"""The chat frame, prompt files and the order in which prompts follow each other."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from ddtree.errors import InvalidArgument
from ddtree.text import TextCodec
from ddtree.train.prompts import ChatFrame, PromptMix, encode_openings, read_texts, render


def test_the_frame_and_a_turn_make_the_rendered_prompt(codec: TextCodec, frame: ChatFrame) -> None:
    turn = encode_openings(codec, frame, ["What is"])[0]
    assert (*frame.head, *turn, frame.turn_end, *frame.tail) == render(codec, ["What is"])[0]
    assert frame.head == tuple(codec.encode("user: "))
    assert frame.stop_ids == codec.stop_ids


def test_files_hold_strings_or_objects(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"one"\n{"turns": ["two", "not this"]}\n\n{"prompt": "three"}\n')
    assert read_texts(path) == ["one", "two", "three"]


def test_a_line_that_is_no_prompt_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"one"\n{"text": "two"}\n')
    with pytest.raises(InvalidArgument, match="line 2 must be a JSON string or an object"):
        read_texts(path)


def test_a_question_is_answered_greedily_once_and_the_mix_is_kept(frame: ChatFrame) -> None:
    questions = [(*frame.head, 40 + i, frame.turn_end, *frame.tail) for i in range(3)]
    mix = PromptMix(frame, [questions], [(65, 66)], (0.0, 0.7), question_share=0.5)
    prompts = list(islice(mix.stream(seed=1), 400))
    assert prompts == list(islice(mix.stream(seed=1), 400))
    assert prompts != list(islice(mix.stream(seed=2), 400))
    asked = [prompt for prompt in prompts if prompt.source == 1]
    greedy = [prompt.ids for prompt in asked if prompt.temperature == 0]
    assert sorted(greedy) == sorted(questions)
    assert 120 < len(asked) < 280
    assert all(prompt.answer_start == len(prompt.ids) for prompt in asked)
    made_up = [prompt for prompt in prompts if prompt.source == 0]
    assert {prompt.ids for prompt in made_up} == {frame.head, (*frame.head, 65, 66)}
    assert all(prompt.answer_start == 0 for prompt in made_up)
    assert {prompt.temperature for prompt in made_up} == {0.0, 0.7}
