"""Measuring: the same prompts in several draft modes, some at once, and what came of it as numbers.

Times are the client's, so they contain the network and the server's queue. Knows nothing of terminals or
files; what is shown is in `cli_bench`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ddtree_client.client import Client, Stream
from ddtree_client.errors import DDTreeClientError
from ddtree_client.types import Chunk, GenerateOptions, Stats

# Gives a stream's chunks, and may look at them as they pass.
Watch = Callable[[Stream, str], Iterable[Chunk]]


@dataclass(frozen=True)
class Variant:
    """One way of decoding that is compared. ``tree_budget`` None: the server chooses."""

    draft_mode: str
    tree_budget: int | None = None

    @property
    def label(self) -> str:
        """``tree 16``, ``tree auto``, ``chain``, ``off``."""
        if self.draft_mode != "tree":
            return self.draft_mode
        return f"tree {'auto' if self.tree_budget in (None, -1) else self.tree_budget}"


@dataclass(frozen=True)
class Sample:
    """One answered request. ``token_gaps_s`` has one entry per token after the first chunk.

    Tokens of one chunk arrive together: the time since the chunk before is shared equally between them.
    """

    stats: Stats
    token_gaps_s: tuple[float, ...]


@dataclass(frozen=True)
class Report:
    """The numbers of one variant. What cannot be computed (no answer, no rounds) is None."""

    variant: Variant
    requests: int
    errors: tuple[str, ...]
    output_tokens: int
    wall_s: float
    tokens_per_second: float  # of all requests together
    request_tokens_per_second: float | None  # median over the requests, decoding only
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    inter_token_p50_s: float | None
    inter_token_p95_s: float | None
    acceptance_length: float | None
    acceptance_rate: float | None


@dataclass(frozen=True)
class Plan:
    """What every variant has to answer. ``prompts`` are keyword arguments of `Client.stream`."""

    prompts: Sequence[Mapping[str, Any]]
    options: GenerateOptions
    requests: int  # go round the prompts
    concurrency: int  # requests under way at a time


def unwatched(stream: Stream, _: str) -> Iterable[Chunk]:
    """The chunks as they are."""
    return stream


def variant_options(variant: Variant, options: GenerateOptions) -> GenerateOptions:
    """``options`` with the variant's way of drafting."""
    made: GenerateOptions = {**options, "draft_mode": variant.draft_mode}
    if variant.tree_budget is not None:
        made["tree_budget"] = variant.tree_budget
    return made


def run_variant(
    client: Client,
    variant: Variant,
    plan: Plan,
    *,
    on_done: Callable[[], object],
    watch: Watch = unwatched,
    is_warm: bool = False,
) -> Report:
    """Sends the plan's requests with the variant's draft mode and calls ``on_done`` after each.

    ``watch`` sees the streams of all but the first one, with their draft mode.

    Unless the server ``is_warm``, a first request warms it up and is not counted; its error is raised. Later
    errors are counted.
    """
    options = variant_options(variant, plan.options)
    if not is_warm:
        measure(client, plan.prompts[0], options)

    def one(index: int) -> Sample | str:
        try:
            return measure(client, plan.prompts[index % len(plan.prompts)], options, watch)
        except DDTreeClientError as error:
            return f"{error.code}: {error.message}"
        finally:
            on_done()

    started = time.perf_counter()
    pool = ThreadPoolExecutor(plan.concurrency)
    try:
        outcomes = list(pool.map(one, range(plan.requests)))
    finally:
        # Ctrl-C: what has not started never starts; what runs ends with the client.
        pool.shutdown(wait=False, cancel_futures=True)
    wall_s = time.perf_counter() - started
    samples = [outcome for outcome in outcomes if isinstance(outcome, Sample)]
    errors = tuple(outcome for outcome in outcomes if isinstance(outcome, str))
    return report(variant, samples, errors, wall_s)


def measure(
    client: Client, prompt: Mapping[str, Any], options: GenerateOptions, watch: Watch = unwatched
) -> Sample:
    """One request, from sending to the last chunk."""
    gaps: list[float] = []
    before_s: float | None = None
    with client.stream(**prompt, **options) as stream:
        for chunk in watch(stream, options.get("draft_mode") or ""):
            count = len(chunk.token_ids)
            if before_s is not None and count > 0:
                gaps += [(chunk.elapsed_s - before_s) / count] * count
            if count > 0:
                before_s = chunk.elapsed_s
    return Sample(stream.result.stats, tuple(gaps))


def report(variant: Variant, samples: Sequence[Sample], errors: tuple[str, ...], wall_s: float) -> Report:
    """The numbers of ``samples`` that took ``wall_s`` together."""
    stats = [sample.stats for sample in samples]
    output_tokens = sum(each.output_tokens for each in stats)
    with_rounds = [each for each in stats if each.rounds > 0]
    rounds = sum(each.rounds for each in with_rounds)
    drafted = sum(each.draft_tokens for each in stats)
    gaps = [gap for sample in samples for gap in sample.token_gaps_s]
    first = [each.time_to_first_token_s for each in stats]
    speeds = [each.tokens_per_second for each in stats if each.tokens_per_second is not None]
    return Report(
        variant=variant,
        requests=len(samples) + len(errors),
        errors=errors,
        output_tokens=output_tokens,
        wall_s=wall_s,
        tokens_per_second=output_tokens / wall_s if wall_s > 0 else 0.0,
        request_tokens_per_second=percentile(speeds, 50),
        ttft_p50_s=percentile(first, 50),
        ttft_p95_s=percentile(first, 95),
        inter_token_p50_s=percentile(gaps, 50),
        inter_token_p95_s=percentile(gaps, 95),
        acceptance_length=sum(each.output_tokens - 1 for each in with_rounds) / rounds if rounds else None,
        acceptance_rate=sum(each.accepted_draft_tokens for each in stats) / drafted if drafted else None,
    )


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The smallest value that at least ``percent`` of 100 values do not exceed; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)  # rounded up
    return ordered[max(rank, 1) - 1]
