"""Which way of drafting suits this server, these prompts and so many callers: measured and compared.

Every pass measures every setting once, in another order each time, so that a slow moment of the machine hits
all alike; settings are compared within a pass and the median over passes counts. The measuring itself is
`bench`'s. Knows no terminal, no file and no picture.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ddtree_client.bench import Plan, Report, Variant, measure, run_variant, variant_options
from ddtree_client.client import Client
from ddtree_client.errors import DDTreeClientError
from ddtree_client.types import GenerateOptions

_TOLERANCE = 0.03  # what nobody would notice
_OFTEN = 1 / 3  # who is ahead in so many passes is not clearly behind
FEW_PASSES = 3  # from so many on a slow moment shows
_WARM_UP_TOKENS = 8


class NotEnoughTimeError(Exception):
    """Not even one pass over all settings fitted into the time."""


@dataclass(frozen=True)
class Setting:
    """A way of drafting with so many requests under way at a time."""

    variant: Variant
    concurrency: int

    @property
    def label(self) -> str:
        """``tree 16 × 4``."""
        return f"{self.variant.label} × {self.concurrency}"


@dataclass(frozen=True)
class Workload:
    """What every setting has to answer. ``prompts`` are keyword arguments of `Client.stream`."""

    prompts: Sequence[Mapping[str, Any]]
    options: GenerateOptions
    requests: int  # per setting and pass, at least as many as are under way at a time

    def plan(self, setting: Setting, number: int) -> Plan:
        """The same prompts for all settings of a pass, and others in the next."""
        requests = max(self.requests, setting.concurrency)
        start = number * self.requests % len(self.prompts)
        prompts = [*self.prompts[start:], *self.prompts[:start]]
        return Plan(prompts, self.options, requests=requests, concurrency=setting.concurrency)


@dataclass(frozen=True)
class Point:
    """How fast a setting was, in one pass or in the median over them."""

    tokens_per_second: float  # of all requests together
    token_ms: float  # between two tokens of the median request


@dataclass(frozen=True)
class Measured:
    """A setting's numbers, medians over the passes. None: it cannot be known."""

    setting: Setting
    points: tuple[Point, ...]  # of the passes in which it answered
    inter_token_p95_ms: float | None
    acceptance_length: float | None
    against_off: float | None  # speed over that of mode `off` in the same pass and at the same concurrency
    errors: tuple[str, ...]

    @property
    def middle(self) -> Point:
        """The median over the passes; only where there are any."""
        return Point(
            median(each.tokens_per_second for each in self.points),
            median(each.token_ms for each in self.points),
        )


@dataclass(frozen=True)
class Recommendation:
    """A setting that is best for a purpose, and why it was chosen."""

    purpose: str
    measured: Measured
    reason: str


@dataclass(frozen=True)
class Tuning:
    """All that was found out."""

    passes: int
    measured: tuple[Measured, ...]
    refused: Mapping[str, str]  # label of a way of drafting: why the server does not do it
    pareto: tuple[Setting, ...]  # no other one is faster for all callers and for each of them
    recommendations: tuple[Recommendation, ...]


def accepted_variants(
    client: Client, variants: Sequence[Variant], workload: Workload
) -> tuple[list[Variant], dict[str, str]]:
    """Warm up every way of drafting; gives those that the server does, and why it refuses the others.

    Raises:
        DDTreeClientError: the server refuses all of them.
    """
    accepted: list[Variant] = []
    refused: dict[str, str] = {}
    last: DDTreeClientError | None = None
    for variant in variants:
        options = variant_options(variant, workload.options)
        try:
            measure(client, workload.prompts[0], {**options, "max_tokens": _WARM_UP_TOKENS})
            accepted.append(variant)
        except DDTreeClientError as error:
            refused[variant.label], last = error.message, error
    if last is not None and not accepted:
        raise last
    return accepted, refused


def run_passes(
    client: Client,
    settings: Sequence[Setting],
    workload: Workload,
    *,
    seconds: float,
    on_setting: Callable[[int, Setting], object],
    clock: Callable[[], float] = time.monotonic,
) -> list[dict[Setting, Report]]:
    """Measure all settings as often as the time allows; a pass that would not end in time is not begun.

    Args:
        client: of the server to measure.
        settings: what to compare.
        workload: what to answer.
        seconds: the time for all passes.
        on_setting: called before each measurement with the pass and the setting.
        clock: seconds; for tests.

    Raises:
        NotEnoughTimeError: the first pass did not end in time; says how long one takes.
    """
    passes: list[dict[Setting, Report]] = []
    began = clock()
    longest = 0.0
    while not passes or clock() - began + longest <= seconds:
        pass_began = clock()
        order = random.Random(len(passes)).sample(list(settings), len(settings))
        reports: dict[Setting, Report] = {}
        for setting in order:
            on_setting(len(passes), setting)
            plan = workload.plan(setting, len(passes))
            reports[setting] = run_variant(client, setting.variant, plan, on_done=lambda: None, is_warm=True)
            if not passes and len(reports) < len(settings) and clock() - began > seconds:
                needed = (clock() - began) / len(reports) * len(settings) / 60
                raise NotEnoughTimeError(
                    f"{len(reports)} of {len(settings)} settings took {seconds / 60:.1f} minutes; one pass "
                    f"needs about {needed:.1f}: give more --minutes, or compare fewer settings"
                )
        passes.append({setting: reports[setting] for setting in settings})  # in the order asked for
        longest = max(longest, clock() - pass_began)
    return passes


