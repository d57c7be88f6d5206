"""A worker without a model: repeats the prompt's ids; max_tokens 1 makes it fail, 2 makes it end."""

from __future__ import annotations

import sys

from benchmarks.measurement import Answer, Job, Setup
from benchmarks.workers.channel import serve


class Echo:
    def __init__(self, setup: Setup) -> None:
        if setup.target == "nowhere":
            raise FileNotFoundError("no such target")
        sys.stdout.write("loading, says a library\n")

    def decode(self, job: Job) -> Answer:
        sys.stdout.write("decoding, says a library\n")
        sys.stdout.flush()
        if job.max_tokens == 1:
            raise ValueError("one token is too few")
        if job.max_tokens == 2:
            sys.stderr.write("out of memory\n")
            sys.stderr.flush()
            raise SystemExit(1)
        return Answer(job.input_ids, 1, 0.5, 1.0, rounds=2, stage_ms={"draft": 1.5})


if __name__ == "__main__":
    serve(Echo)
