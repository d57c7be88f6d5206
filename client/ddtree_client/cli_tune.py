"""``ddtree tune``: compare ways of drafting on the caller's own prompts and say what to set.

Options, progress, tables, files; the measuring and the choice are in `tune`, the picture in `tune_picture`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from ddtree_client.bench import Variant
from ddtree_client.cli_bench import prompts_of, variants, workload_options
from ddtree_client.cli_options import (
    DRAFT_MODES,
    Command,
    connection_options,
    given_options,
    open_client,
    tree_budget,
)
from ddtree_client.client import Client
from ddtree_client.tune import (
    FEW_PASSES,
    Measured,
    NotEnoughTimeError,
    Setting,
    Tuning,
    Workload,
    accepted_variants,
    evaluate,
    run_passes,
)
from ddtree_client.tune_picture import draw

_AUTO = -1


@click.command(cls=Command)
@click.option(
    "--draft-mode", "draft_modes", type=click.Choice(DRAFT_MODES), multiple=True,
    default=("off", "chain", "tree"), show_default=True, help="Modes to compare. May be repeated.",
)  # fmt: skip
@click.option(
    "--tree-budget", "tree_budgets", type=tree_budget, metavar="N|auto", multiple=True,
    default=("auto", "8", "16", "32", "64"), show_default=True,
    help="Budgets to compare in mode tree. May be repeated.",
)  # fmt: skip
@click.option(
    "--concurrency", "concurrencies", type=click.IntRange(1, 512), multiple=True, default=(1, 4),
    show_default=True, help="Requests under way at a time, to compare. May be repeated.",
)  # fmt: skip
@click.option(
    "--minutes", type=click.FloatRange(min=0, min_open=True), default=10.0, show_default=True,
    help="Time for all passes. Each measures every setting once, in another order.",
)  # fmt: skip
@click.option(
    "--requests", type=click.IntRange(min=1), default=3, show_default=True,
    help="Least requests per setting and pass; never fewer than are under way at a time.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("ddtree-tune"), show_default=True,
    help="Where the numbers go: OUT.json, and the picture: OUT.png.",
)  # fmt: skip
@click.option("--picture/--no-picture", default=True, show_default=True, help="Draw OUT.png (matplotlib).")
@workload_options
@connection_options
def tune(
    *,
    draft_modes: tuple[str, ...],
    tree_budgets: tuple[int, ...],
    concurrencies: tuple[int, ...],
    minutes: float,
    requests: int,
    prompts_file: Path | None,
    as_chat: bool,
    out: Path,
    picture: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Find the draft mode, tree budget and concurrency that suit your prompts on a running server."""
    if picture and find_spec("matplotlib") is None:
        raise click.UsageError(
            "the picture needs matplotlib: install ddtree-client[tune], or say --no-picture"
        )
    workload = Workload(prompts_of(prompts_file, as_chat=as_chat), given_options(values), requests)
    with open_client(values) as client:
        tuning = _measure(
            client, variants(draft_modes, tree_budgets), sorted(set(concurrencies)), workload, minutes
        )
    found = tuning_object(tuning)
    written = [out.with_name(f"{out.name}.json")]
    written[0].write_text(json.dumps(found, indent=1, ensure_ascii=False), encoding="utf-8")
    if picture:
        written.append(out.with_name(f"{out.name}.png"))
        draw(tuning, written[1])
    if as_json:
        click.echo(json.dumps(found, ensure_ascii=False))
    else:
        _print(tuning)
    for path in written:
        click.echo(f"wrote {path}", err=True)
    if not tuning.recommendations:
        raise click.ClickException("every setting had errors, so nothing is recommended; see the table")


def _measure(
    client: Client,
    wanted: Sequence[Variant],
    concurrencies: Sequence[int],
    workload: Workload,
    minutes: float,
) -> Tuning:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("warming up", total=minutes * 60)
        accepted, refused = accepted_variants(client, wanted, workload)
        settings = [Setting(variant, number) for number in concurrencies for variant in accepted]
        try:
            passes = run_passes(
                client, settings, workload, seconds=minutes * 60,
                on_setting=lambda number, setting: _tell(progress, task, number, setting),
            )  # fmt: skip
        except NotEnoughTimeError as error:
            raise click.ClickException(str(error)) from None
        progress.update(task, completed=minutes * 60, description=f"passes: {len(passes)}")
    return evaluate(passes, refused)


