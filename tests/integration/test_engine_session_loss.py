"""Stages that lose their sessions: the answer stays right, drafts stay good, and recovery is bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddtree.errors import Unavailable
from ddtree.live import DraftContext
from ddtree.params import GenerationParams
from ddtree.verify import TargetVerifier
from tests.fakes.collecting_sink import CollectingSink
from tests.fakes.pipeline import GreedyReference, generate_all, make_verifier
from tests.integration.stage_faults import (
    LONG,
    SHORT,
    ForgetfulVerifier,
    LyingVerifier,
    reference_of,
    request,
    world_of,
)  # fmt: skip


def forget(verifier: TargetVerifier, kind: type[TargetVerifier]) -> TargetVerifier:
    """The same verifier with another way to forget: only methods differ."""
    verifier.__class__ = kind
    return verifier


@pytest.mark.parametrize(("stage", "rounds"), [("verifier", 4), ("drafter", 5)])
async def test_after_a_loss_drafts_are_as_good_as_before(tiny_target: Path, stage: str, rounds: int) -> None:
    verifier = forget(make_verifier(tiny_target), ForgetfulVerifier)
    async with world_of(tiny_target, verifier=verifier, noise=0.0) as world:
        epochs: list[int] = []
        verifies = 0

        def lose_second(operation: str, message: Any) -> None:
            nonlocal verifies
            verifies += operation == "verify"
            if operation == "prefill" and not int(message.sessions.lengths[0]):
                epochs.append(int(message.sessions.epochs[0]))
            if stage == "drafter" and operation == "draft" and verifies == 1:
                world.oracle.lose_next = True

        world.stages.before = lose_second
        verifier.is_forgetful = lambda: stage == "verifier" and verifies == 2  # type: ignore[attr-defined]
        # The prefill's token, four full rounds, and one without drafts when the drafter had to start again.
        params = GenerationParams(LONG, max_tokens=1 + 4 * 8 + rounds - 4, tree_budget=7, ignore_eos=True)
        (sink,) = await generate_all(world.engine, [params])
        assert sink.stats is not None
        assert sink.stats.rounds == rounds
        assert epochs == ([0, 1] if stage == "verifier" else [0])


@pytest.mark.parametrize("budget", [0, 12])
async def test_a_verifier_that_forgets_three_times(
    tiny_target: Path, tiny_reference: GreedyReference, budget: int
) -> None:
    verifier = forget(make_verifier(tiny_target), ForgetfulVerifier)
    async with world_of(tiny_target, verifier=verifier) as world:
        rounds = 0

        def is_forgetful() -> bool:
            nonlocal rounds
            rounds += 1
            return rounds in (1, 5, 9)

        verifier.is_forgetful = is_forgetful  # type: ignore[attr-defined]
        requests = [request(LONG, 40, budget), request(SHORT, 40, budget)]
        sinks = await generate_all(world.engine, requests)
        assert rounds > 9
        for params, sink in zip(requests, sinks, strict=True):
            assert sink.token_ids == reference_of(tiny_reference, params)


async def test_a_drafter_that_keeps_forgetting_is_given_up(
    tiny_target: Path, tiny_reference: GreedyReference
) -> None:
    async with world_of(tiny_target, noise=0.0) as world:
        drafts = 0

        def lose(name: str, _: Any) -> None:
            nonlocal drafts
            drafts += name == "draft"
            world.oracle.lose_next = True

        world.stages.before = lose
        params = request(SHORT, 60, budget=7)
        (sink,) = await generate_all(world.engine, [params])
        assert sink.token_ids == reference_of(tiny_reference, params)
        assert sink.stats is not None
        assert sink.stats.rounds > 40  # most of it without drafts
        assert drafts < 20


async def test_a_verifier_and_a_drafter_that_forget_at_once(
    tiny_target: Path, tiny_reference: GreedyReference
) -> None:
    verifier = forget(make_verifier(tiny_target), ForgetfulVerifier)
    async with world_of(tiny_target, verifier=verifier) as world:
        rounds = 0

        def is_forgetful() -> bool:
            nonlocal rounds
            rounds += 1
            world.oracle.lose_next = rounds in (2, 6)
            return rounds in (2, 6)

        verifier.is_forgetful = is_forgetful  # type: ignore[attr-defined]
        (sink,) = await generate_all(world.engine, [request(LONG, 50)])
        assert sink.token_ids == reference_of(tiny_reference, request(LONG, 50))


@pytest.mark.parametrize("prompt", [SHORT, LONG])
async def test_a_verifier_that_always_forgets_ends_with_unavailable(
    tiny_target: Path, tiny_reference: GreedyReference, prompt: tuple[int, ...]
) -> None:
    verifier = forget(make_verifier(tiny_target), LyingVerifier)
    async with world_of(tiny_target, verifier=verifier) as world:
        prefills = 0

        def count(name: str, _: Any) -> None:
            nonlocal prefills
            prefills += name == "prefill"

        world.stages.before = count
        with pytest.raises(Unavailable, match=r"lost the session 4 times in a row; retry in \d+ s"):
            await world.engine.generate(request(prompt), CollectingSink())
        assert prefills <= 4 * 5
        verifier.__class__ = TargetVerifier
        (sink,) = await generate_all(world.engine, [request(SHORT)])
        assert sink.token_ids == reference_of(tiny_reference, request(SHORT))


async def test_losses_with_rounds_in_between_are_no_reason_to_give_up(
    tiny_target: Path, tiny_reference: GreedyReference
) -> None:
    verifier = forget(make_verifier(tiny_target), ForgetfulVerifier)
    async with world_of(tiny_target, verifier=verifier) as world:
        rounds = 0

        def is_forgetful() -> bool:
            nonlocal rounds
            rounds += 1
            return rounds % 3 == 0

        verifier.is_forgetful = is_forgetful  # type: ignore[attr-defined]
        params = request(LONG, 40, budget=0)
        (sink,) = await generate_all(world.engine, [params])
        assert sink.token_ids == reference_of(tiny_reference, params)
        assert rounds // 3 > 4, "it was lost more often than may be in a row"


def test_a_drafters_losses_are_counted_while_it_does_not_hold() -> None:
    draft = DraftContext(is_wanted=True)
    for _ in range(3):
        draft.lose()
        draft.forget()
    assert draft.losses == 3
    draft.drafts += 15
    draft.lose()
    assert draft.losses == 4
    draft.forget()
    draft.drafts += 16
    draft.lose()
    assert draft.losses == 1
