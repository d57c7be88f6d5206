"""`python -m ddtree_local.demo`: the whole product once, from nothing, and a comparison with plain decoding.

Brings the demo target, starts Triton on free ports, streams the answers to a few questions, decodes the same
ones linearly and plainly, prints what happened, and stops everything again.
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

# What drafts give depends on what is asked: arithmetic is easy to foresee, free talk is not.
PROMPTS = (
    (
        "A baker sells 24 rolls at 2 dollars each in the morning and three times as many in the afternoon. "
        "What does the baker earn on that day? Reason step by step."
    ),
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Why is the sky blue?",
)
_WARM_UP_TOKENS = 16
_TURNS = 3  # in turns, so that a slow moment of the machine does not fall on one mode alone


_TREE, _CHAIN, _OFF = _MODES = ("tree", "chain", "off")
_Answers = Mapping[str, Sequence[Result]]  # by draft mode


@dataclass(frozen=True)
class _Question:
    prompt: str
    max_tokens: int

    def ask(self, client: Client, mode: str, *, echo: bool) -> Result:
        """The answer in one mode, printed as it comes if `echo`."""
        stream = client.stream(
            messages=[{"role": "user", "content": self.prompt}],
            max_tokens=self.max_tokens,
            draft_mode=mode,
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


def _acceptance_length(results: Sequence[Result]) -> float | None:
    return statistics.median_low(each.stats.acceptance_length or 0.0 for each in results) or None


def _table(all_answers: Mapping[str, _Answers]) -> Table:
    table = Table(title=f"Tokens per second (tokens a round), medians of {_TURNS} turns")
    table.add_column("question", max_width=22, overflow="ellipsis", no_wrap=True)
    for heading in ("plain", "chain", "tree", "tree / plain"):
        table.add_column(heading, justify="right")
    for prompt, answers in all_answers.items():
        plain, chain, tree = (_median_speed(answers[mode]) for mode in (_OFF, _CHAIN, _TREE))
        table.add_row(
            prompt,
            _number(plain, ".1f"),
            f"{_number(chain, '.1f')} ({_number(_acceptance_length(answers[_CHAIN]), '.2f')})",
            f"{_number(tree, '.1f')} ({_number(_acceptance_length(answers[_TREE]), '.2f')})",
            _number(tree / plain if tree and plain else None, ".2f"),
        )
    return table


def _verdict(all_answers: Mapping[str, _Answers]) -> str:
    differing = [count for answers in all_answers.values() if (count := _agreement(answers)) is not None]
    if not differing:
        return "Every way gives the same answers, token for token."
    agreed = " and ".join(map(str, differing))
    return (
        f"{len(differing)} of {len(all_answers)} answers differ after their first {agreed} tokens, where "
        "bfloat16 rounding decides a near-tie differently; in float32 every way gives the same."
    )


def _agreement(answers: _Answers) -> int | None:
    """Tokens on which all ways agree before two differ; None when none does."""
    plain = answers[_OFF][0].token_ids
    drafted = [answers[mode][0].token_ids for mode in (_TREE, _CHAIN)]
    if all(each == plain for each in drafted):
        return None
    return min(_common_prefix(each, plain) for each in drafted)


def _common_prefix(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    shared = 0
    for ours, theirs in zip(one, other, strict=False):
        if ours != theirs:
            break
        shared += 1
    return shared


def _ask_all_ways(client: Client, question: _Question) -> _Answers:
    click.echo(f"> {question.prompt}\n")
    answers = {mode: list[Result]() for mode in _MODES}
    answers[_TREE].append(question.ask(client, _TREE, echo=True))
    click.echo("\n")
    with waiting("The same question in every draft mode"):
        for mode in (_MODES * _TURNS)[1:]:
            answers[mode].append(question.ask(client, mode, echo=False))
    return answers


def _run(questions: Sequence[_Question]) -> None:
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
                    _Question(questions[0].prompt, _WARM_UP_TOKENS).ask(client, mode, echo=False)
            answers = {each.prompt: _ask_all_ways(client, each) for each in questions}
        Console().print(_table(answers))
        click.echo(_verdict(answers))
    finally:
        with waiting("Stopping Triton"):
            server.stop()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--prompt", multiple=True, help="What to ask instead of the three questions; may be repeated.")
@click.option("--max-tokens", type=click.IntRange(2, 4096), default=128, show_default=True)
def main(*, prompt: tuple[str, ...], max_tokens: int) -> None:
    """Stream answers of the demo pair through a real Triton server, then compare."""
    try:
        check_prerequisites()
        with sigterm_as_interrupt():
            _run([_Question(each, max_tokens) for each in dict.fromkeys(prompt or PROMPTS)])
    except (LocalTritonError, DDTreeClientError) as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
