"""What the stages are asked for is what their messages hold and their configurations declare."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

from ddtree.errors import Unavailable
from ddtree.events import Event, StageCalled
from ddtree.stages.bls import OUTPUTS, BlsStages, read_info
from ddtree.tree import build_trees
from ddtree.types import (
    DrafterInfo,
    FeatureRequest,
    FeatureResult,
    SessionBatch,
    TreeRequest,
    Usage,
    VerifierInfo,
)
from ddtree.wire import Arrays, encode, names

MODELS = {
    "target_verifier": ("prefill", "verify", "read_features"),
    "drafter": ("draft",),
    "tree_builder": ("build_tree",),
}
ASKED = [(model, operation) for model, operations in MODELS.items() for operation in operations]


def declared(project_root: Path, model: str) -> tuple[set[str], set[str]]:
    """The names of a model's inputs and outputs."""
    config = (project_root / "model_repository" / model / "config.pbtxt").read_text()
    inputs, outputs = (
        set(re.findall(r'name: "(\w+)"', config.partition(f"{side} [")[2].partition("\n]")[0]))
        for side in ("input", "output")
    )
    return inputs, outputs


def test_every_operation_is_asked() -> None:
    told = {"channel", "describe", "release", "probe"}
    assert set(OUTPUTS) == told | {operation for _, operation in ASKED}


@pytest.mark.parametrize("model", MODELS)
def test_every_stage_can_tell_its_channel(model: str, project_root: Path) -> None:
    inputs, outputs = declared(project_root, model)
    assert "op" in inputs
    assert set(OUTPUTS["channel"]) <= outputs
    parameters = (project_root / "model_repository" / model / "config.pbtxt").read_text()
    assert '"stage_calls"' in parameters


@pytest.mark.parametrize(("model", "operation"), ASKED)
def test_all_of_a_message_is_asked_for_and_declared(model: str, operation: str, project_root: Path) -> None:
    inputs, outputs = declared(project_root, model)
    hints = get_type_hints(getattr(BlsStages, operation))
    assert set(OUTPUTS[operation]) == {*names(hints["return"]), "stage_ms"}
    assert set(OUTPUTS[operation]) <= outputs
    assert {*names(hints["request"]), "op"} <= inputs


def test_what_references_need_is_declared(project_root: Path) -> None:
    for model, needed in (("target_verifier", "by_reference"), ("drafter", "context_features")):
        inputs, outputs = declared(project_root, model)
        assert needed in inputs
        assert set(OUTPUTS["probe"]) <= outputs


VERIFIER = VerifierInfo(8, 64, 4, 64, 2, "float32", "same", (1,), (1.0,), Usage(0, 0, 1))
DRAFTER = DrafterInfo(4, "same", 1.0, Usage(0, 0, 1))
ROWS, REFERENCES = np.full((4, 8), 3, np.uint8), np.full((4, 32), 7, np.uint8)


class Told:
    """Stages that say what they are told to; what the drafter reads by reference is `read`."""

    def __init__(self, verifier: str, drafter: str, read: np.ndarray[Any, Any] | None) -> None:
        self.shares = {"target_verifier": verifier, "drafter": drafter}
        self.read = read
        self.calls: list[tuple[str, str, list[str]]] = []

    async def __call__(self, model: str, operation: str, arrays: Arrays) -> Mapping[str, Any]:
        self.calls.append((model, operation, sorted(arrays)))
        if operation == "describe":
            info = VERIFIER if model == "target_verifier" else DRAFTER
            told = json.dumps(asdict(replace(info, shares=self.shares[model])))
            return {"info": np.array([told.encode()], dtype=np.object_)}
        if operation == "probe" and model == "drafter":
            assert arrays["context_features"] is not None
            if self.read is None:
                raise Unavailable("none of them can be reached")
            return {"context_features": self.read}
        if operation == "probe":
            return {"context_features": REFERENCES if "by_reference" in arrays else ROWS}
        return encode(FeatureResult(torch.zeros(1, dtype=torch.int32), torch.zeros((1, 2))))

    async def takes_references(self, stages: BlsStages) -> bool:
        """Whether the verifier is told that references are taken."""
        number = torch.zeros(1, dtype=torch.int32)
        request = FeatureRequest(SessionBatch(number.long(), number, number), number, number)
        await stages.read_features(request)
        return "by_reference" in self.calls[-1][2]

    @property
    def probes(self) -> int:
        return sum(operation == "probe" for _, operation, _ in self.calls)


