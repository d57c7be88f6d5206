"""`make bench-gpu`: what a round costs on this GPU, section by section; the result is on disk after each.

Chooses what runs and where, and keeps the progress bar. What is measured is in the sections' own modules.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.gpu import picture, report
from benchmarks.gpu.card import describe_card, read_state
from benchmarks.gpu.demo import measure_demo
from benchmarks.gpu.exact import measure_exact
from benchmarks.gpu.hybrid import measure_hybrid
from benchmarks.gpu.limits import measure_limits
from benchmarks.gpu.seam import WAYS
from benchmarks.gpu.setting import Facts, Setting, Skipped, free, one_line
from benchmarks.gpu.shapes import qwen3_8b, tiny_qwen3
from benchmarks.gpu.stages import LONG, SHORT, Rows, measure_stages
from benchmarks.gpu.topologies import measure_topologies

_HERE = Path(__file__).resolve().parent
_LIMIT_SECONDS = 4.0
_LOG_WIDTH = 130
_MOST_WARNINGS = 20  # of one section


def measure_qwen3(setting: Setting) -> Facts:
    """Every row of the Qwen3-8B shape."""
    if setting.is_tiny:
        rows = Rows(contexts={SHORT: 96, LONG: 192}, verified=(17, 65))
        return measure_stages(tiny_qwen3(), rows, setting)
    return measure_stages(qwen3_8b(), Rows(), setting)


SECTIONS: Mapping[str, Callable[[Setting], Facts]] = {
    "stages": measure_qwen3,
    "demo": measure_demo,
    "hybrid": measure_hybrid,
    "topologies": measure_topologies,
    "exact": measure_exact,
}
_LARGE = frozenset({"stages", "hybrid"})  # tens of gigabytes of weights, drawn on the device


def run(setting: Setting, sections: tuple[str, ...], out: Path, console: Console) -> report.Results:
    """Measure, and write `out` after every section and the picture at the end.

    Args:
        setting: where and how much.
        sections: names of `SECTIONS`, in their order.
        out: the result file.
        console: where progress is shown.
    """
    settings = {
        "is_tiny": setting.is_tiny,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "seconds_per_section": setting.seconds,
        "ways": {name: way.title for name, way in WAYS.items()},
    }
    results = report.Results(out, describe_card(setting.device), settings)
    results.add("limits", setting.limits.to_json())
    with _progress(console, len(sections)) as show:
        for done, name in enumerate(sections):
            noting = replace(
                setting,
                note=lambda what, done=done: show(done, what),  # type: ignore[misc]
                keep=lambda facts, name=name: results.add(name, {**facts, "is_whole": False}),  # type: ignore[misc]
            )
            facts = _measure(name, noting)
            results.add(name, facts)
            said = [(key, facts[key]) for key in ("skipped", "error") if key in facts]
            for key, text in (*said, *(("warned", text) for text in facts["warnings"])):
                console.print(f"[yellow]{name} {key}:[/] {text}", soft_wrap=True)
        show(len(sections), "done")
    try:
        picture.draw(results.result, out.with_suffix(".png"))
    except ImportError as error:
        console.print(f"[yellow]No picture:[/] {error}; draw it elsewhere with benchmarks.gpu.picture")
    return results


def _measure(name: str, setting: Setting) -> Facts:
    """One section; what keeps it from running is its result then, and the others go on."""
    setting.note(name)
    started = time.monotonic()
    warnings: list[str] = []
    try:
        with _heard(warnings):
            facts = SECTIONS[name](setting)
    except Skipped as reason:
        facts = {"skipped": str(reason)}
    except Exception as error:  # noqa: BLE001 - a lent machine's minutes must not end with one section
        facts = {"error": one_line(error)}
    state = read_state(setting.device)
    free(setting.device)
    return {
        **facts,
        "warnings": warnings,
        "took_s": time.monotonic() - started,
        "at": describe_card(setting.device)["date"],
        "card_state": state,
    }


class _Ears(logging.Handler):
    """Keeps what the product warns of: a graph that was not captured, a kernel that is not used."""

    def __init__(self, into: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._into = into

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one, up to a number."""
        if len(self._into) < _MOST_WARNINGS:
            self._into.append(f"{record.name}: {record.getMessage()}"[:500])


