"""Engine trtllm through a real server: the stage with the stub library, the other models as they are."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import pytest

from ddtree_client import Client, Result
from ddtree_client.errors import InvalidRequestError
from ddtree_local.server import LocalTriton
from tests.fakes.pipeline import GreedyReference
from tests.triton.oracle_server import REPOSITORIES, TinyPair, make_repository

pytestmark = pytest.mark.triton

MAX_TOKENS = 24


class Server:
    """A server over the tiny pair with one state of the library installed."""

    def __init__(self, triton: LocalTriton, log: Path, reference: GreedyReference) -> None:
        self.triton = triton
        self.log = log
        self._reference = reference

    def client(self) -> Client:
        return Client(self.triton.grpc_url, timeout_s=60.0)

    def decode(self) -> list[Result]:
        """Several sequences at a time, of several draft modes, each against the target's own tokens."""
        source = random.Random(3)
        prompts = [tuple(source.randrange(256) for _ in range(length)) for length in (1, 20, 31, 40)]
        modes = (("tree", 24), ("chain", -1), ("tree", -1), ("tree", 40))

        def one(index: int) -> Result:
            mode, budget = modes[index]
            with self.client() as client:
                return client.generate(
                    input_ids=prompts[index], max_tokens=MAX_TOKENS, draft_mode=mode, tree_budget=budget
                )

        with ThreadPoolExecutor(len(prompts)) as pool:
            results = list(pool.map(one, range(len(prompts))))
        for prompt, result in zip(prompts, results, strict=True):
            assert list(result.token_ids) == self._reference(prompt, MAX_TOKENS)
        return results

    def fallbacks(self, wanted: float) -> float:
        """How often the engine's own chains stood in; published every second, so waited for."""
        deadline = time.monotonic() + 10
        while (value := self._fallbacks()) != wanted and time.monotonic() < deadline:
            time.sleep(0.1)
        return value

    def _fallbacks(self) -> float:
        with urlopen(f"http://{self.triton.metrics_url}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        (line,) = (
            line
            for line in lines
            if line.startswith("ddtree_fallbacks_total{") and 'reason="native_chain"' in line
        )
        return float(line.rsplit(" ", 1)[1])


@pytest.fixture(params=["recorded", "other"])
def server(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    project_root: Path,
    tiny_pair: TinyPair,
    tiny_reference: GreedyReference,
) -> Iterator[Server]:
    repository = make_repository(tmp_path / "models", project_root / "model_repository", "bls")
    shutil.copytree(REPOSITORIES / "trtllm", repository, dirs_exist_ok=True)
    env = tiny_pair.environment("bls") | {
        "DDTREE_ENGINE": "trtllm",
        "DDTREE_PAGE_SIZE": "32",
        "DDTREE_MAX_NODES": "48",
        "DDTREE_TEST_FOLDER": str(project_root / "tests"),
        "DDTREE_TEST_TRTLLM": str(request.param),
    }
    log = tmp_path / "triton.log"
    with LocalTriton(repository, env=env, log_path=log) as triton:
        yield Server(triton, log, tiny_reference)
        report = triton.stop()
    assert (report.exit_code, report.forced, report.orphans_killed) == (0, False, 0)


@pytest.mark.parametrize("server", ["recorded"], indirect=True)
def test_trees_give_the_torch_verifiers_tokens(server: Server) -> None:
    results = server.decode()
    assert results[0].stats.draft_tokens > 10 * results[0].stats.rounds, "trees were verified"
    assert sum(result.stats.accepted_draft_tokens for result in results) > 0
    assert server.fallbacks(wanted=0) == 0
    log = server.log.read_text()
    assert "trees are verified by TensorRT-LLM 0.0.0+stub, contract main-00679c6" in log
    assert "stage target_verifier is called through Triton: it has no channel" in log
    assert "stage drafter is called directly" in log


@pytest.mark.parametrize("server", ["other"], indirect=True)
def test_the_engines_own_chains_stand_in_and_it_shows(server: Server) -> None:
    """The same answers, the reason in the log, and the fallback on the metrics endpoint."""
    results = server.decode()
    assert all(result.stats.rounds < MAX_TOKENS - 1 for result in results), "several tokens a step"
    assert server.fallbacks(wanted=1) == 1
    log = server.log.read_text()
    reasons = [
        line for line in log.splitlines() if "falling back to TensorRT-LLM's own DFlash chains" in line
    ]
    assert len(reasons) == 1
    assert "relocate: does not take cache_manager, which we pass; it takes requests" in reasons[0]
    assert json.dumps("no trees are verified, the engine decodes by itself")[1:-1] in log
    with server.client() as client, pytest.raises(InvalidRequestError, match="need the tree verifier"):
        client.generate(input_ids=(5,), max_tokens=4, repetition_penalty=1.3)
