"""The numbers a server publishes: their names, what they mean, and what they grew by since last published.

Values are collected here in plain Python and handed over in bulk, because one update of Triton's own metrics
costs some 15 µs and a round of 32 sequences would make hundreds. This module knows neither Triton nor when
things happen; `metrics_listener` fills it, `metrics_publisher` empties it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

_MOST_OBSERVATIONS = 10_000  # kept between two publications; more come only when nobody publishes


class Counter:
    """A number that only grows."""

    def __init__(self) -> None:
        self._growth = 0.0

    def add(self, amount: float = 1.0) -> None:
        """Grow."""
        assert amount >= 0, f"a counter cannot shrink by {-amount}"
        self._growth += amount

    def take(self) -> float:
        """Give what it grew by since the last time."""
        growth, self._growth = self._growth, 0.0
        return growth


class Gauge:
    """A number that goes up and down."""

    def __init__(self) -> None:
        self._value: float | None = None
        self._is_new = False

    def set(self, value: float) -> None:
        """Take another value."""
        self._is_new = self._is_new or value != self._value
        self._value = value

    def take(self) -> float | None:
        """Give its value if that changed since the last time."""
        is_new, self._is_new = self._is_new, False
        return self._value if is_new else None


class Histogram:
    """A distribution of what happens once a request; every observation is handed over."""

    def __init__(self) -> None:
        self._observations: list[float] = []

    def observe(self, value: float) -> None:
        """Count a value."""
        if len(self._observations) < _MOST_OBSERVATIONS:
            self._observations.append(value)

    def take(self) -> list[float]:
        """Give the values since the last time."""
        observations, self._observations = self._observations, []
        return observations


@dataclass(frozen=True)
class TallyGrowth:
    """What a tally grew by."""

    at_most: tuple[int, ...]  # observations in each bucket and all before it; the last bucket has no end
    total: float

    @property
    def count(self) -> int:
        """Observations."""
        return self.at_most[-1]


class Tally:
    """A distribution of what happens in every round; handed over as counts per bucket."""

    def __init__(self, buckets: Sequence[float]) -> None:
        self._buckets = buckets
        self._clear()

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value `count` times."""
        self._counts[bisect_left(self._buckets, value)] += count
        self._total += value * count

    def take(self) -> TallyGrowth | None:
        """Give what it grew by since the last time; None when it did not."""
        at_most, seen = [], 0
        for count in self._counts:
            seen += count
            at_most.append(seen)
        growth = TallyGrowth(tuple(at_most), self._total)
        self._clear()
        return growth if seen else None

    def _clear(self) -> None:
        self._counts = [0] * (len(self._buckets) + 1)
        self._total = 0.0


_Series = TypeVar("_Series", bound="Counter | Gauge | Histogram | Tally")


class Family(Generic[_Series]):
    """Series of one name, told apart by the values of at most one label."""

    def __init__(
        self,
        name: str,
        meaning: str,
        make: Callable[[], _Series],
        *,
        label: str = "",
        values: Sequence[str] = (),
        buckets: Sequence[float] = (),
        fixed_labels: Mapping[str, str] | None = None,
    ) -> None:
        """Make the series that are known from the start: a rate needs a zero to begin at.

        Args:
            name: in Prometheus' convention.
            meaning: one line, shown as help.
            make: makes a series.
            label: the label's name; empty: there is one series.
            values: label values to begin with.
            buckets: upper bounds of a distribution.
            fixed_labels: labels of every series.
        """
        self.name = name
        self.meaning = meaning
        self.label = label
        self.buckets = tuple(buckets)
        self.fixed_labels = dict(fixed_labels or {})
        self._make = make
        self._series: dict[str, _Series] = {value: make() for value in (values if label else [""])}

    def __call__(self, value: str = "") -> _Series:
        """Give the series with this label value."""
        series = self._series.get(value)
        if series is None:
            series = self._series[value] = self._make()
        return series

    def items(self) -> list[tuple[dict[str, str], _Series]]:
        """Give every series with its labels."""
        own = [({self.label: value} if self.label else {}, one) for value, one in self._series.items()]
        return [({**self.fixed_labels, **labels}, one) for labels, one in own]


AnyFamily = Family[Counter] | Family[Gauge] | Family[Histogram] | Family[Tally]


def _distribution(name: str, meaning: str, buckets: Sequence[float], label: str = "") -> Family[Histogram]:
    return Family(name, meaning, Histogram, buckets=buckets, label=label)


def _tally(name: str, meaning: str, buckets: Sequence[float], label: str = "") -> Family[Tally]:
    return Family(name, meaning, lambda: Tally(buckets), buckets=buckets, label=label)


_REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)
_FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)
_INTER_TOKEN_SECONDS = (0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.2, 0.5, 1, 2.5)
_STAGE_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2.5)
_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24)
_NODES = (0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256, 512, 1024)