def _tell(progress: Progress, task: TaskID, number: int, setting: Setting) -> None:
    elapsed = progress.tasks[task].elapsed or 0.0
    progress.update(task, completed=elapsed, description=f"pass {number + 1}: {setting.label}")


def tuning_object(tuning: Tuning) -> dict[str, Any]:
    """All that was found out, for programs. Times in milliseconds, null for what cannot be known."""
    return {
        "passes": tuning.passes,
        "settings": [_measured_object(each, tuning) for each in tuning.measured],
        "refused": dict(tuning.refused),
        "recommendations": [
            {
                "purpose": one.purpose,
                "setting": one.measured.setting.label,
                "parameters": parameters(one.measured.setting.variant),
                "concurrency": one.measured.setting.concurrency,
                "reason": one.reason,
            }
            for one in tuning.recommendations
        ],
    }


def _measured_object(one: Measured, tuning: Tuning) -> dict[str, Any]:
    return {
        "setting": one.setting.label,
        "draft_mode": one.setting.variant.draft_mode,
        "tree_budget": one.setting.variant.tree_budget,
        "concurrency": one.setting.concurrency,
        "tokens_per_second": one.middle.tokens_per_second if one.points else None,
        "token_ms": one.middle.token_ms if one.points else None,
        "tokens_per_second_by_pass": [each.tokens_per_second for each in one.points],
        "inter_token_p95_ms": one.inter_token_p95_ms,
        "acceptance_length": one.acceptance_length,
        "against_off": one.against_off,
        "is_pareto": one.setting in tuning.pareto,
        "errors": list(one.errors),
    }


def parameters(variant: Variant) -> dict[str, Any]:
    """What a request must say for it; nothing where it is what the server does by itself."""
    if variant.draft_mode != "tree":
        return {"draft_mode": variant.draft_mode}
    return {} if variant.tree_budget in (None, _AUTO) else {"tree_budget": variant.tree_budget}


def _print(tuning: Tuning) -> None:
    console = Console()
    console.print(tuning_table(tuning))
    if tuning.passes < FEW_PASSES:
        click.echo(
            f"Only {tuning.passes} of the {FEW_PASSES} passes that tell a slow moment from a slow setting: "
            "give more --minutes."
        )
    for label, reason in tuning.refused.items():
        click.echo(f"{label}: refused by the server: {reason}")
    for one in tuning.recommendations:
        setting = one.measured.setting
        given = " ".join(f"{name}={value}" for name, value in parameters(setting.variant).items())
        click.echo(f"\nFor {one.purpose}: {setting.label}\n  {one.reason}")
        click.echo(f"  requests: {given or 'nothing to set, it is the default'}")
        if setting.concurrency > 1:
            click.echo(f"  server: at least DDTREE_MAX_SEQUENCES={setting.concurrency}, and so many callers")


def tuning_table(tuning: Tuning) -> Table:
    """The settings for people."""
    title = f"medians over passes ({tuning.passes}); ★ nothing is better in both speed and ms a token"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("\nsetting", no_wrap=True)
    headings = ("\ntokens/s", "against\noff", "ms a\ntoken", "inter-\ntoken p95", "acceptance\nlength", "\n")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for one in tuning.measured:
        middle = one.middle if one.points else None
        note = f"{len(one.errors)} errors" if one.errors else "★" if one.setting in tuning.pareto else ""
        table.add_row(
            one.setting.label,
            "–" if middle is None else f"{middle.tokens_per_second:.1f}",
            "–" if one.against_off is None else f"{one.against_off:.2f} ×",
            "–" if middle is None else f"{middle.token_ms:.1f}",
            "–" if one.inter_token_p95_ms is None else f"{one.inter_token_p95_ms:.1f}",
            "–" if one.acceptance_length is None else f"{one.acceptance_length:.2f}",
            note,
        )
    return table
