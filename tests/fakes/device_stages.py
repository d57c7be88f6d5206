"""Stages with rounds on the device over a scripted drafter, and an engine that leaves them open."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from ddtree import assembly
from ddtree.config import ServingConfig
from ddtree.device.graphs import GraphMaker
from ddtree.device.loading import Preparation, prepare_rounds
from ddtree.draft import Drafter
from ddtree.engine import Engine
from ddtree.events import RoundDone
from ddtree.models.target import TargetModel
from ddtree.scheduler import Scheduler
from ddtree.stages.in_process import InProcessStages
from ddtree.text import TextCodec
from ddtree.types import DraftRequest, PrefillRequest, SessionBatch
from tests.fakes.pipeline import idle
from tests.fakes.scripted_draft import Script, ScriptedDrafter

_SLOTS = 420  # of a session that both stages open


def scripted_stages(config: ServingConfig, script: Script, wanted: Preparation) -> InProcessStages:
    """Load a pair and prepare rounds; its drafter says what the script does."""
    loaded = assembly.load_in_process(config)
    verifier, drafter = loaded.verifier, loaded.drafter
    assert isinstance(drafter, Drafter)
    assert isinstance(verifier.target, TargetModel)
    drafter.__class__ = ScriptedDrafter
    assert isinstance(drafter, ScriptedDrafter)
    drafter.script = script
    rounds = prepare_rounds(verifier, drafter, verifier.target, wanted, GraphMaker(verifier.target.device))
    script.is_checked = True
    return InProcessStages(verifier, drafter, rounds=rounds)


class Rounds(list[RoundDone]):
    """Keeps what happened in each round."""

    def __call__(self, event: object) -> None:
        if isinstance(event, RoundDone):
            self.append(event)


@asynccontextmanager
async def engine_over(stages: InProcessStages, folder: Path, rounds: Rounds) -> AsyncIterator[Engine]:
    """An engine over the stages, which stay open; afterwards both hold nothing."""
    scheduler = Scheduler(max_sequences=3, max_waiting=64, prefill_chunk=16)
    verifier, drafter = stages.verifier, stages.drafter
    own = InProcessStages(verifier, drafter, rounds=stages._rounds)
    codec = TextCodec.from_folder(folder)
    engine = Engine(own, codec, scheduler=scheduler, feed_chunk=8, observe=rounds)
    await engine.start()
    try:
        yield engine
        await idle(engine)
        verifier.check_integrity()
        assert verifier.usage().pages_used == drafter.info().usage.pages_used == 0
    finally:
        await engine.stop()


def open_both(stages: InProcessStages, session: int, ids: Sequence[int]) -> None:
    """Let both stages read all ids but the last, which is the root."""
    count = torch.tensor([len(ids) - 1], dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    one = SessionBatch(torch.tensor([session]), zero, zero)
    tokens = torch.tensor(ids[:-1], dtype=torch.int32)
    reserve = torch.tensor([_SLOTS], dtype=torch.int32)
    read = stages.verifier.prefill(PrefillRequest(one, tokens, count, reserve))
    drafter = stages.drafter
    drafter.draft(DraftRequest(one, tokens, read.features, count, tokens[:1], reserve, depth=0, width=0))
