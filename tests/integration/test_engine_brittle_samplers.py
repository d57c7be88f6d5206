"""A sampler or grammar that raises ends its own sequence; the others of its steps notice nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree.errors import Unavailable
from ddtree.grammar import Matcher
from ddtree.params import GenerationParams
from ddtree.samplers import Samplers
from ddtree.sampling import SamplerState
from ddtree.sampling_spec import Grammar, SamplingSpec
from ddtree.types import FeatureRequest, PrefillRequest, SessionBatch, Status, TreeBatch, VerifyRequest
from ddtree.verify import TargetVerifier
from tests.fakes.collecting_sink import CollectingSink
from tests.fakes.pipeline import GreedyReference, make_verifier
from tests.integration.stage_faults import LONG, SHORT, reference_of, request, world_of

BRITTLE = 13  # the seed of the sequence that breaks


class Fuse:
    """Lets so many calls of one operation pass; the next one raises, and then all or, when `once`, none."""

    def __init__(self, operation: str, calls: int, *, once: bool = False) -> None:
        self.operation, self.calls, self.once = operation, calls, once

    def burn(self, operation: str) -> None:
        """Count a call."""
        if operation == self.operation:
            self.calls -= 1
            if self.calls == -1 or (self.calls < 0 and not self.once):
                raise ValueError("it broke")


class BrittleMatcher(Matcher):
    """A real matcher on a fuse that it shares with its forks."""

    def __init__(self, matcher: Any, fuse: Fuse) -> None:
        super().__init__(matcher)
        self._fuse = fuse

    def fork(self) -> Matcher:
        """Copy, or break."""
        self._fuse.burn("fork")
        return BrittleMatcher(self._matcher.deep_copy(), self._fuse)

    def advance(self, tokens: Any) -> bool:
        """Take tokens, or break."""
        self._fuse.burn("advance")
        return super().advance(tokens)

    def allowed_words(self) -> Any:
        """Say what may come, or break."""
        self._fuse.burn("allowed_words")
        return super().allowed_words()


class BrittleState(SamplerState):
    """A real state on a fuse."""

    fuse: Fuse

    def push(self, tokens: Any) -> None:
        """Take tokens, or break."""
        self.fuse.burn("push")
        super().push(tokens)


class BrittleSamplers(Samplers):
    """Real samplers; the one of the brittle sequence is on a fuse."""

    fuse: Fuse

    def open(self, settings: str) -> SamplerState | None:
        """Open, or break."""
        state = super().open(settings)
        if state is None or state.spec.seed != BRITTLE:
            return state
        self.fuse.burn("open")
        assert state.matcher is not None
        matcher = BrittleMatcher(state.matcher.fork()._matcher, self.fuse)
        brittle = BrittleState(state.spec, vocab_size=self._vocab_size, device=self._device, matcher=matcher)
        brittle.fuse = self.fuse
        return brittle


def brittle_verifier(folder: Path, fuse: Fuse) -> TargetVerifier:
    verifier = make_verifier(folder)
    grammars = verifier._samplers._grammars
    verifier._samplers = BrittleSamplers(verifier.target.vocab_size, verifier.target.device, grammars)
    verifier._samplers.fuse = fuse
    return verifier


def guided(seed: int, prompt: tuple[int, ...] = LONG, **settings: Any) -> GenerationParams:
    spec = SamplingSpec(temperature=1.0, seed=seed, grammar=Grammar("regex", "[a-z]{30}"), **settings)
    return replace(request(prompt), sampling=spec)


async def answers(folder: Path, fuse: Fuse, batch: list[GenerationParams]) -> list[Any]:
    """What each of these sequences, all at once, is answered: its ids, or its error."""
    async with world_of(folder, verifier=brittle_verifier(folder, fuse)) as world:
        sinks = [CollectingSink() for _ in batch]
        tasks = [world.begin(*pair) for pair in zip(batch, sinks, strict=True)]
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        return [
            sink.token_ids if error is None else error for sink, error in zip(sinks, outcomes, strict=True)
        ]


@pytest.fixture(scope="module")
def others(tiny_target: Path, tiny_reference: GreedyReference) -> dict[GenerationParams, list[int]]:
    """Sequences of other callers, and what each is answered when it is alone."""
    plain = [request(SHORT), request(LONG[:20])]
    drawn = [guided(5, SHORT, top_log_probs=2), guided(6, LONG[:9], repetition_penalty=1.2)]
    alone = [asyncio.run(answers(tiny_target, Fuse("", 0), [params]))[0] for params in drawn]
    greedy = [reference_of(tiny_reference, params) for params in plain]
    return dict(zip([*plain, *drawn], [*greedy, *alone], strict=True))


@pytest.mark.parametrize("calls", [0, 7])
@pytest.mark.parametrize("operation", ["open", "fork", "advance", "allowed_words", "push"])
async def test_a_sampler_that_raises_ends_its_own_sequence_only(
    tiny_target: Path, others: dict[GenerationParams, list[int]], operation: str, calls: int
) -> None:
    fuse = Fuse(operation, 0 if operation == "open" else calls)
    broken, *answered = await answers(tiny_target, fuse, [guided(BRITTLE), *others])
    assert isinstance(broken, Unavailable)
    assert "could not be chosen" in str(broken)
    assert answered == list(others.values())


@pytest.mark.parametrize(("operation", "calls"), [("allowed_words", 1), ("push", 2)])
def test_features_and_states_of_the_others_stand_where_they_belong(
    tiny_target: Path, operation: str, calls: int
) -> None:
    verifier = brittle_verifier(tiny_target, Fuse(operation, calls))
    prompt, settings = (
        torch.arange(40, 49, dtype=torch.int32),
        [guided(seed).sampling for seed in (5, BRITTLE, 6)],
    )
    settings = [replace(spec, prompt_length=len(prompt)) for spec in settings]
    ids, epochs = torch.arange(3), torch.zeros(3, dtype=torch.int32)
    opened = verifier.prefill(
        PrefillRequest(
            SessionBatch(ids, epochs, torch.zeros(3, dtype=torch.int32)),
            prompt.repeat(3),
            torch.tensor([9, 9, 9]),
            torch.tensor([100, 100, 100]),
            tuple(spec.to_json() for spec in settings),
        )
    )
    assert opened.status.tolist() == [Status.OK] * 3
    sessions = SessionBatch(ids, epochs, torch.full((3,), 9, dtype=torch.int32))
    verdict = verifier.verify(VerifyRequest(sessions, opened.next_tokens, TreeBatch.empty(3)))
    assert verdict.status.tolist() == [Status.OK, Status.SAMPLER_FAILED, Status.OK]
    others = torch.tensor([0, 2])
    held = SessionBatch(ids[others], epochs[others], torch.full((2,), 10, dtype=torch.int32))
    kept = verifier.read_features(FeatureRequest(held, torch.tensor([9, 9]), torch.tensor([1, 1])))
    assert kept.status.tolist() == [Status.OK] * 2
    assert torch.equal(verdict.features, kept.features)


@pytest.mark.parametrize("operation", ["fork", "advance", "allowed_words"])
async def test_what_raises_once_costs_drafts_at_most(tiny_target: Path, operation: str) -> None:
    undisturbed = await answers(tiny_target, Fuse("", 0), [guided(BRITTLE), guided(5)])
    for calls in (1, 2, 5, 8):
        fuse = Fuse(operation, calls, once=True)
        disturbed = await answers(tiny_target, fuse, [guided(BRITTLE), guided(5)])
        assert fuse.calls < 0
        if not isinstance(disturbed[0], Unavailable):  # while ids are committed nothing can be tried again
            assert disturbed[0] == undisturbed[0]
        assert disturbed[1] == undisturbed[1]
