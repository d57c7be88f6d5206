"""`python -m ddtree_local.demo`: the whole product once, from nothing, and a comparison with plain decoding.

Brings the demo target, starts Triton on free ports, streams an answer, decodes the same prompt linearly and
plainly, prints what happened, and stops everything again.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click
from rich.console import Console
from rich.table import Table

from ddtree_client import Client, DDTreeClientError, Result
from ddtree_local.demo_target import ensure_demo_target
from ddtree_local.errors import LocalTritonError
from ddtree_local.progress import waiting
from ddtree_local.project import find_project
from ddtree_local.serving import ServedPair, check_prerequisites, local_server, sigterm_as_interrupt

PROMPT = "Why is the sky blue?"
_WARM_UP_TOKENS = 16
_TURNS = 3  # in turns, so that a slow moment of the machine does not fall on one mode alone


@dataclass(frozen=True)
class _Mode:
    draft_mode: str
    label: str


_MODES = (
    _Mode("tree", "tree (DDTree)"),
    _Mode("chain", "chain (linear DFlash)"),
    _Mode("off", "off (plain decoding)"),
)


@dataclass(frozen=True)
class _Question:
    prompt: str
    max_tokens: int

    def ask(self, client: Client, mode: _Mode, *, echo: bool) -> Result:
        """The answer in one mode, printed as it comes if `echo`."""
        stream = client.stream(
            messages=[{"role": "user", "content": self.prompt}],
            max_tokens=self.max_tokens,
            draft_mode=mode.draft_mode,
        )
        for chunk in stream:
            if echo:
                click.echo(chunk.text, nl=False)
        return stream.result


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _median_speed(results: Sequence[Result]) -> float | None:
    speeds = [speed for each in results if (speed := each.stats.tokens_per_second) is not None]
    return statistics.median(speeds) if speeds else None


def _table(results: Mapping[_Mode, Sequence[Result]]) -> Table:
    table = Table(title=f"The same prompt, three ways, {_TURNS} turns each: medians")
    table.add_column("draft mode")
    for column in ("tokens", "tokens/s", "rounds", "acceptance length"):
        table.add_column(column, justify="right")
    for mode, answers in results.items():
        stats = [answer.stats for answer in answers]
        table.add_row(
            mode.label,
            str(stats[0].output_tokens),
            _number(_median_speed(answers), ".1f"),
            str(statistics.median_low(each.rounds for each in stats)),
            _number(statistics.median_low(each.acceptance_length or 0.0 for each in stats) or None, ".2f"),
        )
    return table


def _verdict(results: Mapping[_Mode, Sequence[Result]]) -> str:
    answers = {mode.draft_mode: each[0].token_ids for mode, each in results.items()}
    plain = answers["off"]
    if all(answer == plain for answer in answers.values()):
        return "All three answers are the same, token for token."
    same = min(_common_prefix(answer, plain) for answer in answers.values())
    return (
        f"The answers agree on the first {same} tokens; then bfloat16 rounding decides a near-tie "
        "differently. In float32 they are the same."
    )


def _common_prefix(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    shared = 0
    for ours, theirs in zip(one, other, strict=False):
        if ours != theirs:
            break
        shared += 1
    return shared


def _run(question: _Question) -> None:
    project = find_project()
    target = ensure_demo_target(project.demo_target_cache)
    pair = ServedPair(target, project.demo_draft, prefix_cache=False)
    server = local_server(project, pair)
    try:
        with waiting("Starting Triton and loading the models"):
            server.start()
        with Client(url=server.grpc_url) as client:
            with waiting("Warming up"):
                for mode in _MODES:
                    _Question(question.prompt, _WARM_UP_TOKENS).ask(client, mode, echo=False)
            click.echo(f"> {question.prompt}\n")
            results = {mode: list[Result]() for mode in _MODES}
            results[_MODES[0]].append(question.ask(client, _MODES[0], echo=True))
            click.echo("\n")
            for mode in (_MODES * _TURNS)[1:]:
                with waiting(f"The same prompt with draft_mode={mode.draft_mode}"):
                    results[mode].append(question.ask(client, mode, echo=False))
        Console().print(_table(results))
        click.echo(_verdict(results))
    finally:
        with waiting("Stopping Triton"):
            server.stop()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--prompt", default=PROMPT, help="What to ask.")
@click.option("--max-tokens", type=click.IntRange(2, 4096), default=160, show_default=True)
def main(*, prompt: str, max_tokens: int) -> None:
    """Stream an answer of the demo pair through a real Triton server, then compare."""
    try:
        check_prerequisites()
        with sigterm_as_interrupt():
            _run(_Question(prompt, max_tokens))
    except (LocalTritonError, DDTreeClientError) as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
