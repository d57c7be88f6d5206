"""Generation in slots against the plain forward of the same target."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from ddtree.errors import InvalidArgument
from ddtree.train.decode_attention import check_window
from ddtree.train.prompts import ChatFrame, Prompt
from ddtree.train.slots import Generated, SlotGenerator, SlotLimits
from tests.fakes.tiny_models import EOS_ID

LIMITS = SlotLimits(slots=3, max_length=64, max_prompt=30, max_answer=12)


def run(model: PreTrainedModel, frame: ChatFrame, prompts: list[Prompt], seed: int = 0) -> list[Generated]:
    generator = SlotGenerator(model, frame, LIMITS, seed=seed)
    return [one for some in generator.run(iter(prompts), steps_between=5) for one in some]


def question(frame: ChatFrame, length: int, temperature: float = 0.0, source: int = 1) -> Prompt:
    turn = tuple(int(token) for token in torch.randint(30, 120, (length,)))
    ids = (*frame.head, *turn, frame.turn_end, *frame.tail)
    return Prompt(ids, len(ids), temperature, source)


def plain_greedy(model: PreTrainedModel, ids: tuple[int, ...], count: int) -> list[int]:
    tokens = list(ids)
    for _ in range(count):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
        if tokens[-1] == EOS_ID or len(tokens) == LIMITS.max_length:
            break
    return tokens


def test_greedy_answers_equal_plain_decoding_while_slots_are_refilled(
    target: PreTrainedModel, frame: ChatFrame
) -> None:
    prompts = [
        question(frame, length, source=number) for number, length in enumerate((3, 20, 9, 1, 14, 5, 6))
    ]
    results = run(target, frame, prompts)
    assert sorted(one.prompt.source for one in results) == list(range(7))
    for one in results:
        expected = plain_greedy(target, one.prompt.ids, LIMITS.max_answer)
        assert one.ids.tolist() == expected
        assert one.answer_start == len(one.prompt.ids)
        assert one.is_whole == (expected[-1] == EOS_ID)


def test_a_made_up_turn_is_closed_with_the_frames_tail(target: PreTrainedModel, frame: ChatFrame) -> None:
    opening = (*frame.head, 70, 71)
    results = run(target, frame, [Prompt(opening, 0, 0.0, 0) for _ in range(8)])
    assert len(results) == 8
    for one in results:
        ids, start = one.ids.tolist(), one.answer_start
        assert tuple(ids[: len(opening)]) == opening
        assert tuple(ids[start - len(frame.tail) - 1 : start]) == (frame.turn_end, *frame.tail)
        assert start <= LIMITS.max_prompt
        assert ids == plain_greedy(target, tuple(ids[:start]), LIMITS.max_answer)
    assert len({tuple(one.ids.tolist()) for one in results}) > 4, "turns are drawn, not greedy"


def test_the_seed_decides_what_is_drawn(target: PreTrainedModel, frame: ChatFrame) -> None:
    prompts = [question(frame, 4, temperature=1.0)]
    first, again, other = (run(target, frame, prompts, seed)[0].ids.tolist() for seed in (5, 5, 6))
    assert first == again != other


def test_draws_follow_the_tempered_probabilities(target: PreTrainedModel, frame: ChatFrame) -> None:
    limits = SlotLimits(slots=512, max_length=32, max_prompt=30, max_answer=1)
    prompt = question(frame, 6, temperature=0.5)
    drawn = [
        int(one.ids[-1])
        for seed in range(4)
        for some in SlotGenerator(target, frame, limits, seed=seed).run(iter([prompt] * 512))
        for one in some
    ]
    assert len(drawn) == 2048
    with torch.no_grad():
        logits = target(input_ids=torch.tensor([prompt.ids]), use_cache=False).logits[0, -1]
    expected = torch.softmax(logits / 0.5, -1)
    seen = torch.bincount(torch.tensor(drawn), minlength=len(expected)) / len(drawn)
    assert float((seen - expected).abs().sum()) / 2 < 0.1


def test_prompts_without_room_for_an_answer_are_passed_over(
    target: PreTrainedModel, frame: ChatFrame
) -> None:
    results = run(target, frame, [question(frame, 80, source=1), question(frame, 3, source=2)])
    assert [one.prompt.source for one in results] == [2]


def test_unfinished_answers_can_be_taken(target: PreTrainedModel, frame: ChatFrame) -> None:
    generator = SlotGenerator(target, frame, LIMITS)
    prompt = question(frame, 3)
    next(generator.run(iter([prompt]), steps_between=len(prompt.ids) - len(frame.head) + 4))
    (one,) = generator.unfinished()
    assert one.ids.tolist() == plain_greedy(target, prompt.ids, 4)[: len(one.ids)]
    assert not one.is_whole


def test_sizes_and_windows_are_checked(target: PreTrainedModel) -> None:
    with pytest.raises(InvalidArgument, match="max_prompt must be between"):
        SlotLimits(slots=1, max_length=10, max_prompt=10, max_answer=1)
    config = type(target.config)(sliding_window=16)
    with pytest.raises(InvalidArgument, match="sliding window 16"):
        check_window(config, 17)
    check_window(config, 16)
