"""Worker: `transformers.generate` as its documentation says, greedy and with its cache."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.measurement import Answer, Job, Setup
from benchmarks.workers.channel import serve


class _FirstTokenClock:
    """What `generate` calls a streamer: it is given the prompt, then each token."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._calls = 0
        self.first_s = 0.0

    def put(self, _: torch.Tensor) -> None:
        self._calls += 1
        if self._calls == 2:
            self.first_s = time.perf_counter() - self._start

    def end(self) -> None:
        """Nothing was held back."""

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start


class _TransformersPeer:
    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        dtype = getattr(torch, setup.dtype)
        self._model: Any = AutoModelForCausalLM.from_pretrained(setup.target, dtype=dtype).eval()

    def decode(self, job: Job) -> Answer:
        input_ids = torch.tensor([job.input_ids])
        clock = _FirstTokenClock()
        output = self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=job.max_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=list(job.stop_ids),
            pad_token_id=job.stop_ids[0] if job.stop_ids else 0,
            streamer=clock,
        )
        total_s = clock.elapsed_s()
        token_ids = tuple(output[0, input_ids.shape[1] :].tolist())
        return Answer(token_ids, 1, clock.first_s, total_s, rounds=len(token_ids) - 1, nodes=0.0)


if __name__ == "__main__":
    serve(_TransformersPeer)
