"""Verify calls that are captured with what follows the step, held to the general way on equal sessions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from ddtree import assembly, verify_batch
from ddtree.config import ServingConfig
from ddtree.device import keeping
from ddtree.device.buffers import StepSize
from ddtree.device.graphs import GraphMaker
from ddtree.device.load_check import Misfit
from ddtree.device.loading import Preparation, prepare_steps
from ddtree.device.steps import sizes_for
from ddtree.device.verify_calls import KeptPaths, VerifyCalls
from ddtree.models.target import TargetModel
from ddtree.sampling_spec import SamplingSpec
from ddtree.types import (
    FeatureRequest,
    PrefillRequest,
    SessionBatch,
    Status,
    TreeBatch,
    VerifyRequest,
    VerifyResult,
)
from ddtree.verify import TargetVerifier
from tests.fakes.plain_kernels import in_place_of_kernels
from tests.fakes.random_trees import depths_of, random_parents
from tests.fakes.tiny_models import make_draft, make_target

PROMPTS = ([72, 101, 108, 108, 111], [5, 6, 7])
NODES, DEPTH = 12, 4
CAPTURED, GENERAL, NOBODY = (1, 2), (3, 4), 9


@pytest.fixture(scope="module", autouse=True)
def plain_kernels() -> Iterator[None]:
    with in_place_of_kernels():
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServingConfig:
    folder: Path = tmp_path_factory.mktemp("pair")
    return ServingConfig(
        make_target(folder / "target"), make_draft(folder / "draft"), dtype="float32", device="cpu",
        page_size=16, kv_cache_mib=2, draft_kv_cache_mib=1, max_sequences=2, max_nodes=15, max_step_nodes=32,
    )  # fmt: skip


def prepare(config: ServingConfig, sizes: tuple[StepSize, ...] = sizes_for(2, 15, 32)) -> TargetVerifier:
    verifier = assembly.load_in_process(config).verifier
    target = verifier.target
    assert isinstance(target, TargetModel)
    wanted = Preparation(sizes, target.context_length, config.max_nodes, depth=DEPTH, repeats=1)
    prepare_steps(verifier, target, wanted, GraphMaker(target.device))
    return verifier


@pytest.fixture(scope="module")
def verifier(config: ServingConfig) -> TargetVerifier:
    return prepare(config)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def batch(ids: tuple[int, ...], lengths: list[int]) -> SessionBatch:
    return SessionBatch(torch.tensor(ids), ints(*[0] * len(ids)), ints(*lengths))


def open_sessions(verifier: TargetVerifier, ids: tuple[int, ...], sampling: str = "") -> list[int]:
    """Let it read the prompts; gives the root tokens."""
    counts = [len(prompt) for prompt in PROMPTS]
    tokens = ints(*[token for prompt in PROMPTS for token in prompt])
    settings = (sampling, sampling)
    request = PrefillRequest(batch(ids, [0, 0]), tokens, ints(*counts), ints(200, 200), settings)
    roots: list[int] = verifier.prefill(request).next_tokens.tolist()
    return roots


def grown(source: random.Random, truth: list[list[int]], depth: int) -> TreeBatch:
    """Random trees; most nodes hold what the target will say there, if their path is right."""
    rows = []
    for text in truth:
        parents = random_parents(source, source.randrange(1, NODES + 1), reach=2)
        depths = depths_of(parents)[1:]
        keep = next((at for at, deep in enumerate(depths) if deep > depth), len(depths))
        parents, depths = parents[:keep], depths[:keep]
        taken: set[tuple[int, int]] = set()
        tokens = []
        for parent, deep in zip(parents, depths, strict=True):
            token = text[deep - 1] if source.random() < 0.6 else source.randrange(256)
            while (parent, token) in taken:
                token = source.randrange(256)
            taken.add((parent, token))
            tokens.append(token)
        rows.append((tokens, parents, depths))
    width = max(len(tokens) for tokens, _, _ in rows)

    def padded(which: int) -> torch.Tensor:
        return torch.stack([ints(*row[which], *[0] * (width - len(row[which]))) for row in rows])

    return TreeBatch(padded(0), padded(1), padded(2), ints(*[len(row[0]) for row in rows]))


def greedy(verifier: TargetVerifier, roots: list[int], lengths: list[int]) -> list[list[int]]:
    """How the target goes on after each root, found by sessions of their own."""
    texts: list[list[int]] = [[], []]
    now = list(roots)
    for step in range(DEPTH + 3):
        at = batch(GENERAL, [length + step for length in lengths])
        said = verifier.verify(VerifyRequest(at, ints(*now), TreeBatch.empty(2)))
        now = said.bonus_tokens.tolist()
        for text, token in zip(texts, now, strict=True):
            text.append(token)
    return texts


def reopened(verifier: TargetVerifier, texts: list[list[int]]) -> None:
    """Open the sessions of the general way anew behind these ids."""
    verifier.release(GENERAL)
    tokens = ints(*[token for text in texts for token in text])
    counts = ints(*[len(text) for text in texts])
    verifier.prefill(PrefillRequest(batch(GENERAL, [0, 0]), tokens, counts, ints(200, 200)))


def without_calls(verifier: TargetVerifier, request: VerifyRequest) -> VerifyResult:
    calls, verifier._calls = verifier._calls, None
    try:
        return verifier.verify(request)
    finally:
        verifier._calls = calls


def check_equal(found: VerifyResult, expected: VerifyResult) -> None:
    for field in fields(VerifyResult):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        if field.name == "accepted_tokens":
            width = min(ours.shape[1], theirs.shape[1])
            assert not ours[:, width:].any()
            assert not theirs[:, width:].any()
            ours, theirs = ours[:, :width], theirs[:, :width]
        if field.name != "commit_ms":
            torch.testing.assert_close(ours, theirs, msg=field.name)


def test_a_conversation_of_random_trees(verifier: TargetVerifier) -> None:
    """Verdicts, features and the cache are those of the general way, round after round."""
    source = random.Random(3)
    roots = open_sessions(verifier, CAPTURED)
    ids, accepted, told = [list(prompt) for prompt in PROMPTS], 0, []
    for _ in range(8):
        lengths = [len(text) for text in ids]
        reopened(verifier, ids)
        trees = grown(source, greedy(verifier, roots, lengths), DEPTH)
        reopened(verifier, ids)
        expected = without_calls(verifier, VerifyRequest(batch(GENERAL, lengths), ints(*roots), trees))
        found = verifier.verify(VerifyRequest(batch(CAPTURED, lengths), ints(*roots), trees))
        check_equal(found, expected)
        grew = found.accepted_counts + 1
        now = batch(CAPTURED, (ints(*lengths) + grew).tolist())
        stored = verifier.read_features(FeatureRequest(now, ints(*lengths), grew))
        torch.testing.assert_close(stored.features, found.features)
        for place, text in enumerate(ids):
            path = found.accepted_tokens[place, : int(found.accepted_counts[place])].tolist()
            text += [roots[place], *path]
            accepted += len(path)
        roots = found.bonus_tokens.tolist()
        told.append((found.bonus_tokens, roots))
    assert all(tokens.tolist() == then for tokens, then in told), "the next call leaves answers as they are"
    assert accepted > 8, "paths, not only roots, were kept"
    verifier.release([*CAPTURED, *GENERAL])
    verifier.check_integrity()


@pytest.mark.parametrize("sequences", [1, 2])
def test_features_are_the_callers_to_keep(sequences: int) -> None:
    """A captured call leaves its features where the next one does; a sequence may be owed them for long."""
    counts = np.zeros(sequences, dtype=np.int32)
    features = torch.ones(sequences, 3, 2)
    paths = KeptPaths(counts, counts[:, None], counts, features, 0.0)
    places, zeros = range(sequences), torch.zeros(sequences, dtype=torch.int32)
    result = verify_batch.kept(zeros.clone(), list(places), zeros, paths, [Status.OK for _ in places])
    features.fill_(7.0)
    assert result.features.tolist() == [[1.0, 1.0]] * sequences


def test_a_lost_session_between_others(verifier: TargetVerifier) -> None:
    roots = open_sessions(verifier, CAPTURED)
    lengths = [len(PROMPTS[0]), 3, len(PROMPTS[1])]
    at = batch((CAPTURED[0], NOBODY, CAPTURED[1]), lengths)
    found = verifier.verify(VerifyRequest(at, ints(roots[0], 0, roots[1]), TreeBatch.empty(3)))
    assert found.status.tolist() == [Status.OK, Status.SESSION_LOST, Status.OK]
    assert found.features.shape[0] == 2
    assert int(found.bonus_tokens[1]) == int(found.accepted_counts[1]) == 0
    verifier.release(CAPTURED)


def test_a_place_that_is_empty_now_leaves_its_old_pages_alone(config: ServingConfig) -> None:
    verifier = prepare(config, (StepSize(1, 0), StepSize(2, 15)))
    roots, lengths = open_sessions(verifier, CAPTURED), [len(prompt) for prompt in PROMPTS]
    line = torch.zeros((2, 1), dtype=torch.int32)
    trees = TreeBatch(line, line, line + 1, ints(1, 1))
    grew = verifier.verify(VerifyRequest(batch(CAPTURED, lengths), ints(*roots), trees)).accepted_counts + 1
    verifier.release(CAPTURED[1:])
    verifier.prefill(PrefillRequest(batch(GENERAL[:1], [0]), ints(*range(40)), ints(40), ints(200)))
    session = verifier.sessions.find(GENERAL[0], 0, 40)
    assert session is not None
    before = verifier.pool.keys_values[:, :, session.pages.slots[:40]].clone()
    one = TreeBatch(line[:1], line[:1], line[:1] + 1, ints(1))
    at = batch(CAPTURED[:1], [lengths[0] + int(grew[0])])
    assert verifier.verify(VerifyRequest(at, ints(7), one)).status.tolist() == [Status.OK]
    assert torch.equal(verifier.pool.keys_values[:, :, session.pages.slots[:40]], before)


def test_sequences_that_draw_their_tokens_take_the_general_way(verifier: TargetVerifier) -> None:
    hot = SamplingSpec(temperature=9.0, seed=1).to_json()
    roots = open_sessions(verifier, CAPTURED, hot)
    assert open_sessions(verifier, GENERAL, hot) == roots
    captured, general = (
        VerifyRequest(batch(ids, [len(prompt) for prompt in PROMPTS]), ints(*roots), TreeBatch.empty(2))
        for ids in (CAPTURED, GENERAL)
    )
    check_equal(verifier.verify(captured), without_calls(verifier, general))
    verifier.release([*CAPTURED, *GENERAL])


def test_trees_beyond_a_sessions_pages_are_refused(verifier: TargetVerifier) -> None:
    """Rows are staged in pages; whose they are, beyond the session's own, the device would not ask."""
    prompt, page = ints(*PROMPTS[0]), verifier.pool.page_size
    first = PrefillRequest(batch(CAPTURED[:1], [0]), prompt, ints(len(prompt)), ints(page))
    root = verifier.prefill(first).next_tokens
    count = page - len(prompt)
    nodes = torch.arange(count, dtype=torch.int32)[None]
    trees = TreeBatch(nodes, nodes * 0, nodes * 0 + 1, ints(count))
    with pytest.raises(AssertionError, match="a tree overruns its session's pages"):
        verifier.verify(VerifyRequest(batch(CAPTURED[:1], [len(prompt)]), root, trees))
    verifier.release(CAPTURED)


@pytest.mark.parametrize("depth", [DEPTH, DEPTH + 1])
def test_trees_deeper_than_a_drafter_makes_take_the_general_way(verifier: TargetVerifier, depth: int) -> None:
    calls = verifier._calls
    assert isinstance(calls, VerifyCalls)
    roots = open_sessions(verifier, CAPTURED)
    session = verifier.sessions.find(CAPTURED[0], 0, len(PROMPTS[0]))
    assert session is not None
    order = torch.arange(depth, dtype=torch.int32)[None]
    chain = TreeBatch(order, order, order + 1, ints(depth))
    assert (calls.run([session], chain, roots[:1]) is None) == (depth > DEPTH)
    verifier.release(CAPTURED)


def test_calls_that_move_no_keys_are_noticed_at_load(config: ServingConfig) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeping, "commit_rows", lambda *_: None)
        with pytest.raises(Misfit, match="the step after some verify calls are off by"):
            prepare(config)
