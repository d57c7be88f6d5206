"""The target's law by the book: plain lists and loops, everything recomputed from the whole prefix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

from ddtree.sampling_spec import SamplingSpec

Logits = Callable[[tuple[int, ...]], Sequence[float]]  # of the next token, by what was emitted so far


def adjusted_logits(
    logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], spec: SamplingSpec
) -> list[float]:
    """Everything before the temperature."""
    values = list(logits)
    prefix = [*prompt, *output]
    for word in spec.bad_words:
        before = len(word) - 1
        if before == 0 or tuple(prefix[-before:]) == word[:-1]:
            values[word[-1]] = -math.inf
    if len(output) < spec.min_tokens:
        for token in spec.stop_ids:
            values[token] = -math.inf
    for token, bias in spec.logit_bias:
        values[token] += bias
    for token in range(len(values)):
        if token in prefix:
            penalty = spec.repetition_penalty
            values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
        values[token] -= spec.frequency_penalty * output.count(token)
        values[token] -= spec.presence_penalty * (token in output)
    return values


def law(values: Sequence[float], spec: SamplingSpec) -> list[float]:
    """Probabilities of the next token from adjusted logits."""
    if spec.temperature == 0:
        best = max(range(len(values)), key=lambda token: (values[token], -token))
        return [float(token == best) for token in range(len(values))]
    kept = _softmax([value / spec.temperature for value in values])
    if spec.top_k:
        floor = sorted(kept, reverse=True)[min(spec.top_k, len(kept)) - 1]
        kept = _normalised([share if share >= floor else 0.0 for share in kept])
    if spec.top_p < 1:
        descending = sorted(kept, reverse=True)
        count = 1
        while math.fsum(descending[:count]) < spec.top_p and count < len(descending):
            count += 1
        kept = _normalised([share if share >= descending[count - 1] else 0.0 for share in kept])
    if spec.min_p:
        kept = _normalised([share if share >= spec.min_p * max(kept) else 0.0 for share in kept])
    return kept


def sequence_law(
    logits: Logits, prompt: Sequence[int], spec: SamplingSpec, vocab_size: int, length: int
) -> dict[tuple[int, ...], float]:
    """The probability of every sequence of `length` tokens after the prompt."""
    found = {}
    for tokens in product(range(vocab_size), repeat=length):
        probability = 1.0
        for place, token in enumerate(tokens):
            output = tokens[:place]
            values = adjusted_logits(logits(output), prompt, output, spec)
            probability *= law(values, spec)[token]
        found[tokens] = probability
    return found


def _softmax(values: Sequence[float]) -> list[float]:
    largest = max(values)
    return _normalised([math.exp(value - largest) for value in values])


def _normalised(shares: Sequence[float]) -> list[float]:
    total = math.fsum(shares)
    return [share / total for share in shares]
