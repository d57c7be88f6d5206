"""Drafts along a given text: as the engine drafts when it writes that text, and compared with an error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.gpu.engine_player import EnginePlayer
from benchmarks.gpu.exact_replay import NODES, Answered, compare, replay_text
from benchmarks.gpu.exact_stages import Loaded
from benchmarks.measurement import Job
from ddtree.draft import Drafter
from ddtree.stages.in_process import InProcessStages
from ddtree.train.replay import Acceptance, replay_each
from tests.fakes.recording_drafter import RecordingDrafter
from tests.fakes.tiny_models import make_draft, make_target

PROMPTS = ("Hi", "A longer prompt, which takes more than one chunk to read.", "12 + 7 =")
TOKENS = 40
JOBS = [Job(tuple(prompt.encode()), (), TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("pair")
    target, draft = make_target(folder / "target"), make_draft(folder / "draft")
    player = EnginePlayer(
        target=target, draft=draft, device=torch.device("cpu"), dtype=torch.float32, most_sequences=2
    )
    yield player
    player.close()


@pytest.fixture(scope="module")
def answered(player: EnginePlayer) -> Answered:
    return Answered.by(player.decode, JOBS, TOKENS)


def loaded_of(player: EnginePlayer) -> Loaded:
    stages = player._engine._stages
    assert isinstance(stages, InProcessStages)
    assert isinstance(stages.drafter, Drafter)
    return Loaded(stages.verifier, stages.drafter, None, None)


def test_a_text_takes_the_rounds_that_it_took_the_engine(player: EnginePlayer, answered: Answered) -> None:
    """But for the last ones: where the engine may not go deep any more, it drafts more for each position."""
    loaded = loaded_of(player)
    drafter: Any = RecordingDrafter(loaded.drafter)
    drafter.block_size = loaded.drafter.block_size
    accepted = replay_text(replace(loaded, drafter=drafter), answered.answers)
    assert [each.emitted for each in accepted] == [TOKENS - 1] * len(PROMPTS)
    several = 0
    for index, job in enumerate(JOBS):
        player.decode(replace(job, draft_mode="tree", tree_budget=NODES))
        engine, left = list[int](), TOKENS - 1
        for record in player._records:
            if left < loaded.drafter.block_size:
                break
            engine, left = [*engine, record.emitted], left - record.emitted
        # A round's tokens are new context in the next one; the first call of all brings the prompt.
        steps = [len(features) for features in drafter.contexts[index].features[1:]]
        assert steps[: len(engine)] == engine
        several += sum(step > 1 for step in engine)
    assert several > 1, "something is accepted, or nothing is compared"
    assert abs(answered.own.rounds - Acceptance.pooled(accepted).rounds) <= len(PROMPTS)
    assert loaded.verifier.usage().pages_used == loaded.drafter.info().usage.pages_used == 0


def test_drafts_know_the_text_up_to_the_root_and_no_further(player: EnginePlayer, answered: Answered) -> None:
    loaded = loaded_of(player)
    drafter: Any = RecordingDrafter(loaded.drafter)
    drafter.block_size = loaded.drafter.block_size
    replay_text(replace(loaded, drafter=drafter), answered.answers, nodes=12)
    for index, answer in enumerate(answered.answers):
        context = drafter.contexts[index]
        known = len(context.ids)
        assert answer.answer_start < known < len(answer.ids)
        assert context.ids == answer.ids[:known].tolist()
        loaded.open(9, answer.ids.tolist(), len(answer.ids))
        expected = dict(loaded.cached(9, known))["target_features"]
        loaded.close([9])
        torch.testing.assert_close(torch.cat(context.features), expected, rtol=1e-4, atol=1e-5)


def test_worse_drafts_are_seen(player: EnginePlayer, answered: Answered) -> None:
    """With one node where there were 64, and through the comparison."""
    loaded = loaded_of(player)
    few, many = (replay_text(loaded, answered.answers, nodes) for nodes in (1, 64))
    facts = compare(many, few)
    assert (facts["replay_prompts"], facts["replay_tokens"]) == (3, 3 * (TOKENS - 1))
    assert facts["replay_difference"] < 0
    assert facts["replay_difference_low"] <= facts["replay_difference"] <= facts["replay_difference_high"]


def test_what_is_the_same_everywhere_is_sure() -> None:
    facts = compare([Acceptance(12, 4)] * 5, [Acceptance(12, 3)] * 5)
    assert (facts["replay_float32_per_round"], facts["replay_bfloat16_per_round"]) == (3, 4)
    bounds = [facts[f"replay_difference{name}"] for name in ("", "_low", "_high", "_se")]
    assert bounds == pytest.approx([1, 1, 1, 0])


def test_the_error_is_that_of_a_mean() -> None:
    """Of as many rounds each, the difference is a mean over prompts, whose error is known: std / sqrt(n)."""
    before = [Acceptance(100 + place % 7, 20) for place in range(40)]
    after = [Acceptance(each.emitted + 10 * (place % 3 - 1), 20) for place, each in enumerate(before)]
    facts = compare(before, after)
    changes = torch.tensor([10 * (place % 3 - 1) / 20 for place in range(40)])
    error = float(changes.std(unbiased=False)) / 40**0.5
    assert facts["replay_difference_se"] == pytest.approx(error, rel=0.05)
    assert facts["replay_difference"] == pytest.approx(float(changes.mean()))
    assert facts["replay_difference_high"] - facts["replay_difference_low"] == pytest.approx(
        2 * 1.96 * error, rel=0.05
    )


def test_answers_of_one_token_take_no_rounds(player: EnginePlayer, answered: Answered) -> None:
    one = answered.answers[0]
    short = replace(one, ids=one.ids[: one.answer_start + 1])
    assert replay_text(loaded_of(player), [short]) == [Acceptance(0, 0)]
    assert replay_each([short], lambda _: pytest.fail("there is nothing to draft"), 4) == [Acceptance(0, 0)]
