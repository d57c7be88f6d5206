"""A server under load with a real Prometheus on it, for the tests of metrics and dashboards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddtree.text import TextCodec
from ddtree_local.server import LocalTriton
from tests.deploy.prometheus.load import Load, Seen
from tests.deploy.prometheus.scraping import Scrape, at_rest
from tests.deploy.prometheus.server import Prometheus
from tests.fakes.pipeline import GreedyReference
from tests.triton.oracle_server import OracleServer, TinyPair, make_repository

RULES = Path(__file__).parents[2] / "deploy" / "helm" / "ddtree" / "rules" / "ddtree.yml"
# Small enough for the load to fill places, queue and pages.
TIGHT = {"DDTREE_MAX_SEQUENCES": "5", "DDTREE_MAX_WAITING": "2", "DDTREE_KV_CACHE_MIB": "1"}
_STREAMS = ((2, 6.0), (9, 12.0), (5, 6.0))  # so many at a time, for so many seconds
_PROMPTS = [{"input_ids": (start,) * 150} for start in (1, 40, 90, 130)]
_MODES = (
    {"draft_mode": "tree"}, {"draft_mode": "tree", "tree_budget": 16},
    {"draft_mode": "tree", "tree_budget": 250}, {"draft_mode": "tree", "tree_budget": 256},
    {"draft_mode": "chain"}, {"draft_mode": "off"},
)  # fmt: skip


@dataclass(frozen=True)
class Observed:
    """What a load left in a Prometheus."""

    server: OracleServer
    prometheus: Prometheus
    seen: Seen
    reading: Scrape  # of the metrics port, when the load was over
    start: float  # of the load, seconds since the epoch
    end: float


@pytest.fixture(scope="session")
def observability_pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return TinyPair.make(tmp_path_factory.mktemp("observed-pair"))


@pytest.fixture(scope="session")
def observed(
    tmp_path_factory: pytest.TempPathFactory, project_root: Path, observability_pair: TinyPair
) -> Iterator[Observed]:
    """The small pair as Triton stages, watched for half a minute of everything that can happen."""
    folder = tmp_path_factory.mktemp("observed")
    repository = make_repository(folder / "models", project_root / "model_repository", "bls")
    triton = LocalTriton(
        repository,
        load_models=sorted(model.name for model in repository.iterdir()),
        env=observability_pair.environment("bls") | TIGHT | {"DDTREE_LOG_LEVEL": "debug"},
        log_path=folder / "triton.log",
    )
    codec = TextCodec.from_folder(observability_pair.target)
    reference = GreedyReference(observability_pair.target)
    with triton, Prometheus(folder / "prometheus", triton.metrics_url, rules=RULES) as prometheus:
        server = OracleServer(triton, "bls", repository, codec, reference)
        start = time.time()
        load = Load(triton.grpc_url, _PROMPTS, max_tokens=(20, 120), modes=_MODES)
        load.run(max(count for count, _ in _STREAMS))
        for load.streams, seconds in _STREAMS:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                time.sleep(0.5)
                server.lose("drafter")
        seen = load.stop()
        reading = at_rest(triton.metrics_url)
        time.sleep(1.5)  # a scrape of the same
        yield Observed(server, prometheus, seen, reading, start, time.time())
        report = triton.stop()
    assert (report.exit_code, report.forced, report.orphans_killed) == (0, False, 0)
