"""`make load`: what 1, 4, 16 and 32 streams get from one server, with drafts and without, in one run.

Tree (auto) and plain decoding take turns at every concurrency, several times, and the medians count: a
machine that gets slower meanwhile slows both. Also how soon a cancelled stream's pages are free, and what
NVIDIA's perf_analyzer says where it can be brought. Writes its part of load.json and a picture.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import load_chart
from benchmarks.load_results import merge
from benchmarks.machine import describe_machine
from benchmarks.perf_analyzer import Measured, bring_perf_analyzer, measure
from benchmarks.prompts import read_prompts
from ddtree_client import Client
from ddtree_client.bench import Plan, Report, Variant, percentile, run_variant
from ddtree_local.demo_target import ensure_demo_target
from ddtree_local.project import Project, find_project
from ddtree_local.server import LocalTriton
from ddtree_local.serving import ServedPair, check_prerequisites, local_server, sigterm_as_interrupt

_HERE = Path(__file__).resolve().parent
STREAMS = (1, 4, 16, 32)
TREE, PLAIN = Variant("tree", -1), Variant("off")
_POLL_S = 0.002
_MOST_CANCEL_S = 30.0
_COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


@dataclass(frozen=True)
class Size:
    """How much is run."""

    streams: Sequence[int]
    max_tokens: int
    repeats: int
    cancels: int

    @property
    def turns(self) -> int:
        """Measurements in all."""
        return 2 * self.repeats * len(self.streams)


FULL = Size(STREAMS, max_tokens=32, repeats=3, cancels=20)
QUICK = Size((1, 2), max_tokens=8, repeats=1, cancels=2)
# Every stream gets one request; a single one has few tokens to count and gets as many as four.
_FEWEST_REQUESTS = 4


def median_row(reports: Sequence[Report]) -> dict[str, float | int | None]:
    """The numbers of one variant at one concurrency, medians over its turns; errors are added up."""
    names = ("tokens_per_second", "ttft_p50_s", "ttft_p95_s", "inter_token_p50_s", "inter_token_p95_s",
             "acceptance_length")  # fmt: skip
    row: dict[str, float | int | None] = {}
    for name in names:
        values = [getattr(report, name) for report in reports if getattr(report, name) is not None]
        row[name] = round(statistics.median(values), 5) if values else None
    row["requests"] = sum(report.requests for report in reports)
    row["errors"] = sum(len(report.errors) for report in reports)
    return row


def run_load(
    client: Client, prompts: Sequence[Mapping[str, Any]], size: Size, on_done: Callable[[], object]
) -> list[dict[str, Any]]:
    """A row for each concurrency, with the medians of tree and plain decoding and their ratio."""
    rows = []
    for streams in size.streams:
        plan = Plan(
            prompts,
            {"max_tokens": size.max_tokens, "ignore_eos": True},
            max(streams, _FEWEST_REQUESTS),
            streams,
        )
        reports: dict[Variant, list[Report]] = {TREE: [], PLAIN: []}
        for turn in range(size.repeats):
            # Who goes first changes: neither always finds the machine as the other left it.
            for variant in (TREE, PLAIN) if turn % 2 == 0 else (PLAIN, TREE):
                reports[variant].append(run_variant(client, variant, plan, on_done=lambda: None))
                on_done()
        tree, plain = median_row(reports[TREE]), median_row(reports[PLAIN])
        ratio = (tree["tokens_per_second"] or 0.0) / (plain["tokens_per_second"] or 1.0)
        rows.append({"streams": streams, "tree": tree, "plain": plain, "tree_over_plain": round(ratio, 3)})
    return rows


def cancel_times_ms(client: Client, prompt: Mapping[str, Any], times: int) -> list[float]:
    """From a stream's cancel until the verifier holds no session any more, milliseconds each.

    Raises:
        TimeoutError: it keeps one.
    """
    taken = []
    for _ in range(times):
        with client.stream(**prompt, max_tokens=400, ignore_eos=True) as stream:
            chunks = iter(stream)
            next(chunks)
            started = time.perf_counter()
        while client.health().stages["target_verifier"]["usage"]["sessions"]:
            if time.perf_counter() - started > _MOST_CANCEL_S:
                raise TimeoutError(
                    f"the verifier still holds a session {_MOST_CANCEL_S:g} s after its cancel"
                )
            time.sleep(_POLL_S)
        taken.append((time.perf_counter() - started) * 1e3)
    return taken


def _perf_analyzer(
    triton: LocalTriton, cache: Path, streams: Sequence[int], prompt: str, size: Size, console: Console
) -> list[Measured]:
    try:
        tool = bring_perf_analyzer(cache)
    except (OSError, RuntimeError) as error:
        console.print(f"no numbers of perf_analyzer: {error}")
        return []
    return [measure(tool, triton.grpc_url, each, prompt, size.max_tokens) for each in streams]


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=_HERE / "results" / "load.json")
@click.option("--model", type=click.Path(path_type=Path), help="Target; default: the demo's.")
@click.option("--draft", type=click.Path(path_type=Path), help="Drafter; default: the demo's.")
@click.option("--quick", is_flag=True, help="A few tokens at 1 and 2 streams, to see that everything works.")
@click.option("--perf-analyzer/--no-perf-analyzer", "with_tool", default=True, show_default=True)
def main(*, out: Path, model: Path | None, draft: Path | None, quick: bool, with_tool: bool) -> None:
    """Load a server with streams and write what they got."""
    size = QUICK if quick else FULL
    check_prerequisites()
    project: Project = find_project()
    target = model or ensure_demo_target(project.demo_target_cache)
    pair = ServedPair(target, draft or project.demo_draft, prefix_cache=False)
    texts = [prompt.text for prompt in read_prompts(_HERE / "prompts.jsonl", None)]
    prompts = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    console = Console(stderr=True)
    triton = local_server(project, pair, log_path=project.root / ".cache" / "load.log")
    with sigterm_as_interrupt(), Progress(*_COLUMNS, console=console) as progress, triton:
        task = progress.add_task("streams", total=size.turns)
        with Client(triton.grpc_url, timeout_s=300.0) as client:
            rows = run_load(client, prompts, size, lambda: progress.advance(task))
            cancelled = cancel_times_ms(client, prompts[0], size.cancels)
        tools: list[Measured] = []
        if with_tool:
            tools = _perf_analyzer(
                triton, project.root / ".cache" / "perf-analyzer", size.streams, texts[0], size, console
            )
    p95 = percentile(cancelled, 95)
    details = {
        "machine": describe_machine(),
        "max_tokens": size.max_tokens,
        "repeats": size.repeats,
        "streams": rows,
        "cancel_ms": [round(each, 1) for each in cancelled],
        "perf_analyzer": [each.row() for each in tools],
    }
    summary = {
        "worst_tree_over_plain": min(row["tree_over_plain"] for row in rows),
        "cancel_p95_ms": None if p95 is None else round(p95, 1),
    }
    merge(out, "load", details, summary)
    load_chart.draw(rows, out.with_suffix(".png"))
    for row in rows:
        console.print(
            f"{row['streams']:3} streams: tree {row['tree']['tokens_per_second']:.1f}, plain "
            f"{row['plain']['tokens_per_second']:.1f} tokens/s ({row['tree_over_plain']:.2f} times)"
        )
    console.print(f"written to {out}")


if __name__ == "__main__":
    main()
