"""``ddtree chat``: a conversation in the terminal, or one turn per line of stdin for programs.

The history lives here and is sent whole with every turn; the server keeps nothing between turns.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import click

from ddtree_client.cli_drafts import LEGENDS, DraftPainter, look_of_stdout
from ddtree_client.cli_options import (
    Command,
    connection_options,
    generation_options,
    given_options,
    open_client,
    refuse_drafts_as_json,
    result_object,
    show_drafts_option,
    stats_line,
)
from ddtree_client.client import Client
from ddtree_client.errors import DDTreeClientError
from ddtree_client.types import GenerateOptions, Message

HELP = (
    "/reset forgets the conversation · /stats shows numbers after each answer · /drafts marks what was "
    "drafted · /quit leaves"
)


class Conversation:
    """The turns so far. A turn without an answer is forgotten, so that it can be asked again."""

    def __init__(self, system: str | None) -> None:
        self._system: tuple[Message, ...] = () if system is None else ({"role": "system", "content": system},)
        self._turns: list[Message] = []

    def messages(self, question: str) -> list[Message]:
        """What to send to have ``question`` answered."""
        return [*self._system, *self._turns, {"role": "user", "content": question}]

    def keep(self, question: str, answer: str) -> None:
        """Adds a finished turn. An empty answer is not kept."""
        if answer:
            self._turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Forgets the turns, not the system message."""
        self._turns.clear()


class Terminal:
    """A person at a terminal: prompts, colours, Ctrl-C ends the answer and not the program."""

    def __init__(
        self,
        client: Client,
        conversation: Conversation,
        options: GenerateOptions,
        *,
        stats: bool,
        drafts: bool = False,
    ) -> None:
        self._client = client
        self._conversation = conversation
        self._options = options
        self._stats = stats
        self._drafts = drafts
        self._look = look_of_stdout()

    def run(self) -> None:
        """Until /quit or the end of input."""
        _note(f"{HELP} · Ctrl-C stops an answer")
        if self._drafts:
            _note(LEGENDS[self._look])
        for line in self._lines():
            match line.strip():
                case "":
                    continue
                case "/quit" | "/exit":
                    return
                case "/reset":
                    self._conversation.reset()
                    _note("forgotten")
                case "/stats":
                    self._stats = not self._stats
                    _note(f"numbers are {'on' if self._stats else 'off'}")
                case "/drafts":
                    self._drafts = not self._drafts
                    _note(LEGENDS[self._look] if self._drafts else "drafts are not marked")
                case command if command.startswith("/"):
                    _note(HELP)
                case question:
                    self._answer(question)

    def _lines(self) -> Iterator[str]:
        while (line := _read_line()) is not None:
            yield line

    def _answer(self, question: str) -> None:
        answer: list[str] = []
        painter = DraftPainter(self._look)
        options: GenerateOptions = {**self._options, "trace": True} if self._drafts else self._options
        try:
            with self._client.stream(messages=self._conversation.messages(question), **options) as stream:
                for chunk in stream:
                    answer.append(chunk.text)
                    click.echo(painter.paint(chunk) if self._drafts else chunk.text, nl=False)
            click.echo()
            if self._stats or self._drafts:
                _note(stats_line(stream.result))
        except KeyboardInterrupt:
            _note("\nstopped")
        except DDTreeClientError as error:
            # The conversation goes on: a person can wait, or ask in another way.
            click.secho(f"\n{error.code}: {error.message}", fg="red", err=True)
            return
        self._conversation.keep(question, "".join(answer))


@click.command(cls=Command)
@click.option("--system", metavar="TEXT", help="A system message before the conversation.")
@click.option("--stats", "show_stats", is_flag=True, help="Show speed and rounds after every answer.")
@show_drafts_option
@generation_options
@connection_options
def chat(*, system: str | None, show_stats: bool, show_drafts: bool, as_json: bool, **values: Any) -> None:
    """Talk with the model. With --json, or when stdin is not a terminal: one turn per line of stdin."""
    refuse_drafts_as_json(show_drafts=show_drafts, as_json=as_json)
    options = given_options(values)
    conversation = Conversation(system)
    with open_client(values) as client:
        if not as_json and sys.stdin.isatty():
            Terminal(client, conversation, options, stats=show_stats, drafts=show_drafts).run()
            return
        for line in sys.stdin:
            question = line.strip()
            if question in ("/quit", "/exit"):
                return
            if question == "/reset":
                conversation.reset()
            elif question:
                _answer_line(client, conversation, question, options, as_json=as_json, drafts=show_drafts)


def _answer_line(
    client: Client,
    conversation: Conversation,
    question: str,
    options: GenerateOptions,
    *,
    as_json: bool,
    drafts: bool,
) -> None:
    if drafts:
        options = {**options, "trace": True}
    painter = DraftPainter(look_of_stdout())
    stream = client.stream(messages=conversation.messages(question), **options)
    painted = [painter.paint(chunk) if drafts else chunk.text for chunk in stream]
    result = stream.result
    conversation.keep(question, result.text)
    click.echo(json.dumps(result_object(result), ensure_ascii=False) if as_json else "".join(painted))


def _note(text: str) -> None:
    click.secho(text, dim=True)


def _read_line() -> str | None:
    """What the person typed; empty after Ctrl-C, None at the end of input."""
    try:
        return input("you> ")
    except EOFError:
        click.echo()
        return None
    except KeyboardInterrupt:
        _note("\n/quit or Ctrl-D leaves")
        return ""
