"""`make soak`: the long run, then every kind of fault three times; merges its part into load.json.

Exit code 1 when anything is not accounted for, is kept, or grows.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.load_results import merge
from benchmarks.machine import describe_machine
from ddtree_client.bench import percentile
from ddtree_local.project import find_project
from tests.soak.drills import EXIT_S, Drill, expected_answers, kill_orchestrator, kill_stage
from tests.soak.run import Soak, soak
from tests.soak.world import soaked

_STAGES = ("target_verifier", "drafter", "tree_builder")
_COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


def _drills(folder: Path, project: Path, times: int) -> Iterator[Drill]:
    with soaked(folder, project, exit_timeout_s=EXIT_S) as world:
        expected = expected_answers(world)
        for _ in range(times):
            for stage in _STAGES:
                yield kill_stage(world, stage, expected)
    for _ in range(times):
        yield kill_orchestrator(folder, project, expected)


def _write(path: Path, went: Soak, drills: Sequence[Drill]) -> None:
    recoveries = [drill.recovery_s for drill in drills]
    summary = {
        "requests": went.requests,
        "unaccounted": len(went.complaints) + sum(drill.unaccounted for drill in drills),
        "recovery_p95_s": percentile(recoveries, 95),
    }
    details = {
        "machine": describe_machine(),
        "seconds": round(went.seconds, 1),
        "ended": dict(sorted(went.ended.items())),
        "complaints": went.complaints[:20],
        "leaks": went.leaks,
        "looks": [asdict(look) for look in went.looks],
        "drills": [asdict(drill) for drill in drills],
    }
    merge(path, "soak", details, summary)


@click.command()
@click.option("--requests", default=lambda: int(os.environ.get("SOAK_REQUESTS") or 10_000), type=int)
@click.option("--drills", default=3, show_default=True, help="How often each process is killed.")
@click.option("--out", type=click.Path(path_type=Path), help="Default: benchmarks/results/load.json.")
def main(*, requests: int, drills: int, out: Path | None) -> None:
    """Soak a server over the tests' small pair."""
    project = find_project().root
    console = Console(stderr=True)
    done_drills: list[Drill] = []
    with tempfile.TemporaryDirectory() as folder, Progress(*_COLUMNS, console=console) as progress:
        task = progress.add_task("requests", total=requests)
        with soaked(Path(folder), project) as world:
            went = soak(world, requests, on_done=lambda done: progress.update(task, completed=done))
            end = world.triton.stop()
        task = progress.add_task("kills", total=drills * (len(_STAGES) + 1))
        for drill in _drills(Path(folder), project, drills):
            done_drills.append(drill)
            progress.advance(task)
    path = out or project / "benchmarks" / "results" / "load.json"
    _write(path, went, done_drills)
    for drill in done_drills:
        console.print(f"{drill.killed}: back after {drill.recovery_s:.1f} s, {drill.finished} went on, "
                      f"{len(drill.failed)} were told, {drill.unaccounted} unaccounted")  # fmt: skip
    console.print(json.dumps(dict(sorted(went.ended.items())), indent=1))
    is_clean = end.exit_code == 0 and not end.orphans_killed and not end.regions_removed
    wrong = [*went.complaints, *went.leaks, *([] if is_clean else [f"the server ended with {end}"])]
    for line in wrong[:20]:
        console.print(f"[red]{line}[/]")
    if wrong or any(drill.unaccounted for drill in done_drills):
        sys.exit(1)


if __name__ == "__main__":
    main()
