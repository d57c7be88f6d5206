"""What is wrong with one sequence's own data ends that sequence; the others of its steps never notice."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree.errors import Unavailable
from ddtree.sampling_spec import SamplingSpec
from ddtree.text import TextCodec
from tests.fakes.collecting_sink import CollectingSink
from tests.fakes.pipeline import GreedyReference
from tests.fakes.tiny_models import EOS_ID
from tests.integration.stage_faults import LONG, SHORT, reference_of, request, until, world_of


class Allergic(TextCodec):
    """A tokenizer that cannot decode one token."""

    poison = -1

    def is_silent(self, token_id: int) -> bool:
        """Say it, or fail."""
        if token_id == self.poison:
            raise ValueError("no text for that")
        return super().is_silent(token_id)


@pytest.mark.parametrize("place", [0, 3], ids=["the prefill's token", "in a round"])
async def test_text_that_cannot_be_decoded(
    tiny_target: Path, tiny_reference: GreedyReference, place: int
) -> None:
    others = [request(SHORT), request(LONG[:20])]
    said = {EOS_ID} | {token for params in others for token in reference_of(tiny_reference, params)}
    prompt = next(
        prompt for prompt in (tuple(range(start, start + 9)) for start in range(60, 200))
        if tiny_reference(prompt, 8)[place] not in said | set(tiny_reference(prompt, 8)[:place])
    )  # fmt: skip
    codec = Allergic.from_folder(tiny_target)
    assert isinstance(codec, Allergic)
    codec.poison = tiny_reference(prompt, 8)[place]
    async with world_of(tiny_target, decoder=codec) as world:
        sinks = [CollectingSink() for _ in others]
        tasks = [world.begin(*pair) for pair in zip(others, sinks, strict=True)]
        with pytest.raises(Unavailable, match="no text for that"):
            await world.engine.generate(request(prompt), CollectingSink())
        await asyncio.gather(*tasks)
        for params, sink in zip(others, sinks, strict=True):
            assert sink.token_ids == reference_of(tiny_reference, params)


class Broken(SamplingSpec):
    """Settings that cannot be told to the verifier."""

    def to_json(self) -> str:
        """Fail."""
        raise ValueError("settings of no use")


async def test_settings_that_cannot_be_sent(tiny_target: Path, tiny_reference: GreedyReference) -> None:
    async with world_of(tiny_target) as world:
        sinks = [CollectingSink() for _ in range(2)]
        first = world.begin(request(SHORT, 60), sinks[0])
        await until(lambda: sinks[0].deltas)
        broken = world.begin(replace(request(LONG), sampling=Broken()), CollectingSink())
        second = world.begin(request(SHORT), sinks[1])
        outcomes = await asyncio.gather(first, broken, second, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [type(None), ValueError, type(None)]
        assert sinks[0].token_ids == reference_of(tiny_reference, request(SHORT, 60))
        assert sinks[1].token_ids == reference_of(tiny_reference, request(SHORT))
