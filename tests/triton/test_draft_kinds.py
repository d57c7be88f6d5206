"""A DFlash 2 draft through the stage models of a real server: its scores given the parent cross two hops.

Or one hop, where the orchestrator builds the trees itself.
Its context features cross by reference: the drafter's process reads them in the verifier's memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddtree_client import Client, Result
from ddtree_local.server import LocalTriton
from ddtree_local.serving import STAGES
from tests.deploy.prometheus.scraping import at_rest, scrape
from tests.fakes.pipeline import GreedyReference
from tests.fakes.random_draft import write_dflash2
from tests.fakes.target_families import LAYERS, make_family
from tests.fakes.tiny_models import MASK_ID, VOCAB_SIZE

pytestmark = pytest.mark.triton

MODES = (("tree", 24), ("chain", -1), ("tree", -1), ("tree", 5))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("target"), "gemma3")


@dataclass(frozen=True)
class Served:
    """A server, and which process builds its trees."""

    address: str
    metrics: str
    builder: str
    calls: str


@pytest.fixture(
    scope="module",
    params=[("tree_builder", "direct"), ("tree_builder", "triton"), ("orchestrator", "direct")],
    ids="-".join,
)
def served(
    request: pytest.FixtureRequest,
    target: Path,
    tmp_path_factory: pytest.TempPathFactory,
    project_root: Path,
) -> Iterator[Served]:
    builder, calls = request.param
    taps = {"mask_token_id": MASK_ID, "target_layer_ids": [0, 1, 2]}
    draft = write_dflash2(
        tmp_path_factory.mktemp("draft"), vocab_size=VOCAB_SIZE, num_target_layers=LAYERS, dflash_config=taps
    )
    env = {
        "DDTREE_TARGET": str(target),
        "DDTREE_DRAFT": str(draft),
        "DDTREE_TOPOLOGY": "bls",
        "DDTREE_DTYPE": "float32",
        "DDTREE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "DDTREE_KV_CACHE_MIB": "4",
        "DDTREE_PAGE_SIZE": "16",
        "DDTREE_FEATURES_BY_REFERENCE": "always",
        "DDTREE_TREES_BUILT_BY": builder,
        "DDTREE_STAGE_CALLS": calls,
    }
    with LocalTriton(project_root / "model_repository", env=env) as server:
        yield Served(server.grpc_url, server.metrics_url, builder, calls)
        log = server.log_path.read_text(errors="replace")
        assert "context features cross by reference (cpu)" in log
        directly = {stage for stage in STAGES if f"stage {stage} is called directly" in log}
        called = set(STAGES) - ({"tree_builder"} if builder == "orchestrator" else set())
        assert directly == (called if calls == "direct" else set())
        report = server.stop()
    assert (report.exit_code, report.forced, report.orphans_killed) == (0, False, 0)


def test_greedy_equals_generate(served: Served, target: Path) -> None:
    """Sliding layers, soft-capped logits and a selector's trees, four sequences at a time."""
    source = random.Random(8)
    prompts = [tuple(source.randrange(256) for _ in range(length)) for length in (1, 7, 20, 33)]

    def decode(index: int) -> Result:
        mode, budget = MODES[index]
        with Client(served.address, timeout_s=120.0) as client:
            return client.generate(
                input_ids=prompts[index], max_tokens=24, draft_mode=mode, tree_budget=budget
            )

    with ThreadPoolExecutor(len(prompts)) as pool:
        results = list(pool.map(decode, range(len(prompts))))
    reference = GreedyReference(target)
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.token_ids) == reference(prompt, 24)
    assert results[0].stats.draft_tokens > 10 * results[0].stats.rounds, "trees were drafted"
    assert results[1].stats.draft_tokens > 2 * results[1].stats.rounds, "chains were drafted"


def test_a_prompt_that_both_stages_have_cached(served: Served, target: Path) -> None:
    """The drafter's pages too: the same trees are built and accepted as the first time."""
    source = random.Random(9)
    prompt = tuple(source.randrange(256) for _ in range(70))
    with Client(served.address, timeout_s=120.0) as client:
        first, again, salted = (
            client.generate(input_ids=prompt, max_tokens=24, tree_budget=40, cache_salt=salt)
            for salt in (None, None, "other")
        )
    assert list(first.token_ids) == GreedyReference(target)(prompt, 24)
    for result in (again, salted):
        assert result.token_ids == first.token_ids
        assert (result.stats.rounds, result.stats.accepted_draft_tokens, result.stats.draft_tokens) == (
            first.stats.rounds,
            first.stats.accepted_draft_tokens,
            first.stats.draft_tokens,
        )


def test_who_builds_the_trees(served: Served) -> None:
    """Triton's own count of calls says so where it carries them, and the stage's time is told either way."""
    before = scrape(served.metrics)
    with Client(served.address, timeout_s=120.0) as client:
        result = client.generate(input_ids=tuple(range(5, 25)), max_tokens=12, tree_budget=8)
    assert result.stats.draft_tokens
    after = at_rest(served.metrics, before, requests=1)
    calls, timed = (
        sum(after.values(name, **labels)) - sum(before.values(name, **labels))
        for name, labels in (
            ("nv_inference_count", {"model": "tree_builder"}),
            ("ddtree_stage_seconds_count", {"stage": "build_tree"}),
        )
    )
    assert 0 < timed <= result.stats.rounds  # the last round may have nothing to draft
    assert calls == (timed if (served.builder, served.calls) == ("tree_builder", "triton") else 0)
