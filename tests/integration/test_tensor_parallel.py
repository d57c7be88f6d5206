"""A target of two processes gives what it gives in one, and the loss of a process is an error in time."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddtree.attention.plan import Segment, StepPlan
from ddtree.errors import CheckpointError, Unavailable
from ddtree.kv_cache import KvPool, Pages
from ddtree.models.target import Target, TargetModel, TargetStep
from ddtree.parallel.commands import Move
from ddtree.parallel.group import WorkerGroup
from ddtree.parallel.target import ParallelTarget
from ddtree.stages.in_process import InProcessStages
from ddtree.verify import TargetVerifier, VerifierLimits
from tests.fakes.pipeline import GreedyReference, generate_all, make_oracle, running_engine
from tests.fakes.random_trees import depths_of, path_to, random_parents, sees_of
from tests.fakes.target_families import COMMON, make_family
from tests.fakes.tiny_models import HIDDEN, TAPS
from tests.fakes.workers import requests, workers_left

CPU = torch.device("cpu")
TRIED = ("llama", "llama, tied and biased", "qwen3")  # all with two KV heads for four heads
BOUND_S = 30.0
CHAINS = ([0, 1, 2, 3, 4], [0, 1])  # parents, for sequences of six and three rows


class Ranks:
    """Two ranks, started when they are wanted, and again after a test broke them."""

    def __init__(self) -> None:
        self._group: WorkerGroup | None = None

    def __call__(self) -> WorkerGroup:
        if self._group is None or self._group.lost:
            self._group = WorkerGroup.start(2, CPU)
        return self._group

    def close(self) -> None:
        if self._group is not None:
            self._group.close()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()
    assert not workers_left()
    assert not dist.is_initialized()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_family(tmp_path_factory.mktemp("family"), name) for name in TRIED}


def divided(ranks: Ranks, folder: Path) -> ParallelTarget:
    return ParallelTarget.load(ranks(), folder, dtype="float32", taps=TAPS)


def whole(folder: Path) -> TargetModel:
    return TargetModel.load(folder, dtype="float32", device=CPU, taps=TAPS)


class Decoding:
    """Two sequences of one target, decoded in packed steps. Their pages do not lie side by side."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.pool = target.make_pool(HIDDEN, budget_bytes=1 << 20, page_size=4)
        held = [self.pool.reserve(4) for _ in range(self.pool.num_pages)]
        for pages in held[::2]:
            assert pages is not None
            self.pool.release(pages)
        self.pages = [self._reserve(self.pool, 160) for _ in range(2)]
        self.lengths = [0, 0]

    @staticmethod
    def _reserve(pool: KvPool, slots: int) -> Pages:
        pages = pool.reserve(slots)
        assert pages is not None
        assert pages.first_slot is None
        return pages

    def step(self, tokens: torch.Tensor, trees: Sequence[list[int]]) -> TargetStep:
        """Stage one tree, given by its parents, per sequence."""
        segments: list[Segment] = []
        for pages, length, tree in zip(self.pages, self.lengths, trees, strict=True):
            start = segments[-1].stop if segments else 0
            depths = torch.tensor(depths_of(tree))
            segments.append(Segment(start, len(depths), pages, length, depths, sees_of(tree)))
        self.plan = StepPlan.build(self.pool, tuple(segments))
        return self.target.forward(tokens, self.plan, torch.arange(len(tokens)))

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep one path of rows per sequence."""
        source, destination = [], []
        for index, (segment, path) in enumerate(zip(self.plan.segments, paths, strict=True)):
            length = self.lengths[index]
            source.append(self.plan.slots[segment.start + torch.tensor(path)])
            destination.append(self.pages[index].slots[length : length + len(path)])
            self.lengths[index] += len(path)
        self.pool.move(torch.cat(source), torch.cat(destination))


def assert_same(step: TargetStep, expected: TargetStep) -> None:
    for found, wanted in zip((step.logits, *step.taps), (expected.logits, *expected.taps), strict=True):
        assert found.shape == wanted.shape
        assert (found - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.parametrize("name", TRIED)
def test_twenty_rounds_of_random_commits_give_the_logits_and_taps_of_one_process(
    ranks: Ranks, checkpoints: dict[str, Path], name: str
) -> None:
    source, generator = random.Random(7), torch.Generator().manual_seed(7)
    decodings = [Decoding(divided(ranks, checkpoints[name])), Decoding(whole(checkpoints[name]))]
    for _ in range(20):
        trees = [random_parents(source, nodes, reach=4) for nodes in (source.randrange(1, 24), 9)]
        tokens = torch.randint(256, (sum(map(len, trees)) + 2,), generator=generator)
        assert_same(*(each.step(tokens, trees) for each in decodings))
        paths = [path_to(tree, source.randrange(len(tree) + 1)) for tree in trees]
        for each in decodings:
            each.commit(paths)
    assert min(decodings[0].lengths) > 40


def verifier_over(target: Target) -> TargetVerifier:
    torch.manual_seed(5)
    projection = nn.Linear(len(TAPS) * HIDDEN, HIDDEN, bias=False).requires_grad_(False)
    limits = VerifierLimits(1 << 20, page_size=16, max_nodes=64, session_ttl_s=600)
    return TargetVerifier(target, projection, limits, draft_hash="tiny", feature_size=HIDDEN)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
async def test_the_engine_emits_what_generate_emits(
    ranks: Ranks, checkpoints: dict[str, Path], name: str
) -> None:
    folder = checkpoints[name]
    reference = GreedyReference(folder)
    verifier = verifier_over(divided(ranks, folder))
    async with running_engine(verifier, make_oracle(folder, noise=0.5), folder) as engine:
        sinks = await generate_all(engine, requests())
    for sink, params in zip(sinks, requests(), strict=True):
        assert sink.token_ids == reference(params.prompt_ids, 24)


def test_a_plan_that_leaves_the_logits_in_pieces_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    folder = make_family(tmp_path, "gemma3 with a vision tower")
    with pytest.raises(CheckpointError, match="gives 136 of 272 logits on each rank; set tensor_parallel"):
        divided(ranks, folder)
    assert not workers_left()


def break_a_worker(group: WorkerGroup, how: str) -> None:
    worker = group.workers[0].process
    if how == "killed":
        worker.kill()
        worker.wait()
    elif how == "hangs":
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
        os.kill(worker.pid, signal.SIGSTOP)
    else:
        group.tell(Move(np.array([1 << 40]), np.array([0])))  # no such slot


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("killed", "worker 1 ended with signal 9"),
        ("fails", r"worker 1 ended with status 1 \(\w*Error: .*index"),
        ("hangs", "Timed out waiting"),
    ],
)
def test_a_lost_worker_is_an_error_in_time_and_leaves_nothing(
    ranks: Ranks, checkpoints: dict[str, Path], how: str, reason: str
) -> None:
    decoding = Decoding(divided(ranks, checkpoints["llama"]))
    verifier = verifier_over(decoding.target)
    decoding = Decoding(decoding.target)
    stages = InProcessStages(verifier, make_oracle(checkpoints["llama"], noise=0.0))
    group = ranks()
    decoding.step(torch.arange(9), CHAINS)
    assert verifier.info().vocab_size == COMMON["vocab_size"]
    asyncio.run(stages.check())

    def notice() -> None:
        if how == "killed":  # the only one that shows while nothing runs
            asyncio.run(stages.check())
        else:
            decoding.step(torch.arange(9), CHAINS)

    break_a_worker(group, how)
    started = time.monotonic()
    with pytest.raises(Unavailable, match=rf"2 processes, is not healthy: .*{reason}.*; it works again when"):
        notice()
    assert time.monotonic() - started < BOUND_S
    started = time.monotonic()
    with pytest.raises(Unavailable, match="is not healthy"):  # what the watchdog asks, and what it looks for
        verifier.info()
    with pytest.raises(Unavailable, match="is not healthy"):  # the same where both are one process
        asyncio.run(stages.check())
    with pytest.raises(Unavailable, match=reason):
        decoding.step(torch.arange(9), CHAINS)
    assert time.monotonic() - started < BOUND_S / 3
    asyncio.run(stages.close())
    assert not workers_left()
    assert not dist.is_initialized()


def test_a_worker_ends_with_the_process_that_started_it() -> None:
    """Killed before it can say anything: the kernel closes its sockets."""
    script = (
        "import os, signal; from ddtree.parallel.group import start_worker; "
        "worker = start_worker(1); worker.channel.receive(60); "
        "print(worker.process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    status = Path(f"/proc/{int(ended.stdout)}/stat")
    deadline = time.monotonic() + BOUND_S
    while status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < deadline, "the worker outlives its parent"
        time.sleep(0.05)
