"""``ddtree inspect`` and ``ddtree doctor``: checkpoints on this machine, judged by the serving library.

This package has no torch and reads no checkpoint. Where the serving library is installed beside it, the
commands are that library's; elsewhere they say how to get it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

import click

_LIBRARY = "ddtree.inspect_command"
_PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@click.command(context_settings=_PASS_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def inspect(arguments: tuple[str, ...]) -> None:
    """Tell whether the draft in folder DRAFT fits the target in folder TARGET, and what they need."""
    _run(arguments)


@click.command(context_settings=_PASS_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def doctor(arguments: tuple[str, ...]) -> None:
    """Inspect TARGET and DRAFT, decode with them, and say whether drafts are accepted as they should."""
    _run(("--decode", *arguments))


def _run(arguments: Sequence[str]) -> None:
    if not is_library_here():
        raise click.ClickException(
            "the serving library is not installed in this environment: pip install ddtree-serving, or run "
            "ddtree-inspect where the server runs"
        )
    code: int = importlib.import_module(_LIBRARY).main(arguments)
    raise click.exceptions.Exit(code)


def is_library_here() -> bool:
    """Whether the serving library can be imported, found out without importing it."""
    try:
        return importlib.util.find_spec(_LIBRARY) is not None
    except ModuleNotFoundError:
        return False
