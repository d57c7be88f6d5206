"""What is made of loaded stages on a GPU, tried on a CPU: each process gets what its stages can use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree import assembly, staging
from ddtree.config import ServingConfig
from ddtree.device import accelerate, attend, keeping, load_check
from ddtree.device.load_check import _prompt
from ddtree.device.loading import Acceleration
from ddtree.device.matmul_choice import SmallLinear
from ddtree.draft import Drafter
from ddtree.models.target import TargetModel
from ddtree.stages.in_process import InProcessStages
from ddtree.types import (
    DraftRequest,
    PrefillRequest,
    SessionBatch,
    TreeBatch,
    VerifyRequest,
    VerifyResult,
)
from tests.fakes.pipeline import GreedyReference
from tests.fakes.plain_kernels import in_place_of_kernels
from tests.fakes.plain_kernels import tree_attention as plain_attention
from tests.fakes.scripted_draft import Script, ScriptedDrafter
from tests.fakes.tiny_models import make_draft, make_target

PROMPT = [72, 101, 108, 108, 111]


@pytest.fixture(scope="module", autouse=True)
def plain_kernels() -> Iterator[None]:
    with in_place_of_kernels(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerate, "fuse", lambda *_: 0)  # has tests of its own, in the interpreter
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServingConfig:
    folder = tmp_path_factory.mktemp("pair")
    return ServingConfig(
        make_target(folder / "target"), make_draft(folder / "draft"), dtype="float32", device="cpu",
        page_size=16, kv_cache_mib=2, draft_kv_cache_mib=1, max_sequences=2, max_nodes=15, max_step_nodes=16,
    )  # fmt: skip


@pytest.fixture
def stages(config: ServingConfig) -> InProcessStages:
    loaded = assembly.load_in_process(config)
    loaded.drafter.__class__ = ScriptedDrafter
    assert isinstance(loaded.drafter, ScriptedDrafter)
    loaded.drafter.script = Script([*PROMPT, *range(100, 200), *[0] * 400], noise=0.0)
    return loaded


def accelerated(config: ServingConfig, target: TargetModel) -> Acceleration:
    fast = Acceleration(config, target.device, depth=7)
    fast.take_target(target)
    return fast


def target_of(stages: InProcessStages) -> TargetModel:
    target = stages.verifier.target
    assert isinstance(target, TargetModel)
    return target


def test_both_stages_get_steps_drafts_and_rounds(config: ServingConfig, stages: InProcessStages) -> None:
    fast = accelerated(config, target_of(stages))
    assert isinstance(stages.drafter, Drafter)
    rounds = fast.finish(stages.verifier, stages.drafter)
    assert rounds is not None
    assert rounds.sizes.places == (1, 2)
    assert rounds.sizes.nodes == (0, 7, 15)
    assert set(rounds.sizes.ms) == {(1, 0), (1, 7), (1, 15), (2, 0), (2, 7)}  # at most 16 nodes a step
    assert isinstance(target_of(stages).head, SmallLinear)
    info = stages.verifier.info()
    assert info.cost_rows == (1, 8, 16)
    assert info.usage.pages_used == stages.drafter.usage().pages_used == 0


def test_a_gpu_is_left_as_it_is_where_graphs_are_off(config: ServingConfig) -> None:
    """Nothing of the device is asked for: there is none here."""
    assert config.cuda_graphs
    assert (
        assembly._acceleration(
            replace(config, cuda_graphs=False), assembly._open_draft(config), torch.device("cuda")
        )
        is None
    )


def test_a_verifier_alone_verifies_through_its_steps(config: ServingConfig, stages: InProcessStages) -> None:
    """The same verdict as before, for trees that fit a size and for one that fits none.

    A chain as deep as a drafter makes it goes through a captured call, and no step of its own is seen.
    """
    before = [verdict(stages, nodes) for nodes in (5, 15, 20)]
    assert accelerated(config, target_of(stages)).finish(stages.verifier, None) is None
    steps = stages.verifier._steps
    assert steps is not None
    served: list[int] = []
    stages.verifier._steps = Watched(steps, served)  # type: ignore[assignment]
    after = [verdict(stages, nodes) for nodes in (5, 15, 20)]
    as_chains = len(PROMPT) - 1  # what prompts are read as
    assert [nodes for nodes in served if nodes not in (0, as_chains)] == [15]
    assert stages.verifier._calls is not None
    assert as_chains in served
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old)


class Watched:
    """Notes the trees that were staged by steps."""

    def __init__(self, steps: object, served: list[int]) -> None:
        self._steps, self._served = steps, served

    def rows(self, sequences: int, nodes: int) -> int | None:
        found: int | None = self._steps.rows(sequences, nodes)  # type: ignore[attr-defined]
        return found

    def stage(self, sessions: object, trees: TreeBatch, roots: object) -> object:
        staged = self._steps.stage(sessions, trees, roots)  # type: ignore[attr-defined]
        if staged is not None:
            self._served.append(trees.tokens.shape[1])
        return staged


def verdict(stages: InProcessStages, nodes: int) -> list[torch.Tensor]:
    """What becomes of a chain of some nodes, of which the first two are right."""
    root, right = open_session(stages), list[int]()
    for _ in range(2):
        length, token = len(PROMPT) + len(right), right[-1] if right else root
        right.append(int(verify(stages, length, token, TreeBatch.empty(1)).bonus_tokens[0]))
    root = open_session(stages)
    order = torch.arange(nodes, dtype=torch.int32)[None]
    tokens = torch.tensor([[*right, *range(nodes - 2)]], dtype=torch.int32)
    chain = TreeBatch(tokens, order, order + 1, torch.tensor([nodes], dtype=torch.int32))
    found = verify(stages, len(PROMPT), root, chain)
    stages.verifier.release([1])
    assert int(found.accepted_counts[0]) >= 2
    return [found.accepted_tokens[:, :2], found.accepted_counts, found.bonus_tokens, found.features]


def open_session(stages: InProcessStages) -> int:
    """Let the verifier read the prompt anew; gives the root token."""
    stages.verifier.release([1])
    ids, zero = torch.tensor(PROMPT, dtype=torch.int32), torch.tensor([0])
    one = SessionBatch(torch.tensor([1]), zero, zero)
    read = stages.verifier.prefill(PrefillRequest(one, ids, torch.tensor([len(ids)]), torch.tensor([64])))
    return int(read.next_tokens[0])


def verify(stages: InProcessStages, length: int, root: int, trees: TreeBatch) -> VerifyResult:
    one = SessionBatch(torch.tensor([1]), torch.tensor([0]), torch.tensor([length]))
    return stages.verifier.verify(VerifyRequest(one, torch.tensor([root], dtype=torch.int32), trees))


def test_a_drafter_alone_drafts_through_its_passes(config: ServingConfig, stages: InProcessStages) -> None:
    """What its script says comes back, at the depth and width that were asked for."""
    assert isinstance(stages.drafter, Drafter)
    assert Acceleration(config, torch.device("cpu"), depth=7).finish(None, stages.drafter) is None
    ints = torch.tensor
    count, lives = len(PROMPT) - 1, 2
    batch = SessionBatch(ints([1, 2]), ints([0] * lives), ints([0] * lives))
    context = torch.tensor(PROMPT[:-1] * lives, dtype=torch.int32)
    features = torch.zeros((count * lives, 32))
    roots = torch.tensor([PROMPT[-1]] * lives, dtype=torch.int32)
    asked = DraftRequest(batch, context, features, ints([count] * lives), roots, ints([64] * lives), 5, 3)
    drafted = stages.drafter.draft(asked)
    assert drafted.top_ids.shape == (lives, 5, 3)
    assert drafted.top_ids[:, :, 0].tolist() == [list(range(100, 105))] * lives
    assert bool((drafted.top_log_probs[:, :, :1] > drafted.top_log_probs[:, :, 1:]).all())
    stages.drafter.release([1, 2])


@pytest.mark.parametrize("nodes", [7, 15])
def test_steps_that_are_off_are_not_used(
    config: ServingConfig, stages: InProcessStages, caplog: pytest.LogCaptureFixture, nodes: int
) -> None:
    """A kernel that loses rows' sight of ancestors in one size: all go on without, and it is said why."""

    def blind_there(*args: Any, **options: Any) -> torch.Tensor:
        return (blind if args[5].rows == nodes + 1 else plain_attention)(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend, "attend_to_tree", blind_there)
        assert accelerated(config, target_of(stages)).finish(stages.verifier, stages.drafter) is None  # type: ignore[arg-type]
    assert stages.verifier._steps is None
    assert f"logits of a captured step of {nodes} nodes are off by" in caplog.text
    assert stages.verifier.usage().sessions == stages.verifier.usage().pages_used == 0


