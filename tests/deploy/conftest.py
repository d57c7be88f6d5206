"""A server under load with a real Prometheus on it, for the tests of metrics and dashboards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddtree.text import TextCodec
from ddtree_local.server import LocalTriton
from tests.deploy.prometheus.load import Load, Seen
from tests.deploy.prometheus.scraping import Scrape, at_rest, scrape
from tests.deploy.prometheus.server import Prometheus
from tests.fakes.pipeline import GreedyReference
from tests.triton.oracle_server import OracleServer, TinyPair, make_repository

RULES = Path(__file__).parents[2] / "deploy" / "helm" / "ddtree" / "rules" / "ddtree.yml"
# Small enough for the load to fill places, queue and pages.
TIGHT = {"DDTREE_MAX_SEQUENCES": "5", "DDTREE_MAX_WAITING": "2", "DDTREE_KV_CACHE_MIB": "1"}
_STREAMS = ((2, 4.0), (5, 4.0), (9, 6.0))  # so many at a time, for so many seconds
_HAPPENS_WITHIN_S = 120.0
_SLOW_DRAFT_S = 0.02  # ten rounds' time: drafts do not pay then
# Enough of them that requests at the same time seldom share pages, few enough that some do.
_PROMPTS = [{"input_ids": (start,) * 180} for start in range(1, 120, 8)]
_MODES = (
    {"draft_mode": "tree"}, {"draft_mode": "tree", "tree_budget": 16},
    {"draft_mode": "tree", "tree_budget": 250}, {"draft_mode": "tree", "tree_budget": 256},
    {"draft_mode": "chain"}, {"draft_mode": "off"},
)  # fmt: skip


StartOracle = Callable[..., OracleServer]


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


def _not_yet(seen: Seen, reading: Scrape) -> list[str]:
    """What a load is for and has not happened yet: how much it takes is the machine's matter."""
    ends = ("completed", "left", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")
    numbers = {
        "preemption": reading.values("ddtree_preemptions_total"),
        "recovery": reading.values("ddtree_session_recoveries_total", stage="drafter"),
        "cancellation": reading.values("ddtree_requests_total", outcome="cancelled"),
        "fallback": reading.values("ddtree_fallbacks_total"),
    }
    return [name for name in ends if not seen.outcomes[name]] + [
        name for name, values in numbers.items() if not sum(values)
    ]


@pytest.fixture(scope="session")
def observed(
    tmp_path_factory: pytest.TempPathFactory, project_root: Path, observability_pair: TinyPair
) -> Iterator[Observed]:
    """The small pair as Triton stages, watched while everything happens that can."""
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
        until = time.monotonic() + _HAPPENS_WITHIN_S
        while (lacking := _not_yet(load.seen, scrape(triton.metrics_url))) and time.monotonic() < until:
            server.set_pause(_SLOW_DRAFT_S if "fallback" in lacking else 0.0)
            time.sleep(0.5)
            server.lose("drafter")
        server.set_pause(0.0)
        assert not lacking, f"no {lacking} in {_HAPPENS_WITHIN_S:g} s of load"
        seen = load.stop()
        reading = at_rest(triton.metrics_url)
        time.sleep(1.5)  # a scrape of the same
        yield Observed(server, prometheus, seen, reading, start, time.time())
        report = triton.stop()
    assert (report.exit_code, report.forced, report.orphans_killed) == (0, False, 0)


@pytest.fixture(scope="session")
def start_oracle(
    tmp_path_factory: pytest.TempPathFactory, project_root: Path, observability_pair: TinyPair
) -> Iterator[StartOracle]:
    """Starts servers over the small pair that live as long as the run."""
    servers: list[LocalTriton] = []

    def start(topology: str, **options: Any) -> OracleServer:
        folder = tmp_path_factory.mktemp("server")
        repository = make_repository(folder / topology, project_root / "model_repository", topology)
        environment = observability_pair.environment(topology) | {"DDTREE_LOG_LEVEL": "debug"}
        models = sorted(model.name for model in repository.iterdir())
        triton = LocalTriton(
            repository, load_models=models, env=environment, log_path=folder / "triton.log", **options
        )
        servers.append(triton)
        triton.start()
        codec = TextCodec.from_folder(observability_pair.target)
        reference: Any = None  # no test here looks at tokens
        return OracleServer(triton, topology, repository, codec, reference)

    try:
        yield start
    finally:
        for triton in servers:
            triton.stop()


@pytest.fixture(scope="session", params=["bls", "in_process"])
def server(request: pytest.FixtureRequest, start_oracle: StartOracle) -> OracleServer:
    """Either topology."""
    if request.param == "bls":
        observed: Observed = request.getfixturevalue("observed")
        return observed.server
    return start_oracle("in_process")
