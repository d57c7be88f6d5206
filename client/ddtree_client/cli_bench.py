"""``ddtree bench``: draft modes side by side on a running server, as a table or as JSON.

Reads prompts and prints; the measuring is in `bench`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ddtree_client.bench import Plan, Report, Variant, Watch, run_variant, unwatched
from ddtree_client.cli_options import (
    DRAFT_MODES,
    Command,
    connection_options,
    given_options,
    open_client,
    prompt_arguments,
    tree_budget,
)
from ddtree_client.client import Client

_Function = TypeVar("_Function", bound=Callable[..., Any])
BUILT_IN_PROMPTS = (
    "A shop sells pencils at 12 cents each and pens at 45 cents each. What do 8 pencils and 6 pens cost?",
    "Write a Python function that returns the second largest number in a list, with a docstring.",
    "List the planets of the solar system from the sun outwards, each with one short fact.",
    "Explain to a child why the sky is blue.",
    "Write a polite e-mail that moves a meeting from Tuesday morning to Thursday afternoon.",
    "Tom has 23 marbles, gives 5 to each of 3 friends and then finds 4. How many has he now? Show the steps.",
)


def read_prompts(path: Path) -> tuple[str, ...]:
    """The prompts of a JSONL file: in ``turns[0]``, in ``prompt``, or a JSON string per line.

    Raises click.BadParameter naming the line.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise click.BadParameter(f"{path}, line {number}: not JSON ({error})") from None
        if isinstance(value, dict):
            turns = value.get("turns")
            value = turns[0] if isinstance(turns, list) and turns else value.get("prompt")
        if not isinstance(value, str):
            raise click.BadParameter(
                f'{path}, line {number}: needs a prompt as a JSON string, in "prompt", or in "turns"[0]'
            )
        prompts.append(value)
    if not prompts:
        raise click.BadParameter(f"{path} has no prompts")
    return tuple(prompts)


def variants(draft_modes: Sequence[str], tree_budgets: Sequence[int]) -> tuple[Variant, ...]:
    """Every mode once, ``tree`` once per budget, in the order given and without repeats."""
    found: list[Variant] = []
    for mode in draft_modes:
        budgets: Sequence[int | None] = tree_budgets or (None,)
        found += [Variant(mode, budget) for budget in (budgets if mode == "tree" else (None,))]
    return tuple(dict.fromkeys(found))


def workload_options(function: _Function) -> _Function:
    """Adds what is asked in a measurement: the prompts, and the options of every request."""
    for option in reversed(
        (
            click.option(
                "--prompts", "prompts_file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
                help='JSONL with "turns"[0], "prompt" or a plain string per line.  [default: six built in]',
            ),
            click.option(
                "--chat/--raw", "as_chat", default=True, show_default=True,
                help="Send prompts through the model's chat template, or as texts to continue.",
            ),
            click.option("--max-tokens", type=int, default=96, show_default=True),
            click.option("--temperature", type=float, help="Absent or 0: greedy."),
            click.option("--seed", type=int),
            click.option("--ignore-eos", is_flag=True, help="Generate --max-tokens tokens in any case."),
        )
    ):  # fmt: skip
        function = option(function)
    return function


def prompts_of(prompts_file: Path | None, *, as_chat: bool) -> list[dict[str, Any]]:
    """The prompts that `workload_options` name, as arguments of the client."""
    texts = BUILT_IN_PROMPTS if prompts_file is None else read_prompts(prompts_file)
    return [prompt_arguments(text, raw=not as_chat) for text in texts]


