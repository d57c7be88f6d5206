"""A target with recurrent layers on a real server, in both topologies: trees, chains, a prompt said twice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddtree_client import Client, Result
from ddtree_local.server import LocalTriton
from tests.fakes.hybrid_families import make_hybrid
from tests.fakes.pipeline import GreedyReference
from tests.fakes.random_draft import write_dflash2
from tests.fakes.target_families import LAYERS
from tests.fakes.tiny_models import MASK_ID, VOCAB_SIZE

pytestmark = pytest.mark.triton

MODES = (("tree", 24), ("chain", -1), ("off", -1), ("tree", 5))
FAMILIES = {"bls": "qwen3.5 moe", "in_process": "qwen3-next"}


@dataclass(frozen=True)
class Served:
    """A server and the target it serves."""

    address: str
    target: Path


@pytest.fixture(scope="module", params=list(FAMILIES))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, project_root: Path
) -> Iterator[Served]:
    target = make_hybrid(tmp_path_factory.mktemp("target"), FAMILIES[request.param])
    taps = {"mask_token_id": MASK_ID, "target_layer_ids": [0, 1, 2]}
    draft = write_dflash2(
        tmp_path_factory.mktemp("draft"), vocab_size=VOCAB_SIZE, num_target_layers=LAYERS, dflash_config=taps
    )
    env = {
        "DDTREE_TARGET": str(target),
        "DDTREE_DRAFT": str(draft),
        "DDTREE_TOPOLOGY": request.param,
        "DDTREE_DTYPE": "float32",
        "DDTREE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "DDTREE_KV_CACHE_MIB": "4",
        "DDTREE_STATE_CACHE_MIB": "4",
        "DDTREE_PAGE_SIZE": "16",
        "DDTREE_PREFILL_CHUNK": "32",
    }
    with LocalTriton(project_root / "model_repository", env=env) as server:
        yield Served(server.grpc_url, target)
        report = server.stop()
    assert (report.exit_code, report.forced, report.orphans_killed) == (0, False, 0)


def test_greedy_equals_generate(served: Served) -> None:
    """Four sequences at a time, then the longest again: its prompt is cached, its answer the same."""
    source = random.Random(8)
    prompts = [tuple(source.randrange(256) for _ in range(length)) for length in (1, 7, 20, 70)]

    def decode(index: int) -> Result:
        mode, budget = MODES[index]
        with Client(served.address, timeout_s=120.0) as client:
            return client.generate(
                input_ids=prompts[index], max_tokens=16, draft_mode=mode, tree_budget=budget
            )

    with ThreadPoolExecutor(len(prompts)) as pool:
        results = list(pool.map(decode, range(len(prompts))))
    reference = GreedyReference(served.target)
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.token_ids) == reference(prompt, 16)
    assert results[0].stats.draft_tokens > 10 * results[0].stats.rounds, "trees were drafted"
    assert results[1].stats.draft_tokens > 2 * results[1].stats.rounds, "chains were drafted"
    again = decode(3)
    assert again.token_ids == results[3].token_ids
