"""Rules that hold between a draft and its target, and how the broken ones are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig, PretrainedConfig

from ddtree.errors import CheckpointError
from ddtree.models.draft_config import DraftConfig
from ddtree.models.pairing import Check, Verdict, pair_checks, refuse_failures
from tests.fakes.random_draft import config_values, dflash2_values

PATH = Path("draft/config.json")


def target(**changes: Any) -> LlamaConfig:
    values = {
        "hidden_size": 32,
        "num_hidden_layers": 8,
        "vocab_size": 50,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rope_theta": 5000.0,
    }
    return LlamaConfig(**{**values, **changes})


def checks_of(draft: dict[str, Any], against: PretrainedConfig) -> tuple[Check, ...]:
    return pair_checks(DraftConfig.from_values(draft), against)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "expected the target's hidden_size 64, found 32"),
        ({"num_hidden_layers": 9}, "expected num_target_layers 9, the target's layer count, found 8"),
        ({"num_hidden_layers": 5}, "expected num_target_layers 5, the target's layer count, found 8"),
        ({"vocab_size": 49}, "expected a mask_token_id below the target's vocabulary of 49, found 49"),
        ({"eos_token_id": [2, 49]}, "padding and end tokens [0, 2, 49], found 49"),
        ({"pad_token_id": 49}, "padding and end tokens [2, 49], found 49"),
    ],
)
def test_a_draft_for_another_target_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        refuse_failures(checks_of(config_values(), target(**changes)), PATH)
    said = str(error.value.args[0])
    assert message in said
    assert said.startswith("draft/config.json: expected ")
    assert "\n" not in said


def test_a_draft_fits_its_target() -> None:
    for fitting in (target(), target(eos_token_id=None, pad_token_id=None)):
        checks = checks_of(config_values(), fitting)
        assert {check.verdict for check in checks} == {Verdict.OK}
        assert refuse_failures(checks, PATH) == ()


def test_a_rope_base_that_disagrees_is_told_and_served() -> None:
    (warning,) = refuse_failures(checks_of(config_values(), target(rope_theta=1e6)), PATH)
    assert (
        "expected the target's rope_theta 1e+06, found 5000; if the draft was not trained"
        in warning.message(PATH)
    )
    layered = Gemma3TextConfig(
        hidden_size=32, num_hidden_layers=8, vocab_size=50, eos_token_id=2, pad_token_id=0,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    )  # fmt: skip
    assert refuse_failures(checks_of(config_values(), layered), PATH) == ()


def test_a_vocabulary_that_disagrees_matters_where_the_draft_has_tables() -> None:
    (warning,) = refuse_failures(checks_of(config_values(), target(vocab_size=64)), PATH)
    assert "expected the target's vocab_size 64, found 50" in warning.message(PATH)
    with pytest.raises(CheckpointError, match="expected the target's vocab_size 64, found 50"):
        refuse_failures(checks_of(dflash2_values(), target(vocab_size=64)), PATH)
