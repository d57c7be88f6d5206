"""What the stages are asked for is what their messages hold and their configurations declare."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_type_hints

import pytest

from ddtree.stages.bls import OUTPUTS, BlsStages
from ddtree.wire import names

MODELS = {
    "target_verifier": ("prefill", "verify", "read_features"),
    "drafter": ("draft",),
    "tree_builder": ("build_tree",),
}
ASKED = [(model, operation) for model, operations in MODELS.items() for operation in operations]


def test_every_operation_is_asked() -> None:
    assert set(OUTPUTS) == {"describe", "release", *(operation for _, operation in ASKED)}


@pytest.mark.parametrize(("model", "operation"), ASKED)
def test_all_of_a_message_is_asked_for_and_declared(model: str, operation: str, project_root: Path) -> None:
    config = (project_root / "model_repository" / model / "config.pbtxt").read_text()
    inputs, outputs = (
        set(re.findall(r'name: "(\w+)"', config.partition(f"{side} [")[2].partition("\n]")[0]))
        for side in ("input", "output")
    )
    hints = get_type_hints(getattr(BlsStages, operation))
    assert set(OUTPUTS[operation]) == {*names(hints["return"]), "stage_ms"}
    assert set(OUTPUTS[operation]) <= outputs
    assert {*names(hints["request"]), "op"} <= inputs
