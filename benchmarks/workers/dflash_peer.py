"""Worker: the public package `dflash`, linear DFlash, driven as its own command drives it.

It runs in an environment of its own, see `benchmarks.dflash_environment`. Rounds and the first token's time
are read by a hook on the target: the package's own statistics need a GPU.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.measurement import Answer, Job, Setup
from benchmarks.workers.channel import serve


class _DFlashPeer:
    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        # By name, as the package is no requirement of this project and its types are nowhere to be found.
        package: Any = importlib.import_module("dflash.model")
        options: Any = {"dtype": getattr(torch, setup.dtype), "attn_implementation": "sdpa"}
        self._target: Any = AutoModelForCausalLM.from_pretrained(setup.target, **options).eval()
        self._draft: Any = package.DFlashDraftModel.from_pretrained(setup.draft, **options).eval()
        self._generate: Any = package.dflash_generate
        self._forward_ends: list[float] = []
        self._target.register_forward_hook(self._note_forward)

    def _note_forward(self, *_: object) -> None:
        self._forward_ends.append(time.perf_counter())

    def decode(self, job: Job) -> Answer:
        input_ids = torch.tensor([job.input_ids])
        self._forward_ends.clear()
        start = time.perf_counter()
        output = self._generate(
            self._draft,
            self._target,
            input_ids,
            max_new_tokens=job.max_tokens,
            stop_token_ids=list(job.stop_ids),
        )
        total_s = time.perf_counter() - start
        return Answer(
            token_ids=tuple(output[0, input_ids.shape[1] :].tolist()),
            first_tokens=1,
            first_s=self._forward_ends[0] - start,
            total_s=total_s,
            rounds=len(self._forward_ends) - 1,
            nodes=float(self._draft.block_size - 1),
        )


if __name__ == "__main__":
    serve(_DFlashPeer)
