"""Which arms there are, and that each changes what it says and nothing else."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from ddtree.errors import InvalidArgument
from ddtree.train.ablation_arms import Arm, Choices, TargetSizes, choose_arms, make_arms, spread_taps

DEMO = TargetSizes(layers=30, hidden_size=576, intermediate_size=1536, attention_size=2 * 576 * 64 * 12)
BASE = Choices(taps=(1, 8, 14, 20, 27))
CHANGED = {
    "baseline": set(),
    "seed": {"seed"},
    "data-1/2": {"share"},
    "data-1/4": {"share"},
    "data-1/8": {"share"},
    "answers-greedy": {"answers"},
    "answers-drawn": {"answers"},
    "decay-none": {"decay"},
    "decay-3": {"decay"},
    "layers-2": {"layers"},
    "layers-6-thin": {"layers", "intermediate_size"},
    "taps-1": {"taps"},
    "taps-2": {"taps"},
    "taps-3": {"taps"},
    "taps-late": {"taps"},
    "block-8": {"block_size"},
    "adamw": {"muon_rate"},
}


@pytest.fixture
def arms() -> dict[str, Arm]:
    return {arm.name: arm for arm in make_arms(BASE, DEMO)}


def test_each_arm_differs_from_the_one_it_is_compared_with_in_its_change_alone(arms: dict[str, Arm]) -> None:
    changed = {}
    for name, arm in arms.items():
        own, other = asdict(arm.choices), asdict(arms[arm.reference].choices)
        changed[name] = {field for field in own if own[field] != other[field]}
    assert changed == CHANGED


def test_the_changes_are_those_of_their_names(arms: dict[str, Arm]) -> None:
    choices = {name: arm.choices for name, arm in arms.items()}
    assert [choices[f"data-1/{parts}"].share for parts in (2, 4, 8)] == [0.5, 0.25, 0.125]
    assert choices["answers-greedy"].answers == "greedy"
    assert choices["answers-drawn"].answers == "drawn"
    assert choices["answers-drawn"].share == 0.5
    assert choices["decay-none"].decay == 0
    assert choices["decay-3"].decay == 3
    assert choices["layers-2"].layers == 2
    assert choices["taps-1"].taps == (29,)
    assert choices["taps-2"].taps == (1, 27)
    assert choices["taps-3"].taps == (1, 14, 27)
    assert choices["taps-late"].taps == (25, 26, 27, 28, 29)
    assert choices["block-8"].block_size == 8
    assert choices["adamw"].muon_rate == 0
    assert choices["seed"].seed == BASE.seed + 1


def test_thinner_layers_hold_as_many_weights(arms: dict[str, Arm]) -> None:
    thin = arms["layers-6-thin"].choices
    assert thin.intermediate_size is not None

    def weights(layers: int, width: int) -> int:
        return layers * (DEMO.attention_size + 3 * DEMO.hidden_size * width)

    assert 0.95 < weights(thin.layers, thin.intermediate_size) / weights(4, 1536) <= 1


def test_on_a_small_target_no_arm_repeats_another() -> None:
    tiny = TargetSizes(layers=3, hidden_size=32, intermediate_size=64, attention_size=3072)
    arms = make_arms(Choices(spread_taps(3, 5), layers=1, block_size=8, decay=3.0), tiny)
    choices = [arm.choices for arm in arms]
    assert all(one not in choices[:place] for place, one in enumerate(choices))
    assert not {"decay-3", "layers-1", "taps-2"} & {arm.name for arm in arms}
    assert all(max(one.taps) < 3 for one in choices)


def test_chosen_arms_come_with_those_they_are_compared_with(arms: dict[str, Arm]) -> None:
    chosen = choose_arms(list(arms.values()), ["adamw", "answers-drawn"])
    assert [arm.name for arm in chosen] == ["baseline", "data-1/2", "answers-drawn", "adamw"]
    assert choose_arms(list(arms.values()), ["answers-drawn", "adamw"]) == chosen
    assert choose_arms(list(arms.values()), []) == list(arms.values())


def test_an_unknown_arm_is_refused_with_those_there_are(arms: dict[str, Arm]) -> None:
    with pytest.raises(InvalidArgument, match=r"'layers-9'; choose from baseline, seed, data-1/2"):
        choose_arms(list(arms.values()), ["layers-9"])
