"""What the commands of ``ddtree`` share: options, the connection, how errors and answers are shown.

Knows click; does not know what any single command does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from ddtree_client.client import Client
from ddtree_client.errors import DDTreeClientError, InvalidRequestError
from ddtree_client.types import GenerateOptions, Message, Result, Tls

DRAFT_MODES = ("tree", "chain", "off")
INTERRUPTED_EXIT_CODE = 130  # what a shell expects of a program ended by Ctrl-C

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Failure(click.ClickException):
    """A `DDTreeClientError` on its way to the user: one line, exit code 1 and no traceback."""

    exit_code = 1

    def __init__(self, error: DDTreeClientError, *, as_json: bool) -> None:
        super().__init__(error.message)
        self._error = error
        self._as_json = as_json

    def show(self, file: Any = None) -> None:
        """Writes the error: as a JSON object to stdout, or as a line to stderr."""
        if self._as_json:
            click.echo(json.dumps(error_object(self._error), ensure_ascii=False))
        else:
            click.echo(f"ddtree: {self._error.code}: {self.message}", file=file, err=True)


class Command(click.Command):
    """A command whose client errors and interrupts end with a line and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; DDTreeClientError becomes Failure."""
        try:
            return super().invoke(ctx)
        except DDTreeClientError as error:
            raise Failure(error, as_json=bool(ctx.params.get("as_json"))) from None
        except KeyboardInterrupt:
            click.echo("cancelled", err=True)
            raise click.exceptions.Exit(INTERRUPTED_EXIT_CODE) from None


def tree_budget(value: str) -> int:
    """A node count, or ``auto`` (sent as -1: the server chooses), as typed. Raises click.BadParameter."""
    if value == "auto":
        return -1
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a number of draft nodes nor 'auto'") from None


def milliseconds(value: str) -> int:
    """Seconds as typed, as whole milliseconds. Raises click.BadParameter."""
    try:
        seconds = float(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is no number of seconds") from None
    if not 0.001 <= seconds < 2**31 / 1000:
        raise click.BadParameter(f"{value} must be at least 0.001 seconds")
    return int(seconds * 1000)


def connection_options(function: _Function) -> _Function:
    """Adds --json to the `server_options`."""
    as_json = click.option("--json", "as_json", is_flag=True, help="JSON on stdout, for programs.")
    return server_options(as_json(function))


def server_options(function: _Function) -> _Function:
    """Adds --url, --model, --timeout and the TLS files; `open_client` takes what they give."""
    pem = click.Path(exists=True, dir_okay=False, path_type=Path)
    for option in reversed(
        (
            click.option("--url", default="localhost:8001", show_default=True, envvar="DDTREE_URL",
                         show_envvar=True, metavar="HOST:PORT", help="Triton's gRPC port."),
            click.option("--model", default="ddtree", show_default=True, help="Model to ask."),
            click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True),
                         metavar="SECONDS", help="Give up on an answer after this time."),
            click.option("--tls-ca", type=pem, help="Certificates to trust (PEM); switches TLS on."),
            click.option("--tls-key", type=pem, help="The client's own key (PEM), for mutual TLS."),
            click.option("--tls-cert", type=pem, help="The client's own certificates (PEM), for mutual TLS."),
        )
    ):  # fmt: skip
        function = option(function)
    return function


def generation_options(function: _Function) -> _Function:
    """Adds the options that shape an answer; `given_options` takes what they give."""
    for option in reversed(
        (
            click.option("--draft-mode", type=click.Choice(DRAFT_MODES), help="How drafts are made."),
            click.option(
                "--tree-budget", type=tree_budget, metavar="N|auto", help="Most draft nodes in a tree."
            ),
            click.option("--max-tokens", type=int, default=256, show_default=True, help="Most tokens."),
            click.option("--stop", multiple=True, metavar="TEXT", help="End the answer here. Repeatable."),
            click.option("--temperature", type=float, help="Absent or 0: greedy."),
            click.option("--top-p", type=float),
            click.option("--top-k", type=int),
            click.option("--min-p", type=float),
            click.option("--seed", type=int, help="Same seed, same answer."),
            click.option("--repetition-penalty", type=float),
            click.option(
                "--deadline",
                "deadline_ms",
                type=milliseconds,
                metavar="SECONDS",
                help="The answer is what the server has by then.",
            ),
            click.option("--guided-json", metavar="SCHEMA", help="A JSON schema the answer must match."),
            click.option("--guided-regex", metavar="REGEX", help="What the whole answer must match."),
        )
    ):
        function = option(function)
    return function


def show_drafts_option(function: _Function) -> _Function:
    """Adds --show-drafts."""
    text = "Mark which tokens were drafted and accepted, and which are the target's own."
    return click.option("--show-drafts", is_flag=True, help=text)(function)


def refuse_drafts_as_json(*, show_drafts: bool, as_json: bool) -> None:
    """Raises click.UsageError for both at once."""
    if show_drafts and as_json:
        raise click.UsageError("--show-drafts is for people; for programs there is ddtree trace --json FILE")


def open_client(values: Mapping[str, Any]) -> Client:
    """The client for the values of `connection_options`. A malformed --url is a usage error."""
    files = (values["tls_ca"], values["tls_key"], values["tls_cert"])
    tls = None if files == (None, None, None) else Tls(*files)
    try:
        return Client(values["url"], model=values["model"], timeout_s=values["timeout_s"], tls=tls)
    except InvalidRequestError as error:
        raise click.UsageError(error.message) from None


def prompt_arguments(prompt: str, *, raw: bool) -> dict[str, Any]:
    """Keyword arguments of `Client.generate`: the text as it is, or as the user's turn of a conversation."""
    if raw:
        return {"prompt": prompt}
    messages: list[Message] = [{"role": "user", "content": prompt}]
    return {"messages": messages}


def given_options(values: Mapping[str, Any]) -> GenerateOptions:
    """The request's options among a command's values. What was not given is left to the server."""
    names = GenerateOptions.__annotations__
    given = {name: value for name, value in values.items() if name in names and value is not None}
    return cast("GenerateOptions", given)


def stats_line(result: Result) -> str:
    """One line for people about an answer."""
    stats = result.stats
    parts = [
        f"{stats.output_tokens} tokens in {stats.total_s:.2f} s",
        f"{_or_dash(stats.tokens_per_second, '.1f')} tokens/s",
        f"first after {stats.time_to_first_token_s * 1000:.0f} ms",
        f"{stats.rounds} rounds",
        f"acceptance length {_or_dash(stats.acceptance_length, '.2f')}",
        f"ended by {result.finish_reason}",
    ]
    return " · ".join(parts)


def result_object(result: Result) -> dict[str, Any]:
    """An answer for programs. Times in seconds; what cannot be computed is null."""
    stats = result.stats
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "stats": {
            "input_tokens": stats.input_tokens,
            "output_tokens": stats.output_tokens,
            "rounds": stats.rounds,
            "draft_tokens": stats.draft_tokens,
            "accepted_draft_tokens": stats.accepted_draft_tokens,
            "acceptance_length": stats.acceptance_length,
            "acceptance_rate": stats.acceptance_rate,
            "time_to_first_token_s": stats.time_to_first_token_s,
            "total_s": stats.total_s,
            "tokens_per_second": stats.tokens_per_second,
        },
    }


def error_object(error: DDTreeClientError) -> dict[str, Any]:
    """An error for programs."""
    return {"error": {"code": error.code, "message": error.message}}


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