@pytest.mark.parametrize(
    ("verifier", "drafter", "read", "wanted"),
    [
        ("cuda a", "cuda a", ROWS, True),
        ("cuda a", "cuda b", ROWS, False),
        ("", "", ROWS, False),
        ("cpu", "", ROWS, False),
        ("cpu", "cpu", ROWS + 1, False),
        ("cpu", "cpu", ROWS[:3], False),
        ("cpu", "cpu", None, False),
    ],
)
async def test_references_are_taken_where_the_drafter_reads_what_the_verifier_keeps(
    verifier: str, drafter: str, read: np.ndarray[Any, Any] | None, *, wanted: bool
) -> None:
    told = Told(verifier, drafter, read)
    stages = BlsStages(told)
    await stages.describe()
    assert await told.takes_references(stages) == wanted


@pytest.mark.parametrize("read", [None, ROWS + 1])
async def test_stages_whose_try_failed_are_tried_again_and_not_for_ever(
    read: np.ndarray[Any, Any] | None,
) -> None:
    """One that was busy at that very moment was never asked again."""
    told = Told("cpu", "cpu", read)
    stages = BlsStages(told)
    await stages.describe()
    assert not await told.takes_references(stages)
    told.read = ROWS
    await stages.describe()
    assert await told.takes_references(stages)
    assert told.probes == 6

    never = Told("cpu", "cpu", read)
    stages = BlsStages(never)
    for _ in range(200):
        await stages.describe()
    assert never.probes == 6 * 3
    never.shares["drafter"] = never.shares["target_verifier"] = "cuda a"
    await stages.describe()
    never.read = ROWS
    await stages.describe()
    assert await never.takes_references(stages)


async def test_trees_are_built_here_where_that_is_wanted() -> None:
    """The same trees, and no call."""
    request = TreeRequest(
        top_ids=torch.tensor([[[5, 6], [7, 8]]], dtype=torch.int32),
        top_log_probs=torch.tensor([[[-0.1, -2.5], [-0.2, -1.8]]]),
        budgets=torch.tensor([3], dtype=torch.int32),
        is_chain=torch.tensor([False]),
        round_cost_ms=torch.zeros(0),
    )

    async def refuse(model: str, operation: str, _: Arrays) -> Arrays:
        raise AssertionError(f"{model} was asked to {operation}")

    heard: list[Event] = []
    trees = await BlsStages(refuse, heard.append, builds_trees=True).build_tree(request)
    wanted = build_trees(request)
    assert trees.counts.tolist() == [3]
    for field in ("tokens", "parents", "depths", "counts"):
        assert torch.equal(getattr(trees, field), getattr(wanted, field))
    (called,) = heard
    assert isinstance(called, StageCalled)
    assert (called.stage, called.operation) == ("tree_builder", "build_tree")
    assert called.seconds == called.work_seconds > 0


def test_what_an_older_stage_does_not_say_is_as_it_was() -> None:
    values = asdict(replace(VERIFIER, takes_all_cores=True))
    assert read_info(VerifierInfo, values).takes_all_cores
    del values["takes_all_cores"]
    assert read_info(VerifierInfo, values) == VERIFIER
    del values["vocab_size"]
    with pytest.raises(TypeError, match="vocab_size"):
        read_info(VerifierInfo, values)


async def test_stages_are_tried_once_and_again_when_they_say_something_else() -> None:
    told = Told("cpu", "cpu", ROWS)
    stages = BlsStages(told)
    for _ in range(3):  # the metrics ask again and again
        await stages.describe()
    assert told.probes == 3
    told.shares["target_verifier"] = ""  # loaded again with another setting
    await stages.describe()
    assert not await told.takes_references(stages)
    told.shares["target_verifier"] = "cpu"
    await stages.describe()
    assert await told.takes_references(stages)
    assert told.probes == 6
