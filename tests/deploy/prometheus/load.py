"""Traffic of every kind against a server: streams of all draft modes, people who leave, and nonsense."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddtree_client import Client
from ddtree_client.errors import DDTreeClientError

_MODES: Sequence[Mapping[str, Any]] = (
    {"draft_mode": "tree"}, {"draft_mode": "tree"}, {"draft_mode": "tree", "tree_budget": 16},
    {"draft_mode": "tree", "tree_budget": 48}, {"draft_mode": "chain"}, {"draft_mode": "off"},
)  # fmt: skip


@dataclass
class Seen:
    """What the clients saw of it all."""

    outcomes: Counter[str] = field(default_factory=Counter)
    output_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    rounds: int = 0


class Load:
    """Threads that send requests until told to stop."""

    def __init__(
        self,
        url: str,
        prompts: Sequence[Mapping[str, Any]],
        *,
        max_tokens: tuple[int, int],
        disturbed_every: int = 8,
        modes: Sequence[Mapping[str, Any]] = _MODES,
    ) -> None:
        """Take what to ask; of `disturbed_every` requests one is invalid and one is left by its caller."""
        self.seen = Seen()
        self.streams = 0  # how many threads may work now
        self._url = url
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._disturbed_every = disturbed_every
        self._modes = modes
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []

    def run(self, most_streams: int) -> None:
        """Start threads; `streams` says how many of them work."""
        for number in range(most_streams):
            thread = threading.Thread(target=self._work, args=(number,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> Seen:
        """End after the requests under way."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a request never ended"
        return self.seen

    def _work(self, number: int) -> None:
        source = random.Random(number)
        turn = number
        with Client(self._url, timeout_s=90.0) as client:
            while not self._is_over.is_set():
                if number >= self.streams:
                    time.sleep(0.05)
                    continue
                turn += 1
                self._note(self._one(client, source, turn % self._disturbed_every))

    def _one(self, client: Client, source: random.Random, turn: int) -> Seen:
        seen = Seen()
        prompt = source.choice(self._prompts)
        options = {**source.choice(self._modes), "max_tokens": source.randint(*self._max_tokens)}
        try:
            if turn == 0:
                client.generate(**prompt, max_tokens=-4)
            with client.stream(**prompt, **options, ignore_eos=True) as stream:
                for _ in stream:
                    if turn == self._disturbed_every // 2:
                        seen.outcomes["left"] += 1
                        return seen  # leaving the block cancels
                stats = stream.result.stats
        except DDTreeClientError as error:
            seen.outcomes[error.code] += 1
            if error.code == "RESOURCE_EXHAUSTED":
                time.sleep(0.2)
            return seen
        seen.outcomes["completed"] += 1
        seen.output_tokens, seen.rounds = stats.output_tokens, stats.rounds
        seen.draft_tokens, seen.accepted_tokens = stats.draft_tokens, stats.accepted_draft_tokens
        return seen

    def _note(self, one: Seen) -> None:
        with self._lock:
            self.seen.outcomes.update(one.outcomes)
            for name in ("output_tokens", "draft_tokens", "accepted_tokens", "rounds"):
                setattr(self.seen, name, getattr(self.seen, name) + getattr(one, name))
