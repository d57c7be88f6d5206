"""From runs to numbers, on runs made by hand."""

from __future__ import annotations

import json

import pytest

from benchmarks.contenders import AUTO, Contender, Turn
from benchmarks.evaluation import Run, Runs, Spread, describe, summarise
from benchmarks.measurement import Answer, Job

PLAIN = Contender("in-process", "off")
TREE_8 = Contender("in-process", "tree", 8)
TREE_16 = Contender("in-process", "tree", 16)
TREE_AUTO = Contender("in-process", "tree")
GRPC_8 = Contender("grpc", "tree", 8)
GRPC_AUTO = Contender("grpc", "tree")
PEER = Contender("transformers", "off")


def _run(
    contender: Contender,
    speed: float,
    *,
    repeat: int = 0,
    prompt: int = 0,
    rounds: int = 10,
    tokens: tuple[int, ...] = tuple(range(21)),
) -> Run:
    """`speed` tokens per second after a first token that came at 1 s."""
    total_s = 1.0 + (len(tokens) - 1) / speed
    return Run(Turn(repeat, prompt, contender), Answer(tokens, 1, 1.0, total_s, rounds, 3.0, {"verify": 5.0}))


def test_the_numbers_of_one_answer() -> None:
    answer = Answer(tuple(range(21)), first_tokens=1, first_s=0.5, total_s=2.5, rounds=8)
    assert answer.tokens_per_s == pytest.approx(10.0)
    assert answer.end_to_end_tokens_per_s == pytest.approx(8.4)
    assert answer.acceptance_length == pytest.approx(2.5)
    assert answer.round_ms == pytest.approx(250.0)


def test_an_answer_of_the_first_token_only_has_no_decoding_speed() -> None:
    answer = Answer((7,), first_tokens=1, first_s=0.5, total_s=0.5, rounds=0)
    assert answer.tokens_per_s is None
    assert answer.acceptance_length is None
    assert answer.round_ms is None


def test_jobs_and_answers_survive_the_pipe() -> None:
    job = Job((1, 2), (3,), 9, "tree", 16)
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job
    answer = _run(PLAIN, 3.0).answer
    assert Answer.from_json(json.loads(json.dumps(answer.to_json()))) == answer


def test_quartiles_are_interpolated_and_gaps_left_out() -> None:
    assert Spread.of([5.0, 1.0, None, 3.0, 2.0, 4.0]) == Spread(2.0, 3.0, 4.0)
    assert Spread.of([1.0, 2.0]) == Spread(1.25, 1.5, 1.75)
    assert Spread.of([4.0]) == Spread(4.0, 4.0, 4.0)
    assert Spread.of([None]) is None
    assert Spread.of([]) is None


def test_a_ratio_is_one_of_medians_not_a_median_or_mean_of_ratios() -> None:
    speeds = [(10.0, 1.0), (20.0, 8.0), (60.0, 4.0)]
    runs = Runs(
        run
        for prompt, (tree, plain) in enumerate(speeds)
        for run in (_run(TREE_8, tree, prompt=prompt), _run(PLAIN, plain, prompt=prompt))
    )
    assert runs.speed_ratio(TREE_8, PLAIN) == pytest.approx(20.0 / 4.0)


def test_only_moments_that_both_saw_are_compared() -> None:
    # The machine was four times as fast in the second repeat, which the served model sat out.
    runs = Runs([_run(TREE_8, 10.0), _run(GRPC_8, 9.0), _run(TREE_8, 40.0, repeat=1)])
    assert runs.speed_ratio(GRPC_8, TREE_8) == pytest.approx(0.9)
    assert runs.speed_ratio(GRPC_8, PLAIN) is None


def test_the_best_budget_is_the_fastest_in_process_and_never_auto() -> None:
    runs = Runs([_run(TREE_8, 10.0), _run(TREE_16, 12.0), _run(TREE_AUTO, 99.0), _run(GRPC_8, 98.0)])
    assert runs.best_budget() == 16
    assert Runs([_run(PLAIN, 1.0)]).best_budget() is None


