"""Adds up the numbers of an engine over all publications, and asks it as the orchestrator does."""

from __future__ import annotations

from ddtree.errors import Unavailable
from ddtree.events import (
    Event,
    RequestArrived,
    RequestEnded,
    RequestWatch,
)
from ddtree.metrics import Counter, Gauge, Metrics, Tally
from ddtree.metrics_listener import MetricsListener
from ddtree.params import GenerationParams
from tests.fakes.collecting_sink import CollectingSink


class Counted:
    """An engine's numbers, added up over all publications."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.events: list[Event] = []
        self._listener = MetricsListener(self.metrics)
        self._totals: dict[str, float] = {}

    def observe(self, event: Event) -> None:
        self.events.append(event)
        self._listener(event)

    def read(self) -> dict[str, float]:
        """Values by name and label value; of a tally its sum and count."""
        self._listener.refresh()
        for family in self.metrics.families():
            for labels, series in family.items():
                name = ".".join(
                    [family.name.removeprefix("ddtree_").removesuffix("_total"), *labels.values()]
                )
                if isinstance(series, Counter):
                    self._add(name, series.take())
                elif isinstance(series, Gauge):
                    self._totals[name] = series._value if series._value is not None else -1
                elif isinstance(series, Tally):
                    growth = series.take()
                    self._add(f"{name}.sum", growth.total if growth else 0)
                    self._add(f"{name}.count", growth.count if growth else 0)
                else:
                    values = series.take()
                    self._add(f"{name}.sum", sum(values))
                    self._add(f"{name}.count", len(values))
        return self._totals

    def _add(self, name: str, growth: float) -> None:
        self._totals[name] = self._totals.get(name, 0) + growth


async def answer(
    engine: object, counted: Counted, params: GenerationParams, cancel_after: int | None = None
) -> CollectingSink:
    """One request of one row, as the orchestrator tells of it."""
    request = RequestWatch("id")
    counted.observe(RequestArrived(request))
    collected = CollectingSink(cancel_after)
    try:
        await engine.generate(params, collected, request)  # type: ignore[attr-defined]
        outcome = "cancelled" if collected.finish_reason == "cancelled" else "completed"
        counted.observe(RequestEnded(request, outcome))  # type: ignore[arg-type]
    except Unavailable:
        counted.observe(RequestEnded(request, "unavailable"))
    return collected
