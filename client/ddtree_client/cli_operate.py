"""``ddtree drain`` and ``ddtree watchdog``: for who runs the server, on its own machine or in its pod."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import NoReturn

import click

from ddtree_client.cli_options import Command
from ddtree_client.control import ControlError, ServerControl
from ddtree_client.drain import drain as wait_until_empty
from ddtree_client.watchdog import Watchdog, WatchLimits

_SECONDS = click.FloatRange(min=0)


@click.command(cls=Command)
@click.option(
    "--gate",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="DDTREE_DRAIN_FILE",
    show_envvar=True,
    help="File that shuts the gate; the server's own setting.",
)
@click.option(
    "--metrics",
    default="127.0.0.1:8002",
    show_default=True,
    metavar="HOST:PORT",
    help="Triton's metrics port.",
)
@click.option(
    "--settle",
    "settle_s",
    type=_SECONDS,
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="Before the gate is shut: routes and clients need time to notice that the server goes.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=_SECONDS,
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="For the requests that run.",
)
@click.option("--undo", is_flag=True, help="Open the gate again instead, and wait for nothing.")
def drain(*, gate: Path | None, metrics: str, settle_s: float, timeout_s: float, undo: bool) -> None:
    """Refuse new requests and wait for those that run; exit code 1 when some are left."""
    if undo:
        if gate is None:
            raise click.UsageError("which gate? Give --gate or DDTREE_DRAIN_FILE.")
        gate.unlink(missing_ok=True)
        click.echo("the gate is open", err=True)
        return
    try:
        drained = wait_until_empty(ServerControl("", metrics), gate, settle_s=settle_s, timeout_s=timeout_s)
    except (ControlError, TimeoutError) as error:
        _fail(error)
    click.echo(drained.why, err=True)
    if gate is None:
        click.echo("no gate was given: new requests are still taken; give --gate to refuse them", err=True)
    if not drained.is_empty:
        raise click.exceptions.Exit(1)


@click.command(cls=Command)
@click.argument("models", nargs=-1, required=True)
@click.option(
    "--http", default="127.0.0.1:8000", show_default=True, metavar="HOST:PORT", help="Triton's HTTP port."
)
@click.option(
    "--key",
    default="",
    envvar="DDTREE_ADMIN_KEY",
    show_envvar=True,
    help="The operators' key, where the model-repository API asks for one.",
)
@click.option("--every", "every_s", type=_SECONDS, default=2.0, show_default=True, metavar="SECONDS")
@click.option(
    "--answer-timeout",
    "answer_s",
    type=_SECONDS,
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="A model silent for so long, three times in a row, hangs.",
)
@click.option(
    "--server-pid",
    type=int,
    metavar="PID",
    help="Kill this process when the orchestrator is dead, so that its streams end; and end with it.",
)
@click.option("--once", is_flag=True, help="Look twice and end; exit code 1 when something did not live.")
def watchdog(
    *, models: tuple[str, ...], http: str, key: str, every_s: float, answer_s: float, server_pid: int | None,
    once: bool,
) -> None:  # fmt: skip
    """Have MODELS loaded again when their process dies or hangs; each from when it was first seen alive.

    Needs a server that was started with --model-control-mode=explicit.
    """
    end = None if server_pid is None else partial(os.kill, server_pid, signal.SIGKILL)
    dog = Watchdog(ServerControl(http, key=key), models, WatchLimits(answer_s=answer_s), end)
    for looks in count(1):
        lines = 0
        for line in dog.look():
            click.echo(f"watchdog: {line}", err=True)
            lines += 1
        if once and (lines or looks == 2):
            raise click.exceptions.Exit(1 if lines else 0)
        time.sleep(every_s)
        if server_pid is not None and not Path(f"/proc/{server_pid}").exists():
            return


def _fail(error: Exception) -> NoReturn:
    click.echo(f"ddtree: {error}", err=True)
    raise click.exceptions.Exit(1)