@pytest.mark.parametrize(("what", "broken"), [("logits", "store"), ("features", "projection")])
def test_prompts_that_are_read_wrong_are_noticed(
    config: ServingConfig,
    stages: InProcessStages,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    broken: str,
) -> None:
    """Keys that are stored nowhere, and taps of other rows: steps over trees show neither."""
    if broken == "store":
        monkeypatch.setattr(attend, "store", lambda *_: None)
    else:
        monkeypatch.setattr(load_check, "read_prepared", tapped_elsewhere)
    assert accelerated(config, target_of(stages)).finish(stages.verifier, None) is None
    assert stages.verifier._steps is None
    assert f"{what} of a prompt that a captured step reads are off by" in caplog.text


def tapped_elsewhere(*arguments: Any) -> staging.Read:
    read = staging.read_prepared(*arguments)
    assert read is not None
    assert read.rows is not None
    return replace(read, rows=read.rows.roll(1))


def blind(*args: Any, **options: Any) -> torch.Tensor:
    rows = args[5]
    own = replace(rows, bits=torch.ones_like(rows.bits) << torch.arange(rows.rows)[None, :, None])
    query, keys, values, pool_keys, pool_values, _, sight, scoring = args
    return plain_attention(query, keys, values, pool_keys, pool_values, own, sight, scoring, **options)


def test_rounds_that_leave_rows_where_they_are_are_not_used(
    config: ServingConfig, stages: InProcessStages, caplog: pytest.LogCaptureFixture
) -> None:
    """The accepted path's keys are not moved: the step after the round shows it."""
    fast = accelerated(config, target_of(stages))
    assert isinstance(stages.drafter, ScriptedDrafter)
    stages.drafter.script = Script(made_up_text(stages), noise=0.9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeping, "commit_rows", lambda *_: None)
        assert fast.finish(stages.verifier, stages.drafter) is None
    assert stages.verifier._steps is not None
    assert "logits of the step after some rounds are off by" in caplog.text
    assert stages.drafter.usage().sessions == stages.verifier.usage().sessions == 0


def made_up_text(stages: InProcessStages) -> list[int]:
    """The prompt that is tried at load, and how the target goes on from it."""
    ids: list[int] = _prompt(stages.verifier).tolist()
    model = GreedyReference(Path(target_of(stages).model.name_or_path)).model
    with torch.inference_mode():
        for _ in range(40):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return [*ids, *[0] * 400]
