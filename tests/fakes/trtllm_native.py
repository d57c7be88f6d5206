"""The public API's part of the stub: an engine that drafts chains of its own and streams tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM


class Result:
    """One request's stream; iterating gives itself, grown by the tokens of one engine step."""

    def __init__(self, model: Any, ids: Sequence[int], sampling: Any, chain: int) -> None:
        self.outputs = [SimpleNamespace(token_ids=[])]
        self.finished = False
        self.is_aborted = False
        self._steps = self._generate(model, list(ids), sampling, chain)

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        if self.finished:
            raise StopIteration
        self.outputs[0].token_ids += next(self._steps)
        return self

    def abort(self) -> None:
        self.is_aborted = self.finished = True

    @staticmethod
    @torch.inference_mode()
    def _next(model: Any, ids: list[int]) -> int:
        return int(model(torch.tensor([ids])).logits[0, -1].argmax())

    def _generate(self, model: Any, ids: list[int], sampling: Any, chain: int) -> Iterator[list[int]]:
        left, step = sampling.max_tokens, 0
        while left > 0:
            tokens: list[int] = []
            # A step emits one token and as many drafts as happened to be right.
            for _ in range(min(left, 1 + step % (chain + 1))):
                tokens.append(self._next(model, ids))
                ids.append(tokens[-1])
            left, step = left - len(tokens), step + 1
            self.finished = left == 0
            yield tokens


class LLM:
    open: ClassVar[list[Result]] = []

    def __init__(self, **options: Any) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32).eval()
        drafting = options.get("speculative_config")
        self.chain = drafting.max_draft_len if drafting else 0

    def generate_async(self, *, inputs: Sequence[int], sampling_params: Any, streaming: bool) -> Result:
        assert streaming
        result = Result(self.model, inputs, sampling_params, self.chain)
        self.open.append(result)
        return result


class Options(SimpleNamespace):
    """Arguments and nothing else."""


NATIVE = {"LLM": LLM, "SamplingParams": Options, "DFlashDecodingConfig": Options}
