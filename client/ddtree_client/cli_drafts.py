"""Shows in a terminal which tokens of an answer were drafted and accepted, and which the target added.

Underlining says it wherever there is a terminal, colour is added where it is wanted (NO_COLOR), and in a pipe
brackets stand around what was accepted.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from itertools import groupby
from typing import Literal

import click

from ddtree_client.rounds import Origin, pieces
from ddtree_client.types import Chunk

Look = Literal["colour", "underline", "brackets"]
LEGENDS = {
    "colour": "green and underlined: drafted and accepted · yellow: the target's own token",
    "underline": "underlined: drafted and accepted · plain: the target's own token",
    "brackets": "«…»: drafted and accepted · the rest: the target's own tokens",
}


def look_of_stdout() -> Look:
    """What stdout can show and may."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return "brackets"
    return "underline" if os.environ.get("NO_COLOR") else "colour"


class DraftPainter:
    """Marks the text of one answer; what it gives, without marks, is the text of the chunks."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._origins: deque[Origin] = deque()  # of each character that was decoded and not shown yet

    def paint(self, chunk: Chunk) -> str:
        """The chunk's text, marked. The chunk must carry its rounds (option ``trace``)."""
        for told in chunk.trace:
            for piece in pieces(told):
                self._origins.extend([piece.origin] * len(piece.text))
        # Text that may begin a stop string is held back, so a chunk can show characters of earlier rounds.
        marked = [(self._origins.popleft() if self._origins else "bonus", sign) for sign in chunk.text]
        runs = groupby(marked, key=lambda pair: pair[0] == "accepted")
        return "".join(
            self._marked("".join(sign for _, sign in run), is_accepted=is_accepted)
            for is_accepted, run in runs
        )

    def _marked(self, text: str, *, is_accepted: bool) -> str:
        if self._look == "brackets":
            return f"«{text}»" if is_accepted else text
        colour = {True: "green", False: "yellow"}[is_accepted] if self._look == "colour" else None
        return click.style(text, fg=colour, underline=True if is_accepted else None)
