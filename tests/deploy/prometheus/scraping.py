"""What stands on a metrics port, as numbers by name and labels."""

from __future__ import annotations

import re
import time
import urllib.request
from dataclasses import dataclass

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
# What must be zero when nothing runs.
AT_REST = ("ddtree_active_requests", "ddtree_queued_requests", "ddtree_sequences", "ddtree_kv_pages_used",
           "ddtree_sessions")  # fmt: skip
_ENDED = "ddtree_requests_total"
_REST_S = 30.0
_PUBLISHED_S = 0.6  # the end of the last request is published some 0.1 s later, on a quiet machine
_SETTLED_S = 0.1  # a publication takes a few milliseconds


@dataclass(frozen=True)
class Scrape:
    """One reading of a port."""

    text: str

    @property
    def ours(self) -> str:
        """The lines of our own series."""
        return "\n".join(line for line in self.text.splitlines() if line.startswith("ddtree_"))

    def has(self, name: str) -> bool:
        """Whether there is a sample of a name."""
        return any(sample == name for sample, _, _ in self._samples())

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples of a name with these labels; fails when there is none."""
        found = self.values(name, **labels)
        assert found, f"no sample of {name} with {labels}"
        return sum(found)

    def values(self, name: str, **labels: str) -> list[float]:
        """The samples of a name with these labels."""
        return [
            value
            for sample, has, value in self._samples()
            if sample == name and labels.items() <= has.items()
        ]

    def label_names(self) -> dict[str, set[str]]:
        """Label names by sample name."""
        names: dict[str, set[str]] = {}
        for sample, labels, _ in self._samples():
            names.setdefault(sample, set()).update(labels)
        return names

    def series(self) -> int:
        """How many of our own series there are."""
        return sum(sample.startswith("ddtree_") for sample, _, _ in self._samples())

    def _samples(self) -> list[tuple[str, dict[str, str], float]]:
        samples = []
        for line in self.text.splitlines():
            match = _SAMPLE.match(line)
            if match is not None:
                labels = dict(_LABEL.findall(match["labels"] or ""))
                samples.append((match["name"], labels, float(match["value"])))
        return samples


def scrape(address: str) -> Scrape:
    """Read the port at `host:port`."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return Scrape(answer.read().decode())


def at_rest(address: str, since: Scrape | None = None, *, requests: int = 0) -> Scrape:
    """The first reading that says that nothing runs and nothing is held, of what happened before now.

    Args:
        address: of the port.
        since: a reading from before the requests that are waited for; without one, some time is.
        requests: how many have ended since then, whatever their outcome.
    """
    if since is None:
        time.sleep(_PUBLISHED_S)
    deadline = time.monotonic() + _REST_S
    last = ""
    while True:
        reading = scrape(address)
        # What the stages hold is there once they were asked.
        missing = {name: reading.total(name) if reading.has(name) else -1 for name in AT_REST}
        if since is not None:
            missing[_ENDED] = max(0, requests - sum(reading.values(_ENDED)) + sum(since.values(_ENDED)))
        if not any(missing.values()) and reading.ours == last:
            return reading
        assert time.monotonic() < deadline, f"after {_REST_S:g} s: {missing}"
        last = reading.ours
        time.sleep(_SETTLED_S)
