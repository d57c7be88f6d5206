"""What a drafter is told: the target's hidden states of exactly the committed tokens, chunk by chunk."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from ddtree.params import GenerationParams
from tests.fakes.pipeline import GreedyReference, generate_all, make_oracle, make_verifier, running_engine
from tests.fakes.recording_drafter import RecordingDrafter
from tests.fakes.tiny_models import EOS_ID, TAPS, make_target


@pytest.mark.parametrize(
    ("prefill_chunk", "lengths"),
    [(3, (1, 10, 41)), (64, (1, 10, 41)), (24, tuple(range(2, 34, 2)))],
    ids=["many chunks", "one chunk", "sixteen at once"],
)
async def test_features_are_those_of_a_plain_forward(
    tmp_path: Path, prefill_chunk: int, lengths: tuple[int, ...]
) -> None:
    """Of every chunk of the prompt, and of accepted paths wherever in their trees they stood.

    A feature of the wrong row fails nothing: the draft is only accepted less. So each one is compared.
    """
    folder = make_target(tmp_path)
    reference, verifier = GreedyReference(folder), make_verifier(folder)
    drafter = RecordingDrafter(make_oracle(folder, noise=0.7, seed=2))
    source = random.Random(4)
    requests = [
        GenerationParams(
            tuple(source.randrange(256) for _ in range(length)),
            max_tokens=30,
            tree_budget=20,
            stop_ids=frozenset({EOS_ID}),
        )
        for length in lengths
    ]
    async with running_engine(verifier, drafter, folder, prefill_chunk=prefill_chunk) as engine:
        sinks = await generate_all(engine, requests)
    texts = [[*params.prompt_ids, *sink.token_ids] for params, sink in zip(requests, sinks, strict=True)]
    assert len(drafter.contexts) == len(texts)
    for context in drafter.contexts.values():
        (text,) = [text for text in texts if text[: len(context.ids)] == context.ids]
        assert len(context.ids) > len(text) - 10, "nearly all of it was told"
        with torch.inference_mode():
            hidden = reference.model(torch.tensor([context.ids]), output_hidden_states=True).hidden_states
            taps = torch.cat([hidden[tap + 1][0] for tap in TAPS], dim=-1)
            expected = verifier.projection(taps)
        assert torch.allclose(torch.cat(context.features), expected, atol=1e-4)