def evaluate(passes: Sequence[Mapping[Setting, Report]], refused: Mapping[str, str]) -> Tuning:
    """What the passes say; at least one pass."""
    measured = tuple(_measured(setting, passes) for setting in passes[0])
    sound = [each for each in measured if not each.errors and each.points]
    return Tuning(len(passes), measured, refused, _pareto(sound), _recommend(sound))


def _measured(setting: Setting, passes: Sequence[Mapping[Setting, Report]]) -> Measured:
    reports = [each[setting] for each in passes]
    plain = Setting(Variant("off"), setting.concurrency)
    ratios = [
        each[setting].tokens_per_second / each[plain].tokens_per_second
        for each in passes
        if plain in each and each[plain].tokens_per_second > 0
    ]
    late = [each.inter_token_p95_s for each in reports if each.inter_token_p95_s is not None]
    lengths = [each.acceptance_length for each in reports if each.acceptance_length is not None]
    return Measured(
        setting=setting,
        points=tuple(
            Point(each.tokens_per_second, 1000 / each.request_tokens_per_second)
            for each in reports
            if each.request_tokens_per_second
        ),
        inter_token_p95_ms=1000 * median(late) if late else None,
        acceptance_length=median(lengths) if lengths else None,
        against_off=median(ratios) if ratios else None,
        errors=tuple(error for each in reports for error in each.errors),
    )


def _pareto(sound: Sequence[Measured]) -> tuple[Setting, ...]:
    middles = [each.middle for each in sound]

    def is_beaten(one: Point) -> bool:
        return any(
            other != one
            and other.tokens_per_second >= one.tokens_per_second
            and other.token_ms <= one.token_ms
            for other in middles
        )

    return tuple(each.setting for each, middle in zip(sound, middles, strict=True) if not is_beaten(middle))


_PURPOSES: tuple[tuple[str, str, Callable[[Point], float]], ...] = (
    ("each answer as fast as can be", "least time between tokens", lambda one: 1 / one.token_ms),
    ("most from the machine", "most tokens per second in all", lambda one: one.tokens_per_second),
    (
        "both",
        "most tokens per second in all for the time between tokens",
        # The root, so that it differs by as much as the two do of which it is made.
        lambda one: (one.tokens_per_second / one.token_ms) ** 0.5,
    ),
)


def _recommend(sound: Sequence[Measured]) -> tuple[Recommendation, ...]:
    return tuple(_best(*purpose, sound) for purpose in _PURPOSES if sound)


def _best(
    purpose: str, what: str, score: Callable[[Point], float], sound: Sequence[Measured]
) -> Recommendation:
    """The best setting, or the simplest of those at its concurrency that are not clearly behind it."""
    top = max(sound, key=lambda one: score(one.middle))
    close = [
        each
        for each in sound
        if each.setting.concurrency == top.setting.concurrency and not _is_behind(each, top, score)
    ]
    chosen = min(close, key=lambda one: (_complexity(one.setting.variant), -score(one.middle)))
    middle = chosen.middle
    reason = f"{what}: {middle.tokens_per_second:.1f} tokens/s, {middle.token_ms:.1f} ms a token"
    if chosen.against_off is not None and chosen.setting.variant.draft_mode != "off":
        reason += f", {chosen.against_off:.2f} × plain decoding at the same concurrency"
    if chosen is not top:
        ahead = score(top.middle) / score(middle) - 1
        reason += f"; {top.setting.label} was {ahead:.0%} ahead, not clearly, and needs more to be set"
    return Recommendation(purpose, chosen, reason)


def _is_behind(one: Measured, top: Measured, score: Callable[[Point], float]) -> bool:
    """Whether `one` is clearly worse: by more than a trifle, and not now and then the better one."""
    if score(one.middle) >= score(top.middle) * (1 - _TOLERANCE):
        return False
    pairs = list(zip(one.points, top.points, strict=False))
    wins = sum(score(own) >= score(other) for own, other in pairs)
    return len(pairs) < FEW_PASSES or wins < len(pairs) * _OFTEN


def _complexity(variant: Variant) -> tuple[int, int]:
    """Nothing to set is the simplest; then the smaller tree."""
    if variant.draft_mode == "tree":
        return (0, 0) if variant.tree_budget in (None, -1) else (1, variant.tree_budget or 0)
    return (2, 0)
