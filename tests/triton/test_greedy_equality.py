"""Greedy decoding through a real Triton server equals transformers.generate token for token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import tritonclient.grpc as grpc

from ddtree_client import Result
from tests.fakes.tiny_models import BLOCK_SIZE
from tests.triton.echo_server import Stream, ints, one, text
from tests.triton.oracle_server import OracleServer

pytestmark = pytest.mark.triton

DEPTH = BLOCK_SIZE - 1


@dataclass(frozen=True)
class Case:
    """How one request drafts."""

    mode: str
    budget: int = -1

    def __str__(self) -> str:
        return self.mode if self.budget < 0 else f"{self.mode}{self.budget}"


CASES = [
    Case("tree", 1), Case("tree", 4), Case("tree", 16), Case("tree", 64), Case("tree", 256), Case("tree"),
    Case("tree", 0), Case("chain"), Case("chain", 3), Case("off"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def quiet_afterwards(oracle_server: OracleServer) -> Iterator[None]:
    yield
    oracle_server.assert_quiet()


def some_prompt(seed: int) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(256) for _ in range(source.randrange(1, 90)))


def decode(server: OracleServer, prompt: tuple[int, ...], case: Case, max_tokens: int) -> Result:
    with server.client() as client:
        return client.generate(
            input_ids=prompt, max_tokens=max_tokens, draft_mode=case.mode, tree_budget=case.budget
        )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_alone(oracle_server: OracleServer, case: Case) -> None:
    rounds = emitted = drafted = accepted = 0
    for seed in range(3):
        prompt = some_prompt(seed)
        result = decode(oracle_server, prompt, case, max_tokens=40)
        assert list(result.token_ids) == oracle_server.reference(prompt, 40)
        rounds += result.stats.rounds
        emitted += result.stats.output_tokens - 1
        drafted += result.stats.draft_tokens
        accepted += result.stats.accepted_draft_tokens
    # Some of every kind happened: plain modes never draft, the others accept some drafts and reject others.
    if case in (Case("off"), Case("tree", 0)):
        assert (drafted, accepted, rounds) == (0, 0, emitted)
    else:
        # Whether drafts pay is the machine's matter, where that is left open.
        assert case == Case("tree") or 0 < accepted < drafted
        # A stop id may end the answer as an accepted draft: that round has no bonus token.
        assert emitted <= accepted + rounds <= emitted + 3


def test_eight_at_once_with_different_budgets_and_lengths(oracle_server: OracleServer) -> None:
    work = [(some_prompt(100 + n), CASES[n % len(CASES)], 6 + 9 * (n % 5)) for n in range(24)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda one: decode(oracle_server, *one), work))
    for (prompt, _, max_tokens), result in zip(work, results, strict=True):
        assert list(result.token_ids) == oracle_server.reference(prompt, max_tokens)


def test_eight_at_once_of_one_shape(oracle_server: OracleServer) -> None:
    # The prompts fit one prefill chunk together, and chains have as many nodes as trees: in the first round
    # neither length nor size tells the sequences apart, but their masks differ.
    prompts = [f"{number}abc" for number in range(8)]
    with grpc.InferenceServerClient(oracle_server.triton.grpc_url) as client:
        stream = Stream(client)
        stream.open()
        received = stream.ask(
            {
                "text_input": text(*prompts),
                "max_tokens": ints(*[30] * 8),
                "draft_mode": text(*["chain", "tree"] * 4),
                "tree_budget": ints(*[DEPTH] * 8),
            }
        )
        client.stop_stream()
    answers = {one(answer, "batch_index"): answer.outputs["output_ids"][0][0].tolist() for answer in received}
    expected = [oracle_server.reference(oracle_server.codec.encode(prompt), 30) for prompt in prompts]
    assert [answers[row] for row in range(8)] == expected


@pytest.mark.parametrize("case", [Case("tree", DEPTH), Case("chain")], ids=str)
def test_a_perfect_oracle_is_accepted_in_full_depth_each_round(
    oracle_server: OracleServer, case: Case
) -> None:
    oracle_server.set_noise(0.0)
    try:
        with oracle_server.client() as client:
            for seed in range(3):
                result = client.generate(
                    input_ids=some_prompt(seed), max_tokens=1 + 4 * BLOCK_SIZE, ignore_eos=True,
                    draft_mode=case.mode, tree_budget=case.budget,
                )  # fmt: skip
                stats = result.stats
                assert (stats.rounds, stats.accepted_draft_tokens, stats.draft_tokens) == (
                    4,
                    4 * DEPTH,
                    4 * DEPTH,
                )
                assert stats.output_tokens == 1 + 4 * BLOCK_SIZE
    finally:
        oracle_server.set_noise(0.6)
