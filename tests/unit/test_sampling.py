"""Choosing a token: every rule against the book, at its edges, and row by row as in a batch."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree import log_probs
from ddtree.logits_process import Cuts, temper_and_cut
from ddtree.sampling import Draws, PathSampler, SamplerState, choose
from ddtree.sampling_spec import SamplingSpec
from tests.oracles.sampling_law import adjusted_logits, law

CPU = torch.device("cpu")
V = 12


def probabilities(logits: Sequence[float], **settings: float) -> list[float]:
    cuts = Cuts.of([SamplingSpec(**{"temperature": 1.0, **settings})], CPU)  # type: ignore[arg-type]
    shares: list[float] = temper_and_cut(torch.tensor([list(logits)]), cuts).softmax(-1)[0].tolist()
    return shares


def state(spec: SamplingSpec, committed: Sequence[int] = (), vocab_size: int = V) -> SamplerState:
    made = SamplerState(spec, vocab_size=vocab_size, device=CPU)
    made.push(committed)
    return made


# In steps, so that logits are equal or clearly different.
LOGITS = st.lists(st.integers(-160, 160).map(lambda step: step / 8), min_size=2, max_size=V)


@settings(deadline=None, max_examples=300)
@given(
    logits=LOGITS,
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 15),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)
def test_cuts_are_those_of_the_book(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    spec = SamplingSpec(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    # Where float32 and the book's float64 may fall on two sides of an edge, either side is right.
    nudges = (1.0, 1 - 1e-5, 1 + 1e-5)
    books = [
        law(logits, SamplingSpec(temperature, spec.top_k, min(1.0, top_p * p), min(1.0, min_p * m)))
        for p in nudges
        for m in nudges
    ]
    assert any(
        all(math.isclose(mine, theirs, abs_tol=1e-4) for mine, theirs in zip(got, book, strict=True))
        for book in books
    )


def test_top_k_keeps_every_token_that_ties_with_the_last_one() -> None:
    assert probabilities([2.0, 1.0, 1.0, 0.0], top_k=2)[3] == 0
    assert probabilities([2.0, 1.0, 1.0, 0.0], top_k=2)[1:3] == pytest.approx([0.2119, 0.2119], abs=1e-4)
    assert probabilities([1.0, 0.0], top_k=500) == pytest.approx(probabilities([1.0, 0.0]))


def test_top_p_reaches_its_share_and_not_more() -> None:
    logits = [math.log(share) for share in (0.5, 0.25, 0.125, 0.125)]
    assert [share > 0 for share in probabilities(logits, top_p=0.5)] == [True, False, False, False]
    assert [share > 0 for share in probabilities(logits, top_p=0.51)] == [True, True, False, False]
    assert [share > 0 for share in probabilities(logits, top_p=0.75)] == [True, True, False, False]
    # The last two tie, so the edge takes both or neither.
    assert [share > 0 for share in probabilities(logits, top_p=0.8)] == [True, True, True, True]
    assert [share > 0 for share in probabilities(logits, top_p=1e-9)] == [True, False, False, False]


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    logits = [math.log(share) for share in (0.4, 0.3, 0.2, 0.1)]
    # Of 0.4 and 0.3 the first alone is 0.571 of the mass.
    assert [share > 0 for share in probabilities(logits, top_k=2, top_p=0.57)] == [True, False, False, False]
    assert [share > 0 for share in probabilities(logits, top_k=2, top_p=0.58)] == [True, True, False, False]


def test_min_p_is_relative_to_the_most_probable_token() -> None:
    logits = [math.log(share) for share in (0.5, 0.26, 0.24)]
    assert [share > 0 for share in probabilities(logits, min_p=0.5)] == [True, True, False]
    assert [share > 0 for share in probabilities(logits, min_p=1.0)] == [True, False, False]


def test_a_nucleus_wider_than_the_guess_is_found_too() -> None:
    """Nearly uniform over 5000 tokens: 0.9 of the mass needs thousands, more than is looked at first."""
    logits = torch.linspace(0.01, 0, 5000)
    cuts = Cuts.of([SamplingSpec(temperature=1.0, top_p=0.9), SamplingSpec(temperature=1.0, top_p=0.1)], CPU)
    kept = temper_and_cut(torch.stack((logits, logits)), cuts) > -torch.inf
    book = law(logits.tolist(), SamplingSpec(temperature=1.0, top_p=0.9))
    assert abs(int(kept[0].sum()) - sum(share > 0 for share in book)) <= 1
    assert bool(kept[0, : int(kept[0].sum())].all())
    assert 490 <= int(kept[1].sum()) <= 500


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 1e6])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    shares = probabilities([50.0, 49.0, -80.0, -math.inf], temperature=temperature)
    assert all(math.isfinite(share) for share in shares)
    assert shares[3] == 0
    assert shares[0] == (pytest.approx(1 / 3, abs=1e-3) if temperature > 1 else 1.0)


RULES = {
    "repetition": SamplingSpec(repetition_penalty=1.7),
    "reward": SamplingSpec(repetition_penalty=0.6),
    "presence": SamplingSpec(presence_penalty=0.9),
    "frequency": SamplingSpec(frequency_penalty=-0.4),
    "all": SamplingSpec(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2),
    "bias": SamplingSpec(logit_bias=((0, -100.0), (7, 2.5))),
    "words": SamplingSpec(bad_words=((4,), (1, 2), (3, 1, 2), (5, 5))),
    "min_tokens": SamplingSpec(min_tokens=3, stop_ids=(6, 9)),
    "everything": SamplingSpec(
        repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, logit_bias=((3, 1.0),),
        bad_words=((1, 2), (8,)), min_tokens=2, stop_ids=(6,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_everything_before_the_temperature_is_recomputed_along_the_path(name: str) -> None:
    """Random walks over two sequences with prompts, committed output and a path on top."""
    source = random.Random(name)
    for _ in range(40):
        prompt = [source.randrange(V) for _ in range(source.randrange(1, 6))]
        output = [source.randrange(V) for _ in range(source.randrange(5))]
        path = [source.randrange(V) for _ in range(source.randrange(5))]
        spec = SamplingSpec(**{**RULES[name].__dict__, "temperature": 1.0, "prompt_length": len(prompt)})
        committed = [*prompt, *output]
        cut = source.randrange(len(committed))
        mine = state(spec, committed[:cut])  # in two pushes, as chunks and rounds come
        mine.push(committed[cut:])
        before = (
            mine.length,
            list(mine.tail),
            None if mine.output_counts is None else mine.output_counts.tolist(),
        )
        sampler = PathSampler([state(SamplingSpec(temperature=0.5), [1, 2]), mine], CPU)
        for token in path:
            sampler.advance([0, 1], [source.randrange(V), token])
        logits = torch.randn(2, V, generator=torch.Generator().manual_seed(source.randrange(999)))
        got = sampler.draw([0, 1], logits).drawn_logits[1]
        expected = torch.tensor(adjusted_logits(logits[1].tolist(), prompt, [*output, *path], spec))
        assert torch.allclose(got.softmax(-1), expected.softmax(-1), atol=1e-5)
        counts = mine.output_counts
        assert (mine.length, mine.tail) == before[:2], "walking changed the session"
        assert counts is None or counts.tolist() == before[2]


def random_specs(count: int) -> list[SamplingSpec]:
    source = random.Random(8)
    return [
        SamplingSpec(
            temperature=source.choice([0.0, 0.3, 1.0]),
            top_k=source.choice([0, 0, 3]),
            top_p=source.choice([1.0, 0.7]),
            min_p=source.choice([0.0, 0.1]),
            repetition_penalty=source.choice([1.0, 1.3]),
            presence_penalty=source.choice([0.0, 0.5]),
            logit_bias=source.choice([(), ((3, 1.0),)]),
            bad_words=source.choice([(), ((2,), (1, 5))]),
            seed=source.randrange(2**64),
            sequence_index=source.randrange(3),
        )
        for _ in range(count)
    ]


def test_a_row_is_drawn_as_if_it_were_alone() -> None:
    """In every subset and step of a batch whose rows all ask for something else."""
    specs = random_specs(60)
    committed = [[index % V, 1] for index in range(60)]
    logits = torch.randn(60, V, generator=torch.Generator().manual_seed(2)) * 3
    together = PathSampler([state(*pair) for pair in zip(specs, committed, strict=True)], CPU)
    some = [row for row in range(60) if row % 3]
    first, second = together.draw(range(60), logits), None
    together.advance(some, first.tokens[some].tolist())
    second = together.draw(some, logits[some].flip(1))
    for row in range(60):
        alone = PathSampler([state(specs[row], committed[row])], CPU)
        draws = alone.draw([0], logits[row : row + 1])
        assert torch.equal(draws.drawn_logits[0], first.drawn_logits[row])
        assert int(draws.tokens[0]) == int(first.tokens[row])
        if row in some:
            alone.advance([0], [int(draws.tokens[0])])
            again = alone.draw([0], logits[row : row + 1].flip(1))
            assert int(again.tokens[0]) == int(second.tokens[some.index(row)])


def test_greedy_takes_the_first_of_equals_as_the_plain_choice_does() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    sampler = PathSampler([state(SamplingSpec(top_log_probs=0), vocab_size=4)], CPU)
    assert sampler.draw([0], logits).tokens.tolist() == choose(logits).tolist() == [1]


def test_bfloat16_logits_are_drawn_from_in_float32() -> None:
    logits = torch.tensor([[1.0, 1.0078125, -3.0]], dtype=torch.bfloat16)
    sampler = PathSampler([state(SamplingSpec(temperature=1.0, top_k=1), vocab_size=3)], CPU)
    draws = sampler.draw([0], logits)
    assert draws.drawn_logits.dtype == torch.float32
    assert draws.tokens.tolist() == [1]


def test_log_probs_of_mixed_rows_share_a_tensor() -> None:
    specs = [
        SamplingSpec(temperature=2.0, top_log_probs=1),
        SamplingSpec(top_log_probs=3),
        SamplingSpec(top_k=1),
    ]
    model = torch.tensor([[0.0, 1.0, 2.0, 3.0]] * 3)
    draws = Draws(torch.tensor([2, 3, 0]), model, model / 2)
    width = log_probs.width_for(specs)
    assert width == 8
    entries = log_probs.measure(draws, [0, 1], specs[:2], width)
    (first,), (second,) = (log_probs.read(entries[row : row + 1], specs[row]) for row in (0, 1))
    own, tempered = model[0].log_softmax(-1).tolist(), (model[0] / 2).log_softmax(-1).tolist()
    assert (first.model, first.drawn) == (own[2], tempered[2])
    assert first.top == ((3, own[3]),)
    assert (second.model, second.drawn) == (own[3], 0.0)
    assert [token for token, _ in second.top] == [3, 2, 1]
    assert log_probs.read(torch.zeros(1, 0), specs[2]) == ()
    assert log_probs.width_for(specs[2:]) == 0


@given(st.data())
def test_settings_survive_the_way_through_json(data: st.DataObject) -> None:
    spec = random_specs(40)[data.draw(st.integers(0, 39))]
    assert SamplingSpec.from_json(spec.to_json()) == (SamplingSpec() if spec.is_plain else spec)
