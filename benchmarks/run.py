"""`python -m benchmarks.run`: everybody decodes the same prompts in turn, on this machine, in one run.

Chooses who takes part, keeps the order of turns and the progress bar. How a contender decodes is its player's
matter, what the numbers mean is in `evaluation.py`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks import chart, report
from benchmarks.contenders import (
    BUDGETS,
    PLAYERS,
    SERVED,
    Contender,
    PlayerName,
    all_contenders,
    turns,
)
from benchmarks.errors import BenchmarkError
from benchmarks.evaluation import Run, Runs
from benchmarks.machine import cores, describe_machine
from benchmarks.measurement import Job, Setup
from benchmarks.players import Player, ServedModel, start_player
from benchmarks.prompts import read_prompts
from ddtree.errors import DDTreeError
from ddtree.text import TextCodec
from ddtree_client import DDTreeClientError
from ddtree_local.demo_target import ensure_demo_target
from ddtree_local.errors import LocalTritonError
from ddtree_local.project import Project, find_project
from ddtree_local.serving import check_prerequisites, sigterm_as_interrupt

_HERE = Path(__file__).resolve().parent
_WARM_UP_TOKENS = 32
_LOG_WIDTH = 130
# OpenMP threads of the one that ran before spin for some milliseconds before they sleep.
_SETTLE_S = 0.05


@dataclass(frozen=True)
class Plan:
    """What is run."""

    players: tuple[PlayerName, ...]
    prompts: Path
    limit: int | None
    max_tokens: int
    repeats: int
    served_repeats: int
    budgets: tuple[int, ...] = BUDGETS

    @property
    def quick(self) -> Plan:
        """The smallest run that still has every kind of contender."""
        return replace(self, limit=1, max_tokens=8, repeats=1, served_repeats=1, budgets=BUDGETS[:1])


def _jobs(setup: Setup, plan: Plan) -> list[Job]:
    """The prompts in the target's chat template: everybody is given the same ids."""
    codec = TextCodec.from_folder(Path(setup.target))
    return [
        Job(
            input_ids=tuple(codec.render_messages([{"role": "user", "content": prompt.text}])),
            stop_ids=tuple(sorted(codec.stop_ids)),
            max_tokens=plan.max_tokens,
        )
        for prompt in read_prompts(plan.prompts, plan.limit)
    ]


@dataclass(frozen=True)
class _Field:
    """The players that could be started, and why others could not."""

    players: Mapping[PlayerName, Player]
    absent: Mapping[PlayerName, str]


def _start(plan: Plan, setup: Setup, project: Project, stack: ExitStack, console: Console) -> _Field:
    """Load one player after another: each measures its costs at load, and must be alone for that."""
    players: dict[PlayerName, Player] = {}
    absent: dict[PlayerName, str] = {}
    for name in plan.players:
        with console.status(f"Loading: {name}"):
            try:
                player = start_player(name, setup, project)
            except (BenchmarkError, LocalTritonError) as error:
                if len(plan.players) == 1:
                    raise
                console.print(f"[yellow]Going on without {name}:[/] {error}")
                absent[name] = str(error)
                continue
        stack.callback(player.close)
        players[name] = player
    if not players:
        raise BenchmarkError("nobody could be started; see the reasons above")
    return _Field(players, absent)


def _job_for(contender: Contender, job: Job) -> Job:
    return replace(job, draft_mode=contender.draft_mode, tree_budget=contender.tree_budget)


def _run_turns(
    plan: Plan, jobs: Sequence[Job], players: Mapping[PlayerName, Player], console: Console
) -> Iterator[Run]:
    """Warm everybody up, then give each turn's run."""
    contenders = all_contenders(tuple(players), plan.budgets)
    schedule = list(turns(contenders, len(jobs), plan.repeats, plan.served_repeats))
    with _progress(console, len(contenders) + len(schedule)) as progress:
        warm_up = replace(jobs[0], max_tokens=min(_WARM_UP_TOKENS, plan.max_tokens))
        for contender in contenders:
            progress.show(f"warming up: {contender.title}")
            players[contender.player].decode(_job_for(contender, warm_up))
        for turn in schedule:
            progress.show(turn.contender.title)
            time.sleep(_SETTLE_S)
            answer = players[turn.contender.player].decode(_job_for(turn.contender, jobs[turn.prompt]))
            yield Run(turn, answer)


