"""Who takes part, and that turns are fair."""

from __future__ import annotations

from collections import Counter

from benchmarks.contenders import AUTO, PLAYERS, SERVED, Contender, all_contenders, rotated, turns


def test_names_are_unique_and_say_what_decodes() -> None:
    contenders = all_contenders(PLAYERS, (8, 16, 32, 64))
    names = [each.name for each in contenders]
    assert len(set(names)) == len(names)
    assert set(names) >= {
        "in-process/plain", "in-process/chain", "in-process/tree-64", "in-process/tree-auto",
        "grpc/plain", "grpc/chain", "grpc/tree-8", "grpc-in-process/tree-auto", "transformers", "dflash",
    }  # fmt: skip


def test_the_served_budgets_include_every_local_one() -> None:
    contenders = all_contenders(("in-process", "grpc"), (8, 16))
    by_player = {
        player: [(each.draft_mode, each.tree_budget) for each in contenders if each.player == player]
        for player in ("in-process", "grpc")
    }
    assert by_player["in-process"] == by_player["grpc"]
    assert ("tree", AUTO) in by_player["grpc"]


def test_the_second_topology_runs_the_two_smallest_budgets_and_auto() -> None:
    budgets = [each.tree_budget for each in all_contenders(("grpc-in-process",), (64, 8, 16))]
    assert budgets == [8, 16, AUTO]


def test_rotation_begins_later_and_goes_round() -> None:
    a, b, c = (Contender("in-process", "tree", budget) for budget in (1, 2, 3))
    assert rotated([a, b, c], 0) == [a, b, c]
    assert rotated([a, b, c], 1) == [b, c, a]
    assert rotated([a, b, c], 5) == [c, a, b]
    assert rotated([], 3) == []


def test_everybody_decodes_every_prompt_once_a_repeat() -> None:
    contenders = all_contenders(("in-process", "transformers"), (8,))
    schedule = list(turns(contenders, prompts=3, repeats=2, served_repeats=2))
    assert len(set(schedule)) == len(schedule)
    assert len(schedule) == len(contenders) * 3 * 2


def test_contenders_take_turns_within_a_prompt() -> None:
    contenders = all_contenders(("in-process",), (8,))
    schedule = list(turns(contenders, prompts=2, repeats=2, served_repeats=2))
    size = len(contenders)
    groups = [schedule[start : start + size] for start in range(0, len(schedule), size)]
    for group in groups:
        assert len({(turn.repeat, turn.prompt) for turn in group}) == 1
        assert {turn.contender for turn in group} == set(contenders)


def test_everybody_begins_equally_often_over_as_many_prompts_as_contenders() -> None:
    contenders = all_contenders(("in-process",), (8, 16))
    size = len(contenders)
    schedule = list(turns(contenders, prompts=size, repeats=3, served_repeats=3))
    first = Counter(schedule[start].contender for start in range(0, len(schedule), size))
    assert first == Counter(dict.fromkeys(contenders, 3))


def test_served_models_take_part_in_the_first_repeats_only() -> None:
    contenders = all_contenders(PLAYERS, (8,))
    schedule = list(turns(contenders, prompts=2, repeats=3, served_repeats=1))
    served = {turn.repeat for turn in schedule if turn.contender.player in SERVED}
    others = {turn.repeat for turn in schedule if turn.contender.player not in SERVED}
    assert served == {0}
    assert others == {0, 1, 2}
