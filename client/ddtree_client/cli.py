"""The command ``ddtree``: the group of commands, and ``ddtree generate``.

Exit codes: 0 fine, 1 the server or the request failed, 2 wrong usage, 130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from ddtree_client.cli_bench import bench
from ddtree_client.cli_chat import chat
from ddtree_client.cli_drafts import LEGENDS, DraftPainter, look_of_stdout
from ddtree_client.cli_health import health
from ddtree_client.cli_inspect import doctor, inspect
from ddtree_client.cli_operate import drain, watchdog
from ddtree_client.cli_options import (
    Command,
    connection_options,
    generation_options,
    given_options,
    open_client,
    prompt_arguments,
    refuse_drafts_as_json,
    result_object,
    show_drafts_option,
    stats_line,
)
from ddtree_client.cli_trace import trace
from ddtree_client.cli_trtllm import trtllm_check
from ddtree_client.cli_tune import tune


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ddtree-client", prog_name="ddtree")
def cli() -> None:
    """Talk to DDTree on a Triton server: tree speculative decoding with the target's own output."""


@cli.command(cls=Command)
@click.argument("prompt")
@click.option(
    "--chat/--raw", "as_chat", default=True, show_default=True,
    help="Send PROMPT as a user's message through the model's chat template, or as the text to continue.",
)  # fmt: skip
@click.option("--stats", "show_stats", is_flag=True, help="Afterwards, a line on stderr: speed and rounds.")
@show_drafts_option
@generation_options
@connection_options
def generate(
    prompt: str, *, as_chat: bool, show_stats: bool, show_drafts: bool, as_json: bool, **values: Any
) -> None:
    """Answer PROMPT (- reads stdin), printed as it is generated."""
    refuse_drafts_as_json(show_drafts=show_drafts, as_json=as_json)
    if prompt == "-":
        prompt = sys.stdin.read()
    options = given_options(values)
    look = look_of_stdout()
    painter = DraftPainter(look)
    if show_drafts:
        options["trace"] = True
        click.echo(LEGENDS[look], err=True)
    with open_client(values) as client:
        stream = client.stream(**prompt_arguments(prompt, raw=not as_chat), **options)
        for chunk in stream:
            if not as_json:
                click.echo(painter.paint(chunk) if show_drafts else chunk.text, nl=False)
        if as_json:
            click.echo(json.dumps(result_object(stream.result), ensure_ascii=False))
            return
        if not stream.result.text.endswith("\n"):
            click.echo()
        if show_stats:
            click.echo(stats_line(stream.result), err=True)


cli.add_command(chat)
cli.add_command(trace)
cli.add_command(bench)
cli.add_command(tune)
cli.add_command(health)
cli.add_command(drain)
cli.add_command(watchdog)
cli.add_command(inspect)
cli.add_command(doctor)
cli.add_command(trtllm_check)


def main() -> None:
    """Entry point of the console script."""
    cli(prog_name="ddtree")