def test_the_summary_of_a_whole_run() -> None:
    runs = Runs(
        [
            _run(PLAIN, 10.0), _run(Contender("in-process", "chain"), 15.0),
            _run(TREE_8, 20.0), _run(TREE_16, 16.0), _run(TREE_AUTO, 22.0),
            _run(GRPC_8, 18.0), _run(GRPC_AUTO, 11.0), _run(Contender("grpc-in-process", "tree"), 11.0),
            _run(PEER, 5.0), _run(Contender("dflash", "chain"), 8.0),
        ]
    )  # fmt: skip
    assert summarise(runs) == pytest.approx(
        {
            "best_budget": 8,
            "tree_over_plain": 2.0,
            "tree_over_chain": 20 / 15,
            "tree_over_transformers": 4.0,
            "tree_over_dflash": 2.5,
            "auto_over_plain": 2.2,
            "chain_over_plain": 1.5,
            "plain_over_transformers": 2.0,
            "grpc_over_in_process": 0.9,
            "grpc_over_in_process_end_to_end": (1 + 20 / 20) / (1 + 20 / 18),
            "grpc_over_in_process_at": "tree-8",
            "grpc_in_process_topology_over_in_process": 0.5,  # it did not run the best budget
            "grpc_in_process_topology_over_in_process_end_to_end": (1 + 20 / 22) / (1 + 20 / 11),
            "grpc_in_process_topology_over_in_process_at": "tree-auto",
        }
    )


def test_the_summary_names_everything_even_when_nobody_else_ran() -> None:
    summary = summarise(Runs([_run(PEER, 5.0)]))
    assert set(summary) >= {
        "tree_over_plain", "tree_over_transformers", "tree_over_dflash", "grpc_over_in_process",
        "best_budget", "auto_over_plain", "chain_over_plain", "plain_over_transformers",
        "grpc_in_process_topology_over_in_process",
    }  # fmt: skip
    assert set(summary.values()) == {None}


def test_hops_are_what_a_round_costs_more_than_in_process() -> None:
    runs = Runs([_run(TREE_8, 20.0, rounds=10), _run(GRPC_8, 16.0, rounds=10)])  # 100 ms and 125 ms
    assert describe(runs, GRPC_8)["hop_ms"] == pytest.approx(25.0)
    assert describe(runs, TREE_8)["hop_ms"] is None


def test_a_prompt_counts_as_the_same_only_if_every_run_of_it_is() -> None:
    other = (*range(20), 99)
    runs = Runs(
        [_run(PEER, 1.0, prompt=0), _run(PEER, 1.0, prompt=1), _run(PEER, 1.0, prompt=2)]
        + [_run(TREE_8, 1.0, prompt=prompt) for prompt in range(3)]
        + [_run(TREE_8, 1.0, repeat=1, prompt=1, tokens=other)]
        + [_run(TREE_8, 1.0, repeat=repeat, prompt=prompt) for repeat in (1, 2) for prompt in range(3)]
    )
    assert runs.agreement(TREE_8) == {"prompts": 2, "of": 3}
    assert Runs([_run(TREE_8, 1.0)]).agreement(TREE_8) is None


def test_a_contender_is_described_with_quartiles_and_stages() -> None:
    runs = Runs([_run(TREE_8, speed, prompt=prompt) for prompt, speed in enumerate((10.0, 20.0, 30.0))])
    facts = describe(runs, TREE_8)
    assert facts["tokens_per_s"] == pytest.approx({"q1": 15.0, "median": 20.0, "q3": 25.0})
    assert facts["acceptance_length"]["median"] == pytest.approx(2.0)
    assert facts["stage_ms"] == {"verify": 5.0}
    assert facts["tree_budget"] == 8
    assert facts["runs"] == 3
    assert describe(runs, Contender("in-process", "tree", AUTO))["tree_budget"] == "auto"