OUTCOMES = ("completed", "cancelled", "invalid", "overloaded", "unavailable", "failed", "stop_order")
CANCEL_CAUSES = ("client_gone", "stop_request", "shutdown")
FALLBACKS = ("drafter_full", "drafter_lost", "not_paying", "native_chain")
STAGES = ("drafter", "tree_builder", "target_verifier")


class Metrics:
    """Every number there is. A stage's time is labelled by what it does, its state by its model's name."""

    def __init__(self, build: Mapping[str, str] | None = None) -> None:
        """Begin at zero; `build` is what the build info says."""

        def count(name: str, meaning: str, label: str = "", values: Sequence[str] = ()) -> Family[Counter]:
            return Family(f"ddtree_{name}_total", meaning, Counter, label=label, values=values)

        def gauge(name: str, meaning: str, label: str = "", values: Sequence[str] = ()) -> Family[Gauge]:
            return Family(f"ddtree_{name}", meaning, Gauge, label=label, values=values)

        stage = "stage"
        self.requests = count("requests", "Requests that got their last response", "outcome", OUTCOMES)
        self.cancellations = count("cancellations", "Cancelled requests by cause", "cause", CANCEL_CAUSES)
        self.prompt_tokens = count("prompt_tokens", "Tokens of the prompts of accepted requests")
        self.emitted_tokens = count("emitted_tokens", "Tokens given to callers")
        self.plain_equivalent_tokens = count(
            "plain_equivalent_tokens",
            "Tokens that decoding without drafts would have given in the same time, by the measured cost",
        )
        self.rounds = count("rounds", "Rounds; one decodes all sequences that can be decoded")
        self.sequence_rounds = count(
            "sequence_rounds", "Rounds counted once for each sequence", "drafts", ("with", "without")
        )
        self.draft_tokens = count("draft_tokens", "Draft tokens verified")
        self.accepted_tokens = count("accepted_tokens", "Draft tokens accepted and emitted")
        self.accepted_at_depth = count(
            "accepted_at_depth", "Draft tokens accepted and emitted, by their depth in the tree", "depth"
        )
        self.prefix_hit_tokens = count("prefix_cache_hit_tokens", "Prompt tokens that a stage had cached")
        self.preemptions = count("preemptions", "Sequences put back into the queue for want of KV pages")
        self.recoveries = count(
            "session_recoveries",
            "Sessions that a stage lost and got again",
            stage,
            ("drafter", "target_verifier"),
        )
        self.fallbacks = count(
            "fallbacks", "Times that drafting was given up, by reason", "reason", FALLBACKS
        )
        self.stage_errors = count("stage_errors", "Calls that a stage did not answer", stage, STAGES)

        self.active_requests = gauge("active_requests", "Requests being worked on")
        self.queued_requests = gauge("queued_requests", "Requests of which no sequence has a place yet")
        self.sequences = gauge("sequences", "Live sequences", "state", ("running", "waiting"))
        self.max_sequences = gauge("max_sequences", "Most sequences that run at a time")
        self.kv_pages_used = gauge("kv_pages_used", "KV pages held by sessions", stage)
        self.kv_pages_capacity = gauge("kv_pages_capacity", "KV pages there are", stage)
        self.states_used = gauge("recurrent_states_used", "Recurrent states held by sessions", stage)
        self.states_capacity = gauge("recurrent_states_capacity", "Recurrent states there are", stage)
        self.snapshots = gauge(
            "recurrent_snapshots", "Recurrent states kept for sequences that begin alike", stage
        )
        self.sessions = gauge("sessions", "Sessions that a stage holds", stage)
        self.stage_up = gauge("stage_up", "Whether a stage answered its last call", stage)
        self.build_info = Family(
            "ddtree_build_info", "Always 1; the labels say what runs", Gauge, fixed_labels=build
        )
        self.build_info().set(1)

        self.stage_seconds = _tally(
            "ddtree_stage_seconds",
            "Time of a packed call by what was done: a stage's own clock, and the hops there and back",
            _STAGE_SECONDS, stage,
        )  # fmt: skip
        self.first_token_seconds = _distribution(
            "ddtree_time_to_first_token_seconds", "From a request's arrival to its first token",
            _FIRST_TOKEN_SECONDS,
        )  # fmt: skip
        self.request_seconds = _distribution(
            "ddtree_request_seconds", "From a completed request's arrival to its last response",
            _REQUEST_SECONDS,
        )  # fmt: skip
        self.inter_token_seconds = _tally(
            "ddtree_inter_token_seconds", "Time per token after the first, evenly over a round's tokens",
            _INTER_TOKEN_SECONDS,
        )  # fmt: skip
        self.acceptance_length = _tally(
            "ddtree_acceptance_length", "Tokens emitted by one sequence in a round with drafts", _LENGTHS
        )
        self.tree_size = _tally("ddtree_tree_size_nodes", "Draft nodes verified of one sequence", _NODES)
        self.budget = _tally(
            "ddtree_budget_nodes", "Draft nodes that were allowed, and who chose", _NODES, "chosen_by"
        )

    def families(self) -> Iterator[AnyFamily]:
        """Give every family."""
        yield from vars(self).values()
