"""Prompts to train on: questions from files, and user turns that the target makes up itself.

A made-up turn starts from nothing but the chat template, or from an opening of a few words that steers its
subject. This module knows the chat template through `TextCodec`; it does not generate.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddtree.errors import InvalidArgument
from ddtree.text import TextCodec

_TWO_TURNS = ("x", "7")  # what renders alike around both is the template's own

# Openings in the words of everyday requests. Without any, a small target mostly makes up long essays.
OPENINGS: tuple[str, ...] = (
    *("What", "What is", "What are", "How", "How do", "How can", "Why", "When", "Which", "Who", "Can you"),
    *("Explain", "Describe", "Write", "Write a", "Give", "List", "Name", "Tell me", "Suggest", "Compare"),
    *("Summarize", "Rewrite", "Translate", "Create", "Generate", "Identify", "Classify", "Find", "Calculate"),
    *("Design", "Develop", "Edit", "Convert", "Come up with", "Imagine", "Provide", "Is", "Does", "If", "I"),
    *("Write a short story", "Write a Python function", "Write a function", "Write code", "Implement"),
    *("Write a Python function that", "def ", "```python\ndef ", "Finish this Python function:\n\ndef "),
    *("Here is a Python function:\n\ndef ", "Fix this code:\n\n", "from typing import List\n\n\ndef "),
    *("Solve", "A store sells", "There are", "If a", "Tom has", "Maria", "Each", "John", "In a"),
    *("You are", "Your task is", "Given", "The following", "Please", "As a", "My", "Let's", "Could you"),
)


@dataclass(frozen=True)
class ChatFrame:
    """The ids that the target's chat template puts around a user's turn."""

    head: tuple[int, ...]  # before the turn's text
    turn_end: int  # the token that ends the turn
    tail: tuple[int, ...]  # after it, up to where the answer begins
    stop_ids: frozenset[int]  # what ends an answer

    @classmethod
    def of(cls, codec: TextCodec) -> ChatFrame:
        """Find the frame by rendering two different turns.

        Raises:
            InvalidArgument: the template puts nothing after a turn, so that a made-up one would never end.
        """
        first, second = (codec.render_messages([{"role": "user", "content": text}]) for text in _TWO_TURNS)
        head = _common(first, second)
        after = _common(first[::-1], second[::-1])[::-1]
        if not head or not after:
            raise InvalidArgument.of(
                "chat template",
                "must put tokens before and after a user's turn",
                f"{len(head)} before, {len(after)} after",
                "use a target with a chat template",
            )
        return cls(tuple(head), after[0], tuple(after[1:]), codec.stop_ids)


@dataclass(frozen=True)
class Prompt:
    """What a slot starts from."""

    ids: tuple[int, ...]  # forced tokens, the frame's head included
    answer_start: int  # index of the answer's first token; 0: the target goes on writing the user's turn
    temperature: float  # of the answer
    source: int  # 0: made up; otherwise the number of the file it came from


def read_texts(path: Path) -> list[str]:
    """Read one prompt a line: a JSON string, or an object with `turns` (the first is taken) or `prompt`.

    Raises:
        InvalidArgument: a line is neither.
    """
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            texts.append(value if isinstance(value, str) else str(value.get("prompt") or value["turns"][0]))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise InvalidArgument.of(
                f"{path} line {number}",
                "must be a JSON string or an object with turns or prompt",
                line[:60],
                "write one prompt a line",
            ) from None
    return texts


def render(codec: TextCodec, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Give each text's ids in the chat template, up to where the answer begins."""
    return [tuple(codec.render_messages([{"role": "user", "content": text}])) for text in texts]


@dataclass(frozen=True)
class PromptMix:
    """How prompts follow each other."""

    frame: ChatFrame
    questions: Sequence[Sequence[tuple[int, ...]]]  # per file, rendered prompts
    openings: Sequence[tuple[int, ...]]  # ids of openings of made-up turns
    temperatures: Sequence[float]  # of answers, taken in turn
    question_share: float  # of all prompts
    bare_share: float = 0.25  # of made-up turns, those without an opening

    def stream(self, seed: int) -> Iterator[Prompt]:
        """Go on giving prompts; the same seed gives the same ones.

        A question is answered greedily at most once, since that answer is always the same.
        """
        choose = random.Random(seed)
        asked: set[tuple[int, int]] = set()
        while True:
            temperature = choose.choice(self.temperatures)
            if self.questions and choose.random() < self.question_share:
                source = choose.randrange(len(self.questions))
                number = choose.randrange(len(self.questions[source]))
                if temperature == 0 and (source, number) in asked:
                    temperature = max(self.temperatures) or 1.0
                elif temperature == 0:
                    asked.add((source, number))
                ids = self.questions[source][number]
                yield Prompt(ids, len(ids), temperature, source + 1)
            else:
                bare = not self.openings or choose.random() < self.bare_share
                opening = () if bare else choose.choice(self.openings)
                yield Prompt((*self.frame.head, *opening), 0, temperature, 0)


def encode_openings(codec: TextCodec, frame: ChatFrame, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Give the openings' ids as they stand in the chat template, right after its head."""
    after = 1 + len(frame.tail)
    return [ids[len(frame.head) : len(ids) - after] for ids in render(codec, texts)]


def _common(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """The longest common beginning."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return list(first[:count])
