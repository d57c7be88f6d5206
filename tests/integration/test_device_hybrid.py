"""Targets with recurrent layers on the device's way: captured steps, whole rounds, and the engine over them.

What the general way gives is given here too, whatever stands in empty places and padding rows; and after many
rounds caches and recurrent states hold what reading everything at once leaves there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree import assembly
from ddtree.config import ServingConfig
from ddtree.device import accelerate, loading
from ddtree.device.buffers import StepSize
from ddtree.device.loading import Preparation
from ddtree.device.messages import RoundRequest
from ddtree.device.steps import TargetSteps, sizes_for
from ddtree.hybrid_cache import HybridPool
from ddtree.models.target import TargetModel
from ddtree.params import DraftMode
from ddtree.sessions import Session
from ddtree.stages.in_process import InProcessStages
from ddtree.staging import stage
from ddtree.types import AUTO_BUDGET, SessionBatch, TreeBatch, VerifyRequest
from tests.fakes.device_stages import Rounds, engine_over, open_both, scripted_stages
from tests.fakes.hybrid_families import make_hybrid
from tests.fakes.hybrid_runner import PlainTarget
from tests.fakes.pipeline import generate_all
from tests.fakes.plain_kernels import in_place_of_kernels
from tests.fakes.random_trees import depths_of, random_parents
from tests.fakes.scripted_draft import Script
from tests.fakes.target_families import LAYERS
from tests.fakes.tiny_models import make_draft
from tests.integration.test_device_rounds import request

# One sequence drafts in room for three, so places are empty; the engine lets it take the general way.
ints = partial(torch.tensor, dtype=torch.int32)
SIZES = (StepSize(1, 0), *(StepSize(3, nodes) for nodes in (0, 3, 12)))
TEXT, TOKENS, CONTEXT = 300, 24, 440
LAST = 200  # rounds end behind this token


@pytest.fixture(scope="module", params=["qwen3-next", "qwen3.5"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("hybrid")
    draft = make_draft(folder / "draft", num_target_layers=LAYERS)
    return make_hybrid(folder / "target", request.param), draft


@pytest.fixture(scope="module")
def text(pair: tuple[Path, Path]) -> list[int]:
    """How transformers' own target goes on from one byte, end tokens or not."""
    model = PlainTarget(pair[0]).model
    ids = model.generate(
        torch.tensor([[72]]), max_new_tokens=TEXT - 1, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return [int(token) for token in ids[0]]


@pytest.fixture(scope="module", autouse=True)
def plain_kernels() -> Iterator[None]:
    with in_place_of_kernels():
        yield


@pytest.fixture(scope="module")
def script(text: list[int]) -> Script:
    return Script(text)


@pytest.fixture(scope="module")
def stages(pair: tuple[Path, Path], script: Script) -> InProcessStages:
    config = ServingConfig(
        *pair, dtype="float32", device="cpu", page_size=16, kv_cache_mib=4, draft_kv_cache_mib=4,
        state_cache_mib=2, max_nodes=16, max_step_nodes=48, max_sequences=3,
    )  # fmt: skip
    return scripted_stages(config, script, Preparation(SIZES, CONTEXT, config.max_nodes, repeats=1))


def test_steps_are_prepared_for_what_the_stash_holds(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where states leave room for few rows, only smaller batches of large trees are captured."""
    for name in ("fuse", "fuse_norms"):  # which have tests of their own, in the interpreter
        monkeypatch.setattr(accelerate, name, lambda *_: 0)
    config = ServingConfig(
        *pair, dtype="float32", device="cpu", page_size=16, kv_cache_mib=2, draft_kv_cache_mib=1,
        state_cache_mib=1, max_nodes=64, max_step_nodes=512, max_sequences=8,
    )  # fmt: skip
    verifier = assembly.load_in_process(config).verifier
    assert isinstance(verifier.target, TargetModel)
    fast = loading.Acceleration(config, verifier.target.device, depth=7)
    fast.take_target(verifier.target)
    assert fast.finish(verifier, None) is None
    steps, most_rows = verifier._steps, verifier.pool.most_rows
    assert isinstance(steps, TargetSteps)
    assert most_rows is not None
    largest = {size.places: size.nodes for size in steps.sizes}
    assert len(steps.sizes) == sum(size.rows <= most_rows for size in sizes_for(8, 64, 512)) < 24
    assert largest[1] == 64
    assert 0 < largest[8] < 64


def pool_of(stages: InProcessStages) -> HybridPool:
    pool = stages.verifier.pool
    assert isinstance(pool, HybridPool)
    return pool


def session_of(stage_: Any, session_id: int) -> Session:
    found: list[Session] = [session for session in stage_.sessions if session.session_id == session_id]
    return found[0]


def state_of(stages: InProcessStages, session_id: int) -> list[torch.Tensor]:
    """Matrices and convolution tails of all layers."""
    pool = pool_of(stages)
    state = pool.state_of(session_of(stages.verifier, session_id).pages)
    return [pool.states.matrices[:, state], pool.states.tails[:, state]]


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Off by how much of the largest value."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1))


def random_trees(
    source: random.Random, sizes: Sequence[int], starts: Sequence[int], text: Sequence[int]
) -> TreeBatch:
    """Trees of so many nodes each; the first child of every node goes on as the text does."""
    tokens, parents, depths = (torch.zeros((len(sizes), max(sizes)), dtype=torch.int32) for _ in range(3))
    for place, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        above, met = random_parents(source, size, reach=3), set()
        for node, (parent, depth) in enumerate(zip(above, depths_of(above)[1:], strict=True)):
            token = text[start + depth]
            while (parent, token) in met:
                token = source.randrange(256)
            met.add((parent, token))
            tokens[place, node], parents[place, node], depths[place, node] = token, parent, depth
    return TreeBatch(tokens, parents, depths, torch.tensor(sizes, dtype=torch.int32))


def test_a_captured_step_is_the_general_one(stages: InProcessStages, text: list[int]) -> None:
    """Three sequences with trees of their own, then two of them in other places: logits, then the commits."""
    source, verifier, accepted = random.Random(0), stages.verifier, list[int]()
    lengths = {1: 1, 2: 20, 3: 41}
    for session_id, length in lengths.items():
        open_both(stages, session_id, text[: length + 1])
    steps = verifier._steps
    assert isinstance(steps, TargetSteps)
    target = verifier.target
    assert isinstance(target, TargetModel)
    states = pool_of(stages).states
    before = states.matrices.clone(), states.tails.clone()
    for order, sizes in (((1, 2, 3), (0, 11, 4)), ((3, 1), (12, 7)), ((2,), (5,)), ((1,), (0,))):
        sessions = [session_of(verifier, one) for one in order]
        roots = [text[lengths[one]] for one in order]
        trees = random_trees(source, sizes, [lengths[one] for one in order], text)
        general = stage(target, verifier.pool, sessions, trees, roots)
        expected = general.step.logits.clone()
        staged = steps.stage(sessions, trees, roots)
        assert staged is not None
        for place, size in enumerate(sizes):
            found = staged.step.logits[staged.starts[place] :][: size + 1]
            assert far(found, expected[general.starts[place] :][: size + 1]) <= 1e-5
        assert torch.isfinite(staged.step.logits).all(), "padding stays finite"
        batch = SessionBatch(
            torch.tensor(order), ints([0] * len(order)), ints([lengths[one] for one in order])
        )
        result = verifier.verify(VerifyRequest(batch, ints(roots), trees))  # by such a step again
        assert not result.status.any()
        for one, took in zip(order, result.accepted_counts.tolist(), strict=True):
            lengths[one] += took + 1
            accepted.append(took)
    assert 0 in accepted
    assert max(accepted) >= 2
    taken = {pool_of(stages).state_of(session.pages) for session in verifier.sessions}
    for was, now in zip(before, (states.matrices, states.tails), strict=True):
        others = [state for state in range(was.shape[1]) if state not in taken]
        assert torch.equal(was[:, others], now[:, others]), "a state that nobody holds was written"
    compare_with_reading(stages, [verifier], lengths, text)
    stages.verifier.release([*lengths])
    stages.drafter.release([*lengths])


def compare_with_reading(
    stages: InProcessStages, caches: Sequence[Any], lengths: dict[int, int], text: Sequence[int]
) -> None:
    """Caches of these stages, and states, against those of sessions that read the same ids at once."""
    for session_id, length in lengths.items():
        fresh = 10 + session_id
        open_both(stages, fresh, text[: length + 1])
        for after, read in zip(state_of(stages, session_id), state_of(stages, fresh), strict=True):
            assert far(after, read) <= 2e-5
        for stage_ in caches:
            for tensor, axis in ((stage_.pool.keys_values, 2), (stage_.pool.features, 0)):
                after, read = (
                    tensor.index_select(axis, session_of(stage_, one).pages.slots[:length])
                    for one in (session_id, fresh)
                )
                torch.testing.assert_close(after, read, rtol=1e-4, atol=5e-5)
        for stage_ in (stages.verifier, stages.drafter):
            stage_.release([fresh])


def test_many_rounds_leave_what_reading_everything_leaves(
    stages: InProcessStages, text: list[int], script: Script
) -> None:
    """Every kind of acceptance; sequences change places and pause, so that empty places hold live states."""
    source = random.Random(1)
    lengths, rounds, accepted = {1: 2, 2: 17, 3: 30}, 0, []
    for session_id, start in lengths.items():
        open_both(stages, session_id, text[: start + 1])
    while live := [one for one, length in lengths.items() if length < LAST]:
        script.noise = (0.02, 0.4, 0.8)[rounds % 3]
        live = source.sample(live, source.randint(1, len(live)))
        count = len(live)
        batch = SessionBatch(torch.tensor(live), ints([0] * count), ints([lengths[s] for s in live]))
        budgets = ints([(3, 12, 0)[(rounds + s) % 3] for s in live])
        is_chain = torch.tensor([rounds % 4 == 0] * count)
        roots = ints([text[lengths[s]] for s in live])
        asked = RoundRequest(batch, ints([0] * count), roots, budgets, ints([7] * count), is_chain, 12)
        assert stages._rounds is not None
        result = stages._rounds.run(asked)
        assert not result.status.any()
        assert not result.draft_status.any()
        for place, one in enumerate(live):
            took, start = int(result.accepted_counts[place]), lengths[one] + 1
            assert result.accepted_tokens[place, :took].tolist() == text[start : start + took]
            assert int(result.bonus_tokens[place]) == text[start + took]
            lengths[one] += took + 1
            accepted.append(took)
        rounds += 1
    assert rounds > 60
    assert {0, 1, 2, 3, 4, 7} <= set(accepted)
    compare_with_reading(stages, [stages.verifier, stages.drafter], lengths, text)
    stages.verifier.check_integrity()
    for stage_ in (stages.verifier, stages.drafter):
        stage_.release([*lengths])


async def test_the_engine_gives_the_targets_own_tokens(
    stages: InProcessStages, pair: tuple[Path, Path], text: list[int], script: Script
) -> None:
    """Alone and together, by tree, chain and not at all; prompts begin alike and share their prefix."""
    script.noise = 0.4
    kinds: list[tuple[int, DraftMode, int]] = [
        (50, "tree", 12), (50, "chain", 3), (17, "tree", AUTO_BUDGET), (60, "off", AUTO_BUDGET),
        (65, "tree", 2),
    ]  # fmt: skip
    requests = [request(text, *kind, max_tokens=TOKENS) for kind in kinds]
    rounds = Rounds()
    async with engine_over(stages, pair[0], rounds) as engine:
        for params in requests[:2]:
            (sink,) = await generate_all(engine, [params])
            assert sink.token_ids == text[len(params.prompt_ids) :][:TOKENS]
        sinks = await generate_all(engine, requests)
    for params, sink in zip(requests, sinks, strict=True):
        assert sink.token_ids == text[len(params.prompt_ids) :][:TOKENS]
    assert any(len(done.batch) == 3 for done in rounds)
    assert sum(sum(done.tree_sizes) for done in rounds) > 0
