"""How settings are measured in turns, compared within a pass, and chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from ddtree_client.bench import Report, Variant
from ddtree_client.cli_tune import parameters, tuning_object, tuning_table
from ddtree_client.errors import InvalidRequestError
from ddtree_client.tune import (
    NotEnoughTimeError,
    Setting,
    Tuning,
    Workload,
    accepted_variants,
    evaluate,
    run_passes,
)
from ddtree_client.tune_picture import draw
from ddtree_client.types import Chunk, Result, Stats

OFF, CHAIN, AUTO, SMALL, LARGE = (
    Variant("off"), Variant("chain"), Variant("tree", -1), Variant("tree", 8), Variant("tree", 64),
)  # fmt: skip
ONE = Setting(OFF, 1)


def report(variant: Variant, speed: float, own: float | None = None, errors: tuple[str, ...] = ()) -> Report:
    return Report(
        variant=variant, requests=2, errors=errors, output_tokens=20, wall_s=20 / speed,
        tokens_per_second=speed, request_tokens_per_second=own or speed, ttft_p50_s=0.1, ttft_p95_s=0.2,
        inter_token_p50_s=0.01, inter_token_p95_s=0.02, acceptance_length=2.5, acceptance_rate=0.5,
    )  # fmt: skip


def tuned(*passes: Mapping[Setting, float]) -> Tuning:
    """Of passes that say how many tokens per second each setting did, shared by those under way."""
    return evaluate(
        [
            {
                setting: report(setting.variant, speed, speed / setting.concurrency)
                for setting, speed in each.items()
            }
            for each in passes
        ],
        {},
    )


def chosen(tuning: Tuning) -> list[Setting]:
    return [one.measured.setting for one in tuning.recommendations]


def test_a_slow_moment_does_not_count_against_who_met_it() -> None:
    small = Setting(SMALL, 1)
    found = tuned({ONE: 100, small: 200}, {ONE: 10, small: 20}, {ONE: 20, small: 40})
    assert [each.against_off for each in found.measured] == [1.0, 2.0]
    assert found.measured[1].middle.tokens_per_second == 40
    assert chosen(found) == [small] * 3
    assert "2.00 × plain decoding" in found.recommendations[0].reason


def test_the_edge_of_what_is_possible_and_its_ends() -> None:
    # tokens/s for ms a token:  100 for 10      240 for 17         300 for 53          50 for 20, 200 for 20
    alone, four, many = Setting(SMALL, 1), Setting(SMALL, 4), Setting(SMALL, 16)
    found = tuned({ONE: 50, Setting(LARGE, 4): 200, alone: 100, four: 240, many: 300})
    assert found.pareto == (alone, four, many)
    assert chosen(found) == [alone, many, four]


def test_nothing_to_set_wins_when_it_is_not_clearly_behind() -> None:
    auto, large = Setting(AUTO, 1), Setting(LARGE, 1)
    near = tuned({auto: 98, large: 100, ONE: 50})
    assert chosen(near) == [auto] * 3
    assert "tree 64 × 1 was 2% ahead, not clearly" in near.recommendations[0].reason
    assert chosen(tuned({auto: 90, large: 100, ONE: 50})) == [large] * 3
    # Further behind in the middle, but ahead in a pass of three.
    mixed = [{auto: 110.0, large: 100.0}, {auto: 90.0, large: 100.0}, {auto: 91.0, large: 101.0}]
    assert chosen(tuned(*mixed)) == [auto] * 3
    assert chosen(tuned(*mixed[1:])) == [large] * 3


def test_a_setting_with_errors_is_shown_and_not_recommended() -> None:
    small = Setting(SMALL, 1)
    found = evaluate([{ONE: report(OFF, 50), small: report(SMALL, 500, errors=("UNAVAILABLE: no",))}], {})
    assert chosen(found) == [ONE] * 3
    console = Console(width=100)
    with console.capture() as capture:
        console.print(tuning_table(found))
    assert "1 errors" in capture.get()
    assert tuning_object(found)["settings"][1]["errors"] == ["UNAVAILABLE: no"]
    assert evaluate([{small: report(SMALL, 500, errors=("x",))}], {}).recommendations == ()


def test_what_a_request_must_say() -> None:
    assert [parameters(variant) for variant in (OFF, CHAIN, AUTO, Variant("tree"), SMALL)] == [
        {"draft_mode": "off"}, {"draft_mode": "chain"}, {}, {}, {"tree_budget": 8},
    ]  # fmt: skip


def test_the_picture(tmp_path: Path) -> None:
    draw(tuned({Setting(variant, number): 100 + 9 * number for number in (1, 4) for variant in (OFF, SMALL)}),
         tmp_path / "tune.png")  # fmt: skip
    with Image.open(tmp_path / "tune.png") as picture:
        assert picture.size[0] > 800
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 50


class ClockedServer:
    """A client whose every answer takes a second of its own clock; it refuses what it is told to."""

    def __init__(self, refused: int | None = None) -> None:
        self.now = 0.0
        self.asked: list[dict[str, Any]] = []
        self._refused = refused

    def stream(self, **options: Any) -> ClockedServer:
        if options.get("tree_budget") == self._refused and self._refused is not None:
            raise InvalidRequestError("tree_budget must be smaller")
        self.asked.append(options)
        self.now += 1.0
        return self

    @property
    def result(self) -> Result:
        return Result("x", (1, 2), "length", Stats(1, 2, 1, 0, 0, 1, 0.1, 0.2))

    def __iter__(self) -> Iterator[Chunk]:
        yield Chunk("x", (1, 2), 0, True, "length", 0.2)

    def __enter__(self) -> ClockedServer:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""


WORKLOAD = Workload([{"prompt": word} for word in "abcde"], {"max_tokens": 4}, requests=2)
SETTINGS = [Setting(variant, 1) for variant in (OFF, CHAIN, SMALL, LARGE)]


def measured_in(seconds: float) -> tuple[ClockedServer, list[tuple[int, Setting]], int]:
    server, order = ClockedServer(), []
    passes = run_passes(
        server, SETTINGS, WORKLOAD, seconds=seconds,  # type: ignore[arg-type]
        on_setting=lambda number, setting: order.append((number, setting)), clock=lambda: server.now,
    )  # fmt: skip
    assert [list(each) for each in passes] == [SETTINGS] * len(passes)
    return server, order, len(passes)


def test_every_pass_measures_every_setting_once_in_another_order_and_ends_in_time() -> None:
    server, order, passes = measured_in(35)
    assert passes == 4  # of 8 seconds each; a fifth would end too late
    assert server.now == 32
    turns = [[setting for number, setting in order if number == which] for which in range(passes)]
    assert all(sorted(turn, key=SETTINGS.index) == SETTINGS for turn in turns)
    assert len({tuple(turn) for turn in turns}) > 1
    # All settings of a pass answer the same prompts, and the next pass others.
    prompts = [each["prompt"] for each in server.asked]
    assert ["".join(sorted(set(prompts[start : start + 8]))) for start in (0, 8, 16, 24)] == [
        "ab", "cd", "ae", "bc",
    ]  # fmt: skip
    budgets = {each.get("tree_budget") for each in server.asked}
    assert budgets == {None, 8, 64}


def test_time_for_less_than_one_pass_is_said() -> None:
    assert measured_in(7.9)[2] == 1  # begun in time: its last setting is not thrown away
    with pytest.raises(NotEnoughTimeError, match=r"2 of 4 settings .* one pass needs about 0\.1"):
        measured_in(3)


def test_what_the_server_refuses_is_left_out() -> None:
    server = ClockedServer(refused=64)
    accepted, refused = accepted_variants(server, [OFF, SMALL, LARGE], WORKLOAD)  # type: ignore[arg-type]
    assert accepted == [OFF, SMALL]
    assert refused == {"tree 64": "tree_budget must be smaller"}
    with pytest.raises(InvalidRequestError):
        accepted_variants(server, [LARGE], WORKLOAD)  # type: ignore[arg-type]
