"""What the benchmark of a GPU says of captured steps and rounds: what is off is seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.exact_stages import Loaded, compare_rounds, compare_steps
from ddtree.budget import CostCurve
from ddtree.config import ServingConfig
from ddtree.device.buffers import StepSize
from ddtree.device.loading import Preparation
from ddtree.device.messages import RoundRequest, RoundResult, RoundSizes
from ddtree.draft import Drafter
from ddtree.sessions import Session
from ddtree.staging import Staged
from ddtree.types import TreeBatch
from tests.fakes.device_stages import scripted_stages
from tests.fakes.pipeline import GreedyReference
from tests.fakes.plain_kernels import in_place_of_kernels
from tests.fakes.scripted_draft import Script
from tests.fakes.tiny_models import make_draft, make_target


@dataclass(frozen=True)
class Spoilt:
    """Steps with one logit that is wrong, and rounds that leave one wrong value in the drafter's cache."""

    of: Loaded

    @property
    def sizes(self) -> RoundSizes:
        assert self.of.rounds is not None
        return self.of.rounds.sizes

    def run(self, request: RoundRequest) -> RoundResult:
        assert self.of.rounds is not None
        result = self.of.rounds.run(request)
        (session,) = [each for each in self.of.drafter.sessions if each.session_id == 0]
        self.of.drafter.pool.keys_values[0, 1, session.pages.slots[0]] += 1
        return result

    def stage(self, sessions: Sequence[Session], trees: TreeBatch, roots: Sequence[int]) -> Staged | None:
        assert self.of.steps is not None
        staged = self.of.steps.stage(sessions, trees, roots)
        assert staged is not None
        staged.step.logits[staged.starts[-1], 7] += 1
        return staged

    def rows(self, sequences: int, nodes: int) -> int | None:
        assert self.of.steps is not None
        return self.of.steps.rows(sequences, nodes)

    def cost(self, repeats: int) -> CostCurve:
        assert self.of.steps is not None
        return self.of.steps.cost(repeats)


def test_captured_steps_and_rounds_are_compared_and_what_is_off_is_seen(tmp_path: Path) -> None:
    target, draft = make_target(tmp_path / "target"), make_draft(tmp_path / "draft")
    model = GreedyReference(target).model
    text = model.generate(torch.tensor([[72]]), max_new_tokens=200, do_sample=False, eos_token_id=None)
    config = ServingConfig(target, draft, dtype="float32", device="cpu", page_size=16, kv_cache_mib=4)
    sizes = tuple(StepSize(places, nodes) for places in (1, 2, 4) for nodes in (0, 12))
    with in_place_of_kernels(), torch.inference_mode():
        script = Script(text[0].tolist() + [0] * 400)
        stages = scripted_stages(config, script, Preparation(sizes, 300, 12, repeats=1))
        script.is_checked = False  # roots are of any token
        assert isinstance(stages.drafter, Drafter)
        loaded = Loaded(stages.verifier, stages.drafter, stages.verifier._steps, stages._rounds)
        texts = [script.text[:length] for length in (2, 17, 30)]

        def logits(ids: Any) -> torch.Tensor:
            found: torch.Tensor = model(torch.tensor([list(ids)])).logits[0, -1]
            return found

        steps = compare_steps(loaded, texts, ((12, 0, 5), (3, 11, 7)), logits, nodes=8)
        assert (steps["steps_captured"], steps["nodes_read"]) == (2, 8)
        assert max(steps["steps_off_ppm"], steps["nodes_off_ppm"]) < 20
        rounds = compare_rounds(loaded, texts, rounds=20, most_nodes=12)
        assert rounds["rounds"] == 20
        assert len(rounds["rounds_acceptances"]) > 2
        assert 0 < rounds["caches_off_ppm"] < 50
        assert rounds["draft_values_off_ppm"] <= rounds["caches_off_ppm"]
        spoilt = Spoilt(loaded)
        loaded = replace(loaded, steps=spoilt, rounds=spoilt)
        assert compare_steps(loaded, texts, ((12, 0, 5),), logits, nodes=1)["steps_off_ppm"] > 1000
        off = compare_rounds(loaded, texts, rounds=2, most_nodes=12)
        assert off["caches_off_ppm"] == off["draft_values_off_ppm"] > 1000 > off["draft_keys_off_ppm"]
        assert loaded.verifier.usage().pages_used == loaded.drafter.info().usage.pages_used == 0
