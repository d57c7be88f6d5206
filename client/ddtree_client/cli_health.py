"""``ddtree health``: is the server up, which models are ready, what do the stages hold.

Reads and prints; exit code 1 says that requests would fail now.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ddtree_client.cli_options import Command, connection_options, open_client
from ddtree_client.client import HEALTH_TIMEOUT_S
from ddtree_client.health import Health


@click.command(cls=Command)
@connection_options
def health(*, as_json: bool, **values: Any) -> None:
    """Show whether the server, its models and its stages are ready to work."""
    model = values["model"]
    with open_client(values) as client:
        state = client.health(timeout_s=values["timeout_s"] or HEALTH_TIMEOUT_S)
    if as_json:
        click.echo(json.dumps(health_object(state, model), ensure_ascii=False))
    else:
        print_health(state, Console(highlight=False, markup=False))
    if not (state.live and state.ready and state.model_ready(model)):
        click.echo(f"ddtree: the model {model!r} at {state.address} cannot take requests", err=True)
        raise click.exceptions.Exit(1)


def health_object(state: Health, model: str) -> dict[str, Any]:
    """The health for programs; ``ok`` says whether ``model`` can take requests."""
    return {
        "ok": state.live and state.ready and state.model_ready(model),
        "address": state.address,
        "live": state.live,
        "ready": state.ready,
        "server_version": state.server_version,
        "models": [
            {
                "name": entry.name,
                "version": entry.version,
                "ready": entry.ready,
                "state": entry.state,
                "reason": entry.reason,
            }
            for entry in state.models
        ],
        "stages": {name: dict(description) for name, description in state.stages.items()},
    }


def print_health(state: Health, console: Console) -> None:
    """The health for people."""
    server = "ready" if state.ready else "live, not ready" if state.live else "not live"
    console.print(f"Triton {state.server_version} at {state.address}: {server}")
    models = Table("model", "version", "state")
    for entry in state.models:
        note = f" ({entry.reason})" if entry.reason else ""
        models.add_row(entry.name, entry.version, f"{entry.state}{note}")
    console.print(models)
    for name, description in state.stages.items():
        console.print(f"{name}: {_holds(description)}")


def _holds(description: Mapping[str, Any]) -> str:
    """What a stage holds now, then the plain facts about it."""
    usage = description.get("usage")
    parts = []
    if isinstance(usage, Mapping):
        parts.append(f"{usage.get('sessions')} sessions")
        parts.append(f"{usage.get('pages_used')} of {usage.get('pages_total')} KV pages used")
        if usage.get("states_total"):
            parts.append(f"{usage.get('states_used')} of {usage['states_total']} recurrent states used")
    for key, value in description.items():
        if isinstance(value, str | int | float) and value != "":
            parts.append(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}")
    return " · ".join(parts)