@contextmanager
def _heard(into: list[str]) -> Iterator[None]:
    ears, logger = _Ears(into), logging.getLogger("ddtree")
    logger.addHandler(ears)
    try:
        yield
    finally:
        logger.removeHandler(ears)


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[int, str], None]]:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    # Drawn when something changes only: a thread that draws would compute beside what is measured.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("", total=total)

        def show(done: int, what: str) -> None:
            progress.update(task, completed=done, description=what)
            progress.refresh()

        yield show


def _chosen(option: str, given: str | None, known: Mapping[str, object]) -> tuple[str, ...]:
    wanted = [name.strip() for name in given.split(",")] if given else list(known)
    if unknown := sorted(set(wanted) - set(known)):
        raise click.BadParameter(
            f"no {', '.join(unknown)} among {', '.join(known)}; leave it out for all", param_hint=option
        )
    return tuple(name for name in known if name in wanted)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter(
            "PyTorch sees no CUDA device; use --device cpu --tiny", param_hint="--device"
        )
    return torch.device(name)


def _writable(out: Path) -> Path:
    """The result file; that it cannot be written is said before anything is measured."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out.parent):
            return out
    except OSError as error:
        raise click.BadParameter(
            f"{out} cannot be written ({error.strerror}); name another file", param_hint="--out"
        ) from None


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto")
@click.option("--tiny", is_flag=True, help="Tiny shapes: does the benchmark itself work?")
@click.option("--only", metavar="NAME,NAME", help=f"Sections, of {', '.join(SECTIONS)}.  [default: all]")
@click.option(
    "--ways", metavar="NAME,NAME", help=f"Of running a round, of {', '.join(WAYS)}.  [default: all]"
)
@click.option(
    "--seconds", type=click.FloatRange(min=0.1), default=90.0, help="About how long a section measures."
)
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), help="[default: bfloat16 on a GPU]"
)
@click.option("--demo-target", type=_FOLDER, help="The demo's target.  [default: brought]")
@click.option("--demo-draft", type=_FOLDER, help="Its drafter.  [default: the project's]")
@click.option("--dflash", type=_FOLDER, help="Folder with the unpacked dflash 0.1.0.  [default: brought]")
@click.option(
    "--prompts", type=_FILE, default=_HERE.parent / "prompts.jsonl", help="JSON Lines with turns[0]."
)
@click.option("--triton", is_flag=True, help="Run topologies too: needs the server in this interpreter.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=_HERE.parent / "results" / "gpu.json",
    help="Result file; the picture is written beside it.",
)
def main(
    *,
    device: str,
    tiny: bool,
    only: str | None,
    ways: str | None,
    seconds: float,
    dtype: str | None,
    demo_target: Path | None,
    demo_draft: Path | None,
    dflash: Path | None,
    prompts: Path,
    triton: bool,
    out: Path,
) -> None:
    """Measure a round's parts on a GPU, next to its memory's limit and to plain decoding."""
    sections = _chosen("--only", only, SECTIONS)
    where = _device(device)
    if where.type == "cpu" and not tiny and (large := sorted(_LARGE.intersection(sections))):
        raise click.UsageError(
            f"the shapes of {' and '.join(large)} need a GPU; give --tiny for a rehearsal, or --only others"
        )
    out = _writable(out.resolve())
    console = Console(stderr=True)
    console.print(f"Measuring the memory of {where}")
    setting = Setting(
        device=where,
        dtype=getattr(torch, dtype or ("bfloat16" if where.type == "cuda" else "float32")),
        is_tiny=tiny,
        seconds=seconds,
        limits=measure_limits(where, seconds=min(_LIMIT_SECONDS, seconds)),
        note=lambda _: None,
        prompts=prompts,
        demo_target=demo_target,
        demo_draft=demo_draft,
        dflash=dflash,
        wants_triton=triton,
        ways=_chosen("--ways", ways, WAYS),
    )
    free(where)
    results = run(setting, sections, out, console)
    # In a log file there is no width to keep to.
    shown = Console(width=None if sys.stdout.isatty() else _LOG_WIDTH)
    tables = (
        *report.stage_tables(results.result),
        report.batch_table(results.result),
        report.exact_table(results.result),
    )
    for table in filter(None, (*tables, report.figure_table(results.result))):
        shown.print(table)
    console.print(f"Written: {out}", soft_wrap=True)


if __name__ == "__main__":
    main()
