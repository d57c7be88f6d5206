"""Sequences for the scheduler, without text and without a caller."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Tokens

from ddtree.live import DraftContext, Live
from ddtree.params import GenerationParams
from ddtree.sequence import Sequence
from tests.fakes.collecting_sink import CollectingSink


class NoText:
    """A decoder of ids that have no text."""

    def decode(self, token_ids: Tokens[int]) -> str:
        """Nothing."""
        del token_ids
        return ""

    def is_silent(self, token_id: int) -> bool:
        """Always."""
        return token_id >= 0

    def is_byte(self, token_id: int) -> bool:
        """Never."""
        return token_id < 0


class _Never(asyncio.Future[None]):
    """A future that needs no running loop, as nobody waits for it."""

    def __init__(self) -> None:
        loop = asyncio.new_event_loop()
        super().__init__(loop=loop)
        loop.close()


def make_live(number: int, *, prompt: int = 5, max_tokens: int = 16) -> Live:
    """A sequence that arrived as the `number`th, which is its session's id too."""
    params = GenerationParams(tuple(range(prompt)), max_tokens=max_tokens)
    return Live(
        sequence=Sequence(params, number, NoText(), clock=lambda: number),
        sink=CollectingSink(),
        done=_Never(),
        draft=DraftContext(is_wanted=True),
        node_cap=4,
    )
