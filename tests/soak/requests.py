"""One request of a soak: of a kind drawn by lot, and whether it ended as its kind may end."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_client import Client, DDTreeClientError

PROMPTS = tuple(tuple(b"soak %d" % number) for number in range(8))
MOST_TOKENS = 24
_OPTIONS: Sequence[dict[str, Any]] = (
    {"draft_mode": "off"}, {"draft_mode": "chain"}, {"tree_budget": 4}, {"tree_budget": 24}, {}, {},
)  # fmt: skip
_BAD: Sequence[dict[str, Any]] = (
    {"temperature": -1.0}, {"max_tokens": 0}, {"tree_budget": 100_000}, {"top_p": 2.0},
    {"max_tokens": 10_000},
)  # fmt: skip

Expected = Mapping[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Outcome:
    """How a request ended."""

    kind: str
    ended: str  # completed, cancelled, deadline or an error's code
    complaint: str = ""  # why that is not accounted for


def expected_answers(client: Client) -> Expected:
    """What the target says to each prompt, by plain decoding."""
    options: dict[str, Any] = {"max_tokens": MOST_TOKENS, "ignore_eos": True, "draft_mode": "off"}
    return {prompt: client.generate(input_ids=prompt, **options).token_ids for prompt in PROMPTS}


class Requests:
    """Sends requests of all kinds; any thread may."""

    def __init__(self, client: Client, expected: Expected) -> None:
        self._client = client
        self._expected = expected
        self._kinds: Mapping[Callable[[random.Random], Outcome], int] = {
            self._complete: 76, self._leave: 8, self._give_up: 4, self._in_time: 6, self._bad: 6,
        }  # fmt: skip

    def one(self, lot: random.Random) -> Outcome:
        """Send one; whatever happens is an outcome."""
        (kind,) = lot.choices(list(self._kinds), weights=list(self._kinds.values()))
        try:
            return kind(lot)
        except Exception as error:  # noqa: BLE001 - what nobody foresaw is what a soak is for
            return Outcome(kind.__name__, type(error).__name__, f"{kind.__name__}: {error}"[:300])

    def _complete(self, lot: random.Random) -> Outcome:
        prompt, count = lot.choice(PROMPTS), lot.randint(1, MOST_TOKENS)
        answer = self._client.generate(
            input_ids=prompt, max_tokens=count, ignore_eos=True, **lot.choice(_OPTIONS)
        )
        is_right = answer.token_ids == self._expected[prompt][:count]
        return Outcome("complete", "completed", "" if is_right else f"wrong answer to {prompt}: {answer}")

    def _leave(self, lot: random.Random) -> Outcome:
        """Read a little and go away."""
        prompt, chunks = lot.choice(PROMPTS), lot.randint(0, 4)
        options = {"max_tokens": 100, "ignore_eos": True, **lot.choice(_OPTIONS)}
        with self._client.stream(input_ids=prompt, **options) as stream:
            for count, _ in enumerate(stream):
                if count >= chunks:
                    break
        return Outcome("leave", "cancelled")

    def _give_up(self, lot: random.Random) -> Outcome:
        """Wait for a tenth of a second at most, which is not enough when the server is busy."""
        try:
            self._client.generate(
                input_ids=lot.choice(PROMPTS), max_tokens=300, ignore_eos=True, draft_mode="off",
                deadline_s=lot.uniform(0.02, 0.1),
            )  # fmt: skip
        except DDTreeClientError as error:
            complaint = "" if error.code == "DEADLINE_EXCEEDED" else f"give up: {error.code}: {error.message}"
            return Outcome("give up", error.code, complaint)
        return Outcome("give up", "completed")

    def _in_time(self, lot: random.Random) -> Outcome:
        """Let the server end in time: the answer so far is right, or nothing came in time."""
        prompt = lot.choice(PROMPTS)
        try:
            answer = self._client.generate(
                input_ids=prompt, max_tokens=400, ignore_eos=True, draft_mode="off",
                deadline_ms=lot.randint(20, 200),
            )  # fmt: skip
        except DDTreeClientError as error:
            complaint = "" if error.code == "UNAVAILABLE" else f"in time: {error.code}: {error.message}"
            return Outcome("in time", error.code, complaint)
        known = self._expected[prompt]
        is_right = answer.token_ids[:MOST_TOKENS] == known[: len(answer.token_ids)]
        is_right = is_right and answer.finish_reason in ("deadline", "length")
        return Outcome("in time", answer.finish_reason, "" if is_right else f"wrong in time: {answer}")

    def _bad(self, lot: random.Random) -> Outcome:
        try:
            self._client.generate(input_ids=lot.choice(PROMPTS), **lot.choice(_BAD))
        except DDTreeClientError as error:
            complaint = "" if error.code == "INVALID_ARGUMENT" else f"bad: {error.code}: {error.message}"
            return Outcome("bad", error.code, complaint)
        return Outcome("bad", "completed", "a bad request was answered")
