"""The worker's end of the pipe: one JSON object a line, a setup first, then jobs; it answers each with one.

Knows no model. A worker ends when its input ends, so it never outlives the benchmark.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

from benchmarks.measurement import Answer, Job, Setup


class Decoder(Protocol):
    """A loaded model."""

    def decode(self, job: Job) -> Answer:
        """Decode one prompt and time it."""


def serve(load: Callable[[Setup], Decoder]) -> None:
    """Load, say `ready`, and answer jobs until the input ends; what fails is answered as `error`."""
    # Libraries print; the pipe is for answers only, so what they print goes where errors go.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        decoder = load(Setup(**json.loads(sys.stdin.readline())))
        say({"ready": True})
        for line in sys.stdin:
            say({"answer": decoder.decode(Job.from_json(json.loads(line))).to_json()})
    except Exception as error:  # noqa: BLE001 - whatever it is, the benchmark tells it and ends
        say({"error": f"{type(error).__name__}: {error}"})
