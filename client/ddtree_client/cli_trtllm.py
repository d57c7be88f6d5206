"""``ddtree trtllm-check``: whether TensorRT-LLM verifies trees rightly here, by the serving library."""

from __future__ import annotations

import importlib

import click

from ddtree_client.cli_inspect import is_library_here

_COMMAND = "ddtree.trtllm.check_command"
_PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@click.command("trtllm-check", context_settings=_PASS_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def trtllm_check(arguments: tuple[str, ...]) -> None:
    """Check engine trtllm with TARGET and DRAFT: contract, trees, greedy tokens. Run it in NVIDIA's image."""
    if not is_library_here():
        raise click.ClickException(
            "the serving library is not installed in this environment: pip install ddtree-serving, or run "
            "ddtree-trtllm-check where the server runs"
        )
    code: int = importlib.import_module(_COMMAND).main(arguments)
    raise click.exceptions.Exit(code)