class _Steps:
    """The bar. Drawn between runs only: a thread that draws would compute beside what is measured."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total)
        self._done = -1

    def show(self, what: str) -> None:
        """One step more is done, and `what` comes next."""
        self._done += 1
        self._progress.update(self._task, completed=self._done, description=what)
        self._progress.refresh()


@contextmanager
def _progress(console: Console, total: int) -> Iterator[_Steps]:
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        yield _Steps(progress, total)


def run(plan: Plan, setup: Setup, project: Project, out: Path, console: Console) -> None:
    """Measure, write `out` and the picture beside it, and show the tables.

    Raises:
        BenchmarkError: nobody could be started, a worker failed, or the prompts cannot be read.
        DDTreeClientError: a served model refused or failed.
    """
    machine = describe_machine()
    jobs = _jobs(setup, plan)
    runs = Runs()
    began = time.monotonic()
    with ExitStack() as stack:
        field = _start(plan, setup, project, stack, console)
        partial = stack.enter_context(report.PartialResults(out))
        served = [player for player in field.players.values() if isinstance(player, ServedModel)]
        triton = served[0].version if served else None
        for each in _run_turns(plan, jobs, field.players, console):
            runs.add(each)
            partial.add(each)
    settings = {
        **asdict(setup),
        "target": Path(setup.target).name,
        "draft": Path(setup.draft).name,
        "prompts": len(jobs),
        "prompt_file": plan.prompts.name,
        "max_tokens": plan.max_tokens,
        "repeats": plan.repeats,
        "served_repeats": plan.served_repeats,
        "minutes": (time.monotonic() - began) / 60,
    }
    result = report.result_of(
        runs, machine={**machine, "triton": triton}, settings=settings, absent=dict(field.absent)
    )
    report.write_result(result, out)
    chart.draw(result, out.with_suffix(".png"))
    tables = (report.contender_table(runs), report.stage_table(runs), report.summary_table(result))
    # In a log file there is no width to keep to.
    shown = Console(width=None if sys.stdout.isatty() else _LOG_WIDTH)
    for table in filter(None, tables):
        shown.print(table)
    console.print(f"Written: {out} and {out.with_suffix('.png').name}", soft_wrap=True)


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_COUNT = click.IntRange(min=1)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--target", type=_FOLDER, help="Target's checkpoint folder.  [default: the demo's, brought]")
@click.option("--draft", type=_FOLDER, help="Drafter's checkpoint folder.  [default: the demo's]")
@click.option("--prompts", type=_FILE, default=_HERE / "prompts.jsonl", help="JSON Lines with turns[0].")
@click.option("--limit", type=_COUNT, help="Take only the first prompts.")
@click.option("--max-tokens", type=click.IntRange(min=2), default=96, help="Most tokens of an answer.")
@click.option("--repeats", type=_COUNT, default=3, help="How often each prompt is decoded.")
@click.option(
    "--served-repeats",
    type=_COUNT,
    default=1,
    help="In how many of them the models behind a server take part (each costs about three minutes).",
)
@click.option("--threads", type=_COUNT, default=cores, help="CPU threads of each.  [default: all cores]")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16")
@click.option("--only", type=click.Choice(PLAYERS), multiple=True, help="Take part; may be repeated.")
@click.option("--quick", is_flag=True, help="One prompt, few tokens: does the benchmark itself work?")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=_HERE / "results" / "cpu.json",
    help="Result file; the picture is written beside it.",
)
def main(
    *,
    target: Path | None,
    draft: Path | None,
    prompts: Path,
    limit: int | None,
    max_tokens: int,
    repeats: int,
    served_repeats: int,
    threads: int,
    dtype: str,
    only: tuple[PlayerName, ...],
    quick: bool,
    out: Path,
) -> None:
    """Compare plain, chain and tree decoding, in process and through Triton, with two public peers."""
    players = tuple(player for player in PLAYERS if not only or player in only)
    plan = Plan(players, prompts, limit, max_tokens, repeats, served_repeats)
    try:
        project = find_project(_HERE)
        if any(player in SERVED for player in plan.players):
            check_prerequisites()
        setup = Setup(
            target=str((target or ensure_demo_target(project.demo_target_cache)).resolve()),
            draft=str((draft or project.demo_draft).resolve()),
            dtype=dtype,
            threads=threads,
        )
        with sigterm_as_interrupt():
            run(plan.quick if quick else plan, setup, project, out.resolve(), Console(stderr=True))
    except (BenchmarkError, LocalTritonError, DDTreeClientError, DDTreeError) as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
