"""Plain sampled decoding: one full forward a token, everything recomputed from the whole prefix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from ddtree.noise import gumbel
from ddtree.sampling_spec import SamplingSpec
from tests.oracles.sampling_law import adjusted_logits, law


@dataclass(frozen=True)
class Decoded:
    """What was emitted, and the distributions behind it."""

    tokens: list[int]
    model: list[torch.Tensor]  # log-probabilities of the model, [V] each
    drawn: list[float]  # log-probability of the token in the distribution it was drawn from


class SampledReference:
    """A small target without cache, tree or batch."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def __call__(
        self, prompt: Sequence[int], spec: SamplingSpec, max_tokens: int, stop_ids: frozenset[int]
    ) -> Decoded:
        decoded = Decoded([], [], [])
        while len(decoded.tokens) < max_tokens:
            output = decoded.tokens
            with torch.no_grad():
                logits = self._model(torch.tensor([[*prompt, *output]])).logits[0, -1]
            shares = law(adjusted_logits(logits.tolist(), prompt, output, spec), spec)
            log_law = [math.log(share) if share else -math.inf for share in shares]
            token = _draw(log_law, spec, len(prompt) + len(output))
            decoded.model.append(logits.log_softmax(-1))
            decoded.drawn.append(log_law[token])
            output.append(token)
            if token in stop_ids:
                break
        return decoded


def _draw(log_law: list[float], spec: SamplingSpec, position: int) -> int:
    seed = spec.seed if spec.seed < 2**63 else spec.seed - 2**64
    index, at = torch.tensor([spec.sequence_index]), torch.tensor([position])
    noise = gumbel(torch.tensor([seed]), index, at, len(log_law))[0]
    return int((torch.tensor(log_law, dtype=torch.float64) + noise).argmax())
