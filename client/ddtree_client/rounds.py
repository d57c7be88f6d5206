"""What traced rounds say: whose each token is, and what a whole answer's rounds add up to.

Rounds are the server's own objects (`TracedRound`; its docs/TRACE.md says what is in them). Knows nothing of
terminals, pages or connections.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ddtree_client.types import TracedRound

Origin = Literal["accepted", "bonus", "prefill"]
STAGES = ("draft", "build_tree", "verify", "commit")


@dataclass(frozen=True)
class Piece:
    """A token's text, which may be empty while a character is not complete, and where it comes from."""

    text: str
    origin: Origin  # accepted: a draft token the target agreed with; bonus: the target's own, one a round


@dataclass(frozen=True)
class DepthShare:
    """What became of drafts at one depth."""

    depth: int
    rounds: int  # whose tree had a node so deep
    accepted: int  # of them, those whose accepted path got there
    expected: float  # how many of them the drafter's probabilities promised


@dataclass(frozen=True)
class Summary:
    """An answer's rounds together. Times are of rounds that other sequences may have shared."""

    rounds: int
    emitted_tokens: int  # by rounds: without the prefill's token
    accepted_tokens: int  # of them, draft tokens
    verified_nodes: int
    by_depth: tuple[DepthShare, ...]
    tokens_per_round: Mapping[int, int]  # emitted tokens: rounds that emitted so many
    stage_ms: Mapping[str, float]  # of all rounds
    drafting: Mapping[str, int]  # `drafted` or why not: rounds
    most_sequences: int  # that shared a round

    @property
    def acceptance_length(self) -> float | None:
        """Emitted tokens per round; None without rounds."""
        return self.emitted_tokens / self.rounds if self.rounds else None


def pieces(told: TracedRound) -> tuple[Piece, ...]:
    """A round's emitted tokens in order. A stop inside the accepted path leaves no bonus token."""
    texts = told["emitted"]["texts"]
    if told["drafting"] == "prefill":
        return tuple(Piece(text, "prefill") for text in texts)
    accepted = len(told["accepted_path"])
    return tuple(Piece(text, "accepted" if place < accepted else "bonus") for place, text in enumerate(texts))


def summarise(trace: Sequence[TracedRound]) -> Summary:
    """Add an answer's rounds up."""
    rounds = [each for each in trace if each["drafting"] != "prefill"]
    emitted = [len(each["emitted"]["ids"]) for each in rounds]
    return Summary(
        rounds=len(rounds),
        emitted_tokens=sum(emitted),
        accepted_tokens=sum(
            min(len(each["accepted_path"]), tokens) for each, tokens in zip(rounds, emitted, strict=True)
        ),
        verified_nodes=sum(each["nodes_verified"] for each in rounds),
        by_depth=_by_depth(rounds),
        tokens_per_round=dict(sorted(Counter(emitted).items())),
        stage_ms={stage: sum(each["stage_ms"].get(stage, 0.0) for each in rounds) for stage in STAGES},
        drafting=dict(Counter(each["drafting"] for each in rounds)),
        most_sequences=max((each["sequences"] for each in rounds), default=0),
    )


def _by_depth(rounds: Sequence[TracedRound]) -> tuple[DepthShare, ...]:
    reached: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    expected: defaultdict[int, float] = defaultdict(float)
    for each in rounds:
        depths = each["nodes"]["depths"]
        reached.update(set(depths))
        accepted.update(range(1, len(each["accepted_path"]) + 1))
        for depth, probability in zip(depths, each["nodes"]["path_probabilities"], strict=True):
            expected[depth] += probability
    return tuple(
        DepthShare(depth, reached[depth], accepted[depth], expected[depth]) for depth in sorted(reached)
    )
