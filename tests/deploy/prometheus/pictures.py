"""Draws the dashboards for the documentation: `python -m tests.deploy.prometheus.pictures docs/img`.

The demo pair behind a real Triton, six minutes of requests that come and go, a real Prometheus, and what the
dashboards then show; a legend says the largest values. The numbers are those of the machine it runs on.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from ddtree_client.cli_bench import BUILT_IN_PROMPTS
from ddtree_local.demo_target import ensure_demo_target
from ddtree_local.project import find_project
from ddtree_local.serving import ServedPair, local_server
from tests.deploy.prometheus.drawing import draw
from tests.deploy.prometheus.load import Load
from tests.deploy.prometheus.panels import ask, load, panels, rows
from tests.deploy.prometheus.server import Prometheus

_STREAMS = (1, 2, 4, 8, 3, 1)  # at a time, each for as long
_MODES = ({"draft_mode": "tree"},) * 4 + ({"draft_mode": "tree", "tree_budget": 16}, {"draft_mode": "chain"})


def main() -> None:
    """Make both pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each number of streams")
    options = parser.parse_args()
    project = find_project()
    pair = ServedPair(ensure_demo_target(project.demo_target_cache), project.demo_draft)
    prompts = [{"messages": [{"role": "user", "content": text}]} for text in BUILT_IN_PROMPTS]
    with (
        tempfile.TemporaryDirectory() as folder,
        local_server(project, pair) as triton,
        Prometheus(Path(folder), triton.metrics_url, interval_s=2) as prometheus,
    ):
        traffic = Load(triton.grpc_url, prompts, max_tokens=(24, 96), modes=_MODES, disturbed_every=12)
        start = time.time()
        traffic.run(max(_STREAMS))
        for traffic.streams in _STREAMS:
            time.sleep(options.seconds)
        traffic.stop()
        time.sleep(5)
        about = "SmolLM2-135M and its demo drafter on two CPU cores, real Triton 2.51, real Prometheus"
        for name in ("serving", "speculation"):
            dashboard = load(name)
            answered = [
                ask(prometheus, panel, start, time.time(), step=4) for panel in panels(dashboard, "30s")
            ]
            draw(dashboard["title"], rows(dashboard), answered, options.folder / f"{name}.png", about)


if __name__ == "__main__":
    main()
