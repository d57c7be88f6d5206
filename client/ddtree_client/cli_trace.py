"""``ddtree trace``: one answer with its draft trees, as a page to look at or as JSON for programs.

What the rounds add up to is in `rounds`, the page in `trace_page`; this module asks, writes and prints.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from ddtree_client.cli_options import (
    Command,
    generation_options,
    given_options,
    open_client,
    prompt_arguments,
    server_options,
    stats_line,
)
from ddtree_client.rounds import STAGES, Summary, summarise
from ddtree_client.trace_page import TracedAnswer, render
from ddtree_client.types import GenerateOptions

_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command(cls=Command)
@click.argument("prompt")
@click.option("--html", "html_file", type=_FILE, help="Write a page to look at: one file, no network.")
@click.option("--json", "json_file", type=_FILE, help="Write the rounds as JSON.")
@click.option(
    "--chat/--raw", "as_chat", default=True, show_default=True,
    help="Send PROMPT as a user's message through the model's chat template, or as the text to continue.",
)  # fmt: skip
@generation_options
@server_options
def trace(
    prompt: str, *, html_file: Path | None, json_file: Path | None, as_chat: bool, **values: Any
) -> None:
    """Answer PROMPT (- reads stdin) and show each round's draft tree and what became of it."""
    if html_file is None and json_file is None:
        raise click.UsageError("give --html FILE, --json FILE or both: that is where the trace goes")
    if prompt == "-":
        prompt = sys.stdin.read()
    options = given_options(values)
    with open_client(values) as client:
        asked: GenerateOptions = {**options, "trace": True}
        stream = client.stream(**prompt_arguments(prompt, raw=not as_chat), **asked)
        for chunk in stream:
            click.echo(chunk.text, nl=False)
        result = stream.result
    click.echo()
    answer = TracedAnswer(values["url"], values["model"], prompt, options, result)
    if html_file is not None:
        html_file.write_text(render(answer), encoding="utf-8")
    if json_file is not None:
        json_file.write_text(json.dumps(answer.to_object(), ensure_ascii=False), encoding="utf-8")
    click.echo(stats_line(result), err=True)
    click.echo(summary_line(summarise(result.trace)), err=True)
    for written in (html_file, json_file):
        if written is not None:
            click.echo(f"wrote {written}", err=True)


def summary_line(summary: Summary) -> str:
    """One line for people about an answer's rounds."""
    total_ms = sum(summary.stage_ms.values())
    depths = [f"{each.accepted / each.rounds:.0%}" for each in summary.by_depth[:4]]
    parts = [f"accepted at depth 1, 2, …: {' '.join(depths)}"] if depths else []
    if total_ms > 0:
        parts.append(" ".join(f"{stage} {summary.stage_ms[stage] / total_ms:.0%}" for stage in STAGES))
    others = {why: count for why, count in summary.drafting.items() if why != "drafted"}
    parts += [f"{count} round{'s' * (count != 1)} without a tree ({why})" for why, count in others.items()]
    return " · ".join(parts)
