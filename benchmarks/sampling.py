"""`python -m benchmarks.sampling`: how long accepted paths stay when tokens are sampled or follow a grammar.

All prompts decode at once in this process, for every temperature and every way of drafting. The time is that
of the packed batch and shows what choosing tokens costs; it is not comparable with one stream's.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.contenders import BUDGETS
from benchmarks.machine import describe_machine
from benchmarks.prompts import read_prompts
from benchmarks.report import write_result
from ddtree import assembly
from ddtree.config import ServingConfig
from ddtree.engine import Engine
from ddtree.params import DraftMode, GenerationParams
from ddtree.sampling_spec import Grammar, SamplingSpec
from ddtree.scheduler import Scheduler
from ddtree.sequence import Delta, Stats
from ddtree.text import TextCodec
from ddtree_local.demo_target import ensure_demo_target
from ddtree_local.project import find_project

_HERE = Path(__file__).resolve().parent
_SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "maxLength": 200},
        "steps": {"type": "array", "items": {"type": "string", "maxLength": 80}, "maxItems": 4},
    },
    "required": ["answer", "steps"],
    "additionalProperties": False,
}
_SETTINGS: tuple[tuple[str, float, bool], ...] = (
    ("greedy", 0.0, False),
    ("T=0.6", 0.6, False),
    ("T=1.0", 1.0, False),
    ("greedy, JSON", 0.0, True),
    ("T=0.6, JSON", 0.6, True),
)
_WAYS: tuple[tuple[str, DraftMode, int], ...] = (
    ("off", "off", 0),
    ("chain", "chain", -1),
    *((f"tree {budget}", "tree", budget) for budget in BUDGETS),
)


class _Counts:
    """A sink that keeps the last statistics."""

    stats: Stats | None = None
    trace = None

    def emit(self, delta: Delta, stats: Stats) -> None:
        del delta
        self.stats = stats

    def is_cancelled(self) -> bool:
        return False


@dataclass(frozen=True)
class Pooled:
    """All prompts of one setting and one way of drafting; the first token of each belongs to no round."""

    acceptance_length: float  # emitted tokens / rounds
    tokens_per_second: float  # of the whole batch, prefill included


async def _decode(engine: Engine, requests: Sequence[GenerationParams]) -> Pooled:
    sinks = [_Counts() for _ in requests]
    started = time.perf_counter()
    await asyncio.gather(
        *(engine.generate(params, sink) for params, sink in zip(requests, sinks, strict=True))
    )
    elapsed = time.perf_counter() - started
    every = [sink.stats for sink in sinks if sink.stats is not None]
    emitted = sum(stats.emitted_tokens - 1 for stats in every)
    return Pooled(emitted / max(1, sum(stats.rounds for stats in every)), (emitted + len(every)) / elapsed)


async def _measure(config: ServingConfig, prompts: Path, max_tokens: int) -> dict[str, dict[str, Pooled]]:
    text = TextCodec.from_folder(config.target)
    ids = [text.render_messages([{"role": "user", "content": each.text}]) for each in read_prompts(prompts)]
    scheduler = Scheduler(max_sequences=len(ids), max_waiting=0, prefill_chunk=config.prefill_chunk)
    engine = Engine(assembly.load_in_process(config), text, scheduler=scheduler)
    await engine.start()
    results: dict[str, dict[str, Pooled]] = {name: {} for name, _, _ in _SETTINGS}
    turns = [(setting, way) for setting in _SETTINGS for way in _WAYS]
    for (name, temperature, has_grammar), (way, mode, budget) in track(turns, "decoding", console=_screen()):
        grammar = Grammar("json", json.dumps(_SCHEMA)) if has_grammar else None
        spec = SamplingSpec(temperature=temperature, seed=1, grammar=grammar)
        requests = [
            GenerationParams(
                tuple(prompt),
                max_tokens=max_tokens,
                draft_mode=mode,
                tree_budget=budget,
                stop_ids=text.stop_ids,
                sampling=spec,
            )
            for prompt in ids
        ]
        results[name][way] = await _decode(engine, requests)
    await engine.stop()
    return results


def _screen() -> Console:
    return Console(file=sys.stderr)


def table_of(results: dict[str, dict[str, Pooled]]) -> Table:
    """Acceptance length, and tokens/s of the batch in brackets."""
    table = Table("setting", *(way for way, _, _ in _WAYS), title="acceptance length (tokens/s of the batch)")
    for name, row in results.items():
        cells = (f"{each.acceptance_length:.2f} ({each.tokens_per_second:.0f})" for each in row.values())
        table.add_row(name, *cells)
    return table


@click.command()
@click.option(
    "--prompts", type=click.Path(path_type=Path), default=_HERE / "prompts.jsonl", show_default=False
)
@click.option("--max-tokens", default=64, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=_HERE / "results" / "sampling.json")
def main(prompts: Path, max_tokens: int, out: Path) -> None:
    """Acceptance length at several temperatures and with a grammar, for every way of drafting."""
    project = find_project()
    target = ensure_demo_target(project.demo_target_cache)
    config = ServingConfig(target=target, draft=project.demo_draft)
    results = asyncio.run(_measure(config, prompts, max_tokens))
    write_result(
        {
            "what": "emitted tokens / rounds, pooled over the prompts, all decoded at once",
            "machine": describe_machine(),
            "max_tokens": max_tokens,
            "settings": {
                name: {way: vars(each) for way, each in row.items()} for name, row in results.items()
            },
        },
        out,
    )
    Console().print(table_of(results))


if __name__ == "__main__":
    main()
