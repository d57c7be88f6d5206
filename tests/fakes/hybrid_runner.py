"""A target with recurrent layers, its pools, and sequences in them, step by step, without a verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from ddtree.attention.plan import Segment, StepPlan
from ddtree.hybrid_cache import HybridPages, HybridPool
from ddtree.models.target import TargetModel, TargetStep
from ddtree.recurrent.state_pool import PoolSize, StatePool
from tests.fakes.random_trees import depths_of, path_to, sees_of

CPU = torch.device("cpu")


@dataclass
class RunningSequence:
    """What is committed of a sequence, and where it is kept."""

    pages: HybridPages
    ids: list[int] = field(default_factory=list)

    @property
    def state(self) -> int:
        return self.pages.state_index


@dataclass(frozen=True)
class Tree:
    """Tokens of root and nodes; parents of the nodes 1, 2, …."""

    tokens: Sequence[int]
    parents: list[int]

    def path(self, node: int) -> list[int]:
        return [self.tokens[index] for index in path_to(self.parents, node)]


class HybridRunner:
    """Runs steps of one target."""

    def __init__(
        self,
        target: TargetModel,
        *,
        sequences: int,
        slots: int,
        rows: int = 600,
        device: torch.device = CPU,
    ) -> None:
        shape = target.state_shape()
        assert shape is not None
        self.target = target
        self.states = StatePool(shape, PoolSize(sequences, rows), device)
        bytes_per_slot = target.cache_shape(0).bytes_per_slot
        self.pool = HybridPool(
            target.cache_shape(0),
            self.states,
            budget_bytes=sequences * (slots + 16) * bytes_per_slot,
            page_size=16,
            device=device,
        )
        self._slots, self._device = slots, device

    def open(self) -> RunningSequence:
        pages = self.pool.reserve(self._slots)
        assert isinstance(pages, HybridPages)
        return RunningSequence(pages)

    def prefill(self, sequences: Sequence[RunningSequence], chunks: Sequence[Sequence[int]]) -> TargetStep:
        """Commit a chunk of each."""
        segments, start = [], 0
        for sequence, chunk in zip(sequences, chunks, strict=True):
            depths = torch.arange(len(chunk), device=self._device)
            prefix = len(sequence.ids)
            segments.append(Segment(start, len(chunk), sequence.pages, prefix, depths, None))
            start += len(chunk)
            sequence.ids += chunk
        plan = StepPlan.build(self.pool, tuple(segments), keeps=True)
        return self._forward([token for chunk in chunks for token in chunk], plan)

    def stage(self, sequences: Sequence[RunningSequence], trees: Sequence[Tree]) -> Staged:
        """Run a tree of each; nothing is committed."""
        segments, start = [], 0
        for sequence, tree in zip(sequences, trees, strict=True):
            rows, depths = len(tree.tokens), torch.tensor(depths_of(tree.parents), device=self._device)
            is_chain = tree.parents == list(range(rows - 1))
            sees = None if is_chain else sees_of(tree.parents).to(self._device)
            prefix = len(sequence.ids)
            segments.append(Segment(start, rows, sequence.pages, prefix, depths, sees))
            start += rows
        plan = StepPlan.build(self.pool, tuple(segments))
        step = self._forward([token for tree in trees for token in tree.tokens], plan)
        return Staged(self, list(sequences), list(trees), plan, step.logits)

    def _forward(self, tokens: Sequence[int], plan: StepPlan) -> TargetStep:
        ids = torch.tensor(tokens, device=self._device)
        return self.target.forward(ids, plan, torch.arange(len(ids), device=self._device))


@dataclass(frozen=True)
class Staged:
    """A step that waits for its commit."""

    runner: HybridRunner
    sequences: list[RunningSequence]
    trees: list[Tree]
    plan: StepPlan
    logits: torch.Tensor  # [rows, V]

    def logits_of(self, index: int) -> torch.Tensor:
        """Logits of one sequence's nodes."""
        segment = self.plan.segments[index]
        return self.logits[segment.start : segment.stop]

    def commit(self, nodes: Sequence[int]) -> None:
        """Keep of each sequence the path from the root to a node."""
        assert self.plan.recurrent is not None
        paths = [path_to(tree.parents, node) for tree, node in zip(self.trees, nodes, strict=True)]
        device = self.logits.device
        lengths = torch.tensor([len(path) for path in paths], device=device)
        # Beyond a path nothing may be read.
        padded = torch.full((len(paths), int(lengths.max())), 10**6, device=device)
        source, target = [], []
        for index, (sequence, path) in enumerate(zip(self.sequences, paths, strict=True)):
            padded[index, : len(path)] = torch.tensor(path, device=device)
            segment, prefix = self.plan.segments[index], len(sequence.ids)
            source.append(self.plan.slots[segment.start + torch.tensor(path, device=device)])
            target.append(sequence.pages.slots[prefix : prefix + len(path)])
            sequence.ids += self.trees[index].path(nodes[index])
        self.plan.recurrent.commit(padded, lengths)
        self.runner.pool.move(torch.cat(source), torch.cat(target))


class PlainTarget:
    """The same checkpoint run by transformers alone."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        # One expert after another: PyTorch groups their products in float32 and less only.
        experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **experts).eval()

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """`[len(ids), V]`."""
        output: torch.Tensor = self.model(torch.tensor([list(ids)])).logits[0]
        return output
