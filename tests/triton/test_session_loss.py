"""Stages that lose their sessions while sequences run: answers stay right, and recovery is bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tritonclient.grpc as grpc

from tests.triton.oracle_server import OracleServer

pytestmark = pytest.mark.triton

PROMPT = list(b"remember")
MAX_TOKENS = 200


@pytest.fixture(autouse=True)
def quiet_afterwards(oracle_server: OracleServer) -> Iterator[None]:
    yield
    oracle_server.assert_quiet()


def log_of(server: OracleServer) -> str:
    return server.triton.log_path.read_text(errors="replace")


def decode_while(server: OracleServer, disturb: Callable[[], None]) -> list[list[int]]:
    """Answers of four callers who ask again and again until `disturb` returns, and once more."""
    is_over = threading.Event()

    def read(budget: int) -> list[list[int]]:
        answers: list[list[int]] = []
        with server.client() as client:
            while not is_over.is_set() or not answers:
                answer = client.generate(
                    input_ids=PROMPT, max_tokens=MAX_TOKENS, tree_budget=budget, ignore_eos=True
                )
                answers.append(list(answer.token_ids))
        return answers

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read, budget) for budget in (0, 1, 4, 32)]
        try:
            disturb()
        finally:
            is_over.set()
        return [answer for reader in readers for answer in reader.result()]


def expected_of(server: OracleServer) -> list[int]:
    expected = server.reference(PROMPT, MAX_TOKENS)
    assert len(expected) == MAX_TOKENS, "the answer must not end early: the tests ignore stop ids"
    return expected


def test_stages_that_forget_now_and_then(oracle_server: OracleServer) -> None:
    # In topology bls the verifier has no way to forget but a reload: see below.
    is_bls = oracle_server.topology == "bls"
    # A session may be lost three times.
    stages = ["drafter"] * 3 if is_bls else ["drafter", "verifier", "drafter", "verifier", "verifier"]
    expected = expected_of(oracle_server)

    def disturb() -> None:
        for stage in stages:
            time.sleep(0.3)
            oracle_server.lose(stage)

    answers = decode_while(oracle_server, disturb)
    assert all(answer == expected for answer in answers)
    if "verifier" in stages:
        assert "was lost by the verifier, opening it again" in log_of(oracle_server)


@pytest.mark.parametrize("oracle_server", ["bls"], indirect=True)
@pytest.mark.parametrize("stage", ["target_verifier", "drafter", "tree_builder"])
def test_a_stage_is_reloaded_under_load(oracle_server: OracleServer, stage: str) -> None:
    expected = expected_of(oracle_server)
    losses = log_of(oracle_server).count("was lost by the verifier")

    def reload() -> None:
        # Triton loads the new copy beside the old one and changes over; the old one's sessions are gone.
        with grpc.InferenceServerClient(oracle_server.triton.grpc_url) as client:
            time.sleep(0.3)
            client.load_model(stage)
            time.sleep(0.3)

    touch_model(oracle_server, stage)
    answers = decode_while(oracle_server, reload)
    assert all(answer == expected for answer in answers)
    if stage == "target_verifier":
        assert log_of(oracle_server).count("was lost by the verifier") > losses
    assert "context features cross by reference (cpu)" in log_of(oracle_server)


def touch_model(server: OracleServer, stage: str) -> None:
    """Only a changed file makes Triton load a model again."""
    model: Path = server.repository / stage / "1" / "model.py"
    model.write_text(model.read_text() + "\n")
