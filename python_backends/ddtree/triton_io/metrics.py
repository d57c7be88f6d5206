"""Publishes numbers on Triton's own metrics port, through the Python backend's custom metrics.

Used on one thread at a time, the event loop's: Triton 2.51 crashes when two threads of a stub update metrics
together. Triton's histograms have no bulk update, so a tally's series are counters of the same names and
labels (`…_bucket`, `…_sum`, `…_count`), which PromQL cannot tell apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from ddtree.metrics import AnyFamily, Counter, Gauge, Histogram, Metrics, Tally, TallyGrowth

_Labels = Mapping[str, str]


class TritonExporter:
    """Metrics of this model, labelled with its name."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        """Make every series that is known now; the first updates may follow on another thread.

        Args:
            metrics: whose families are published.
            model: value of the label `model`.
        """
        self._model = model
        self._metrics = metrics
        self._families: dict[str, Any] = {}  # Triton drops a family when its object goes
        self._series: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}
        for _ in self.updates(metrics):
            pass

    def updates(self, metrics: Metrics) -> Iterator[None]:
        """Publish what changed, one update at each step."""
        for family in metrics.families():
            for labels, series in family.items():
                if isinstance(series, Counter):
                    yield from self._count(family.name, family.meaning, labels, series.take())
                elif isinstance(series, Gauge):
                    yield from self._gauge(family, labels, series)
                elif isinstance(series, Histogram):
                    yield from self._histogram(family, labels, series)
                else:
                    yield from self._tally(family, labels, series)

    def _count(self, name: str, meaning: str, labels: _Labels, growth: float) -> Iterator[None]:
        kind = pb_utils.MetricFamily.COUNTER
        metric = self._metric(name, meaning, kind, labels)
        if growth:
            metric.increment(growth)
            yield

    def _gauge(self, family: AnyFamily, labels: _Labels, gauge: Gauge) -> Iterator[None]:
        value = gauge.take()
        if value is not None:
            self._metric(family.name, family.meaning, pb_utils.MetricFamily.GAUGE, labels).set(value)
            yield

    def _histogram(self, family: AnyFamily, labels: _Labels, histogram: Histogram) -> Iterator[None]:
        kind = pb_utils.MetricFamily.HISTOGRAM
        metric = self._metric(family.name, family.meaning, kind, labels, list(family.buckets))
        for value in histogram.take():
            metric.observe(value)
            yield

    def _tally(self, family: AnyFamily, labels: _Labels, tally: Tally) -> Iterator[None]:
        growth = tally.take() or TallyGrowth((0,) * (len(family.buckets) + 1), 0.0)
        bounds = [*(f"{bucket:g}" for bucket in family.buckets), "+Inf"]
        # From the widest bucket to the narrowest: whoever reads in between never sees fewer in a wider one.
        for bound, count in reversed(list(zip(bounds, growth.at_most, strict=True))):
            buckets = {**labels, "le": bound}
            yield from self._count(f"{family.name}_bucket", f"{family.meaning} (buckets)", buckets, count)
        yield from self._count(f"{family.name}_sum", f"{family.meaning} (sum)", labels, growth.total)
        yield from self._count(f"{family.name}_count", f"{family.meaning} (count)", labels, growth.count)

    def _metric(
        self, name: str, meaning: str, kind: Any, labels: _Labels, buckets: list[float] | None = None
    ) -> Any:
        key = (name, tuple(labels.items()))
        metric = self._series.get(key)
        if metric is None:
            family = self._families.get(name)
            if family is None:
                family = pb_utils.MetricFamily(name=name, description=meaning, kind=kind)
                self._families[name] = family
            make: Callable[..., Any] = family.Metric
            metric = make(
                labels={"model": self._model, **labels}, **({"buckets": buckets} if buckets else {})
            )
            self._series[key] = metric
        return metric
