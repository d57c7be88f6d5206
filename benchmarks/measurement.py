"""What a contender is asked and what it answers, with the numbers that follow from one answer.

Plain data that travels as one line of JSON. Knows no model, no process and no statistics over several runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

DraftMode = Literal["tree", "chain", "off"]


@dataclass(frozen=True)
class Setup:
    """Which checkpoints a player loads, and how."""

    target: str
    draft: str
    dtype: str  # bfloat16 or float32, the same for every player
    threads: int  # CPU threads of one player


@dataclass(frozen=True)
class Job:
    """One prompt to decode greedily, up to `max_tokens` or a stop id, which counts as a token."""

    input_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    max_tokens: int
    draft_mode: DraftMode = "off"  # peers have one way only
    tree_budget: int = -1  # draft nodes; -1: chosen round by round

    def to_json(self) -> dict[str, Any]:
        """Give what `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Job:
        """Read what `to_json` gave."""
        return cls(**{**value, "input_ids": tuple(value["input_ids"]), "stop_ids": tuple(value["stop_ids"])})


@dataclass(frozen=True)
class Answer:
    """What one run gave; seconds count from the moment the prompt's ids were handed over."""

    token_ids: tuple[int, ...]
    first_tokens: int  # tokens there when the first ones came: the prefill's
    first_s: float
    total_s: float
    rounds: int  # target forwards after the prefill
    nodes: float | None = None  # draft nodes per round, mean; None where it is not known
    stage_ms: Mapping[str, float] = field(default_factory=dict)  # medians over the run's rounds

    def to_json(self) -> dict[str, Any]:
        """Give what `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Answer:
        """Read what `to_json` gave."""
        return cls(**{**value, "token_ids": tuple(value["token_ids"])})

    @property
    def tokens_per_s(self) -> float | None:
        """Decoding speed: tokens after the first ones over the time after them; None without any."""
        tokens, seconds = len(self.token_ids) - self.first_tokens, self.total_s - self.first_s
        return tokens / seconds if tokens > 0 and seconds > 0 else None

    @property
    def end_to_end_tokens_per_s(self) -> float:
        """All tokens over the whole time, the prefill included."""
        return len(self.token_ids) / self.total_s

    @property
    def acceptance_length(self) -> float | None:
        """Emitted tokens per round; None without rounds."""
        return (len(self.token_ids) - self.first_tokens) / self.rounds if self.rounds else None

    @property
    def round_ms(self) -> float | None:
        """Milliseconds of a round, everything between two rounds included; None without rounds."""
        return (self.total_s - self.first_s) * 1e3 / self.rounds if self.rounds else None