@click.command(cls=Command)
@click.option(
    "--draft-mode",
    "draft_modes",
    type=click.Choice(DRAFT_MODES),
    multiple=True,
    default=("off", "chain", "tree"),
    show_default=True,
    help="Modes to compare. May be repeated.",
)
@click.option(
    "--tree-budget",
    "tree_budgets",
    type=tree_budget,
    metavar="N|auto",
    multiple=True,
    help="Budgets to compare in mode tree. May be repeated.  [default: auto]",
)
@click.option("--requests", type=click.IntRange(min=1), default=12, show_default=True, help="Per mode.")
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Requests under way at a time.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(1, 65535),
    help="Serve Prometheus numbers of the requests at http://METRICS_ADDRESS:PORT/metrics meanwhile.",
)
@click.option(
    "--metrics-address", default="127.0.0.1", show_default=True, help="Where --metrics-port listens."
)
@workload_options
@connection_options
def bench(
    *,
    draft_modes: tuple[str, ...],
    tree_budgets: tuple[int, ...],
    requests: int,
    concurrency: int,
    prompts_file: Path | None,
    as_chat: bool,
    as_json: bool,
    metrics_port: int | None,
    metrics_address: str,
    **values: Any,
) -> None:
    """Compare draft modes on a running server."""
    prompts = prompts_of(prompts_file, as_chat=as_chat)
    plan = Plan(prompts, given_options(values), requests=requests, concurrency=concurrency)
    with _watched(metrics_port, metrics_address) as watch, open_client(values) as client:
        reports = _measure_all(client, variants(draft_modes, tree_budgets), plan, watch)
    if as_json:
        click.echo(json.dumps({"concurrency": concurrency, "modes": [report_object(one) for one in reports]}))
    else:
        Console().print(report_table(reports, concurrency))
    failed = [one for one in reports if one.errors]
    for one in failed:
        click.echo(
            f"ddtree: {one.variant.label}: {len(one.errors)} of {one.requests} requests failed, "
            f"the first with {one.errors[0]}",
            err=True,
        )
    if failed:
        raise click.exceptions.Exit(1)


@contextmanager
def _watched(port: int | None, address: str) -> Iterator[Watch]:
    """Serve the requests' numbers on a port, if one is given."""
    if port is None:
        yield unwatched
        return
    try:
        from ddtree_client.metrics import ClientMetrics, serve_metrics
    except ImportError:
        raise click.UsageError(
            "--metrics-port needs the package prometheus-client; install ddtree-client[metrics]"
        ) from None
    metrics = ClientMetrics()
    try:
        stop = serve_metrics(metrics, port, address)
    except OSError as error:
        raise click.ClickException(
            f"--metrics-port: cannot listen on {address}:{port} ({error.strerror}); give another port"
        ) from None
    try:
        yield metrics.chunks
    finally:
        stop()


def _measure_all(client: Client, to_compare: Sequence[Variant], plan: Plan, watch: Watch) -> list[Report]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    reports = []
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for variant in to_compare:
            task = progress.add_task(variant.label, total=plan.requests)
            on_done = partial(progress.advance, task)
            reports.append(run_variant(client, variant, plan, on_done=on_done, watch=watch))
    return reports


def report_object(one: Report) -> dict[str, Any]:
    """A report for programs: times in seconds, null for what cannot be computed."""
    values = asdict(one)
    values.pop("variant")
    return {
        "label": one.variant.label,
        "draft_mode": one.variant.draft_mode,
        "tree_budget": one.variant.tree_budget,
        **values,
        "errors": list(one.errors),
    }


def report_table(reports: Sequence[Report], concurrency: int) -> Table:
    """The reports for people. Speeds are compared with mode ``off`` when it was measured."""
    plain = next((one.tokens_per_second for one in reports if one.variant.draft_mode == "off"), None)
    title = f"{reports[0].requests} requests per mode, {concurrency} at a time; times in ms, p50/p95"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("\nmode", no_wrap=True)
    # Two-line headings keep the table within 80 columns.
    for heading in (
        "\ntokens/s",
        "against\noff",
        "of one\nrequest",
        "first\ntoken",
        "inter-\ntoken",
        "acceptance\nlength",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in reports:
        table.add_row(
            one.variant.label,
            f"{one.tokens_per_second:.1f}",
            "–" if not plain else f"{one.tokens_per_second / plain:.2f} ×",
            _number(one.request_tokens_per_second, ".1f"),
            f"{_number(one.ttft_p50_s, '.0f', 1000)}/{_number(one.ttft_p95_s, '.0f', 1000)}",
            f"{_number(one.inter_token_p50_s, '.1f', 1000)}/{_number(one.inter_token_p95_s, '.1f', 1000)}",
            _number(one.acceptance_length, ".2f"),
        )
    return table


def _number(value: float | None, form: str, factor: float = 1.0) -> str:
    return "–" if value is None else format(value * factor, form)
