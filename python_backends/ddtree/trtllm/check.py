"""Whether the engine verifies trees rightly on this machine: tree logits against those of every path alone.

Wrong bits, wrong positions or wrongly moved rows fail nothing by themselves: they only let other tokens
through. So before the tree path serves, a tree of more than one mask word behind a prompt of more than one
block is run, and every node is compared with a plain context step over its path. Then a path that is not
along the first siblings is accepted, and what follows it is compared too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ddtree.attention.plan import Segment, StepPlan
from ddtree.models.target import TargetStep
from ddtree.tree_mask import ancestor_bits, expand
from ddtree.trtllm.library import EngineUnfit
from ddtree.trtllm.pool import EnginePages, EnginePool
from ddtree.trtllm.target import EngineTarget

PROMPT, NODES, AFTER = 45, 40, 8
# How far a node may be off, as a share of how far nodes are apart. Rounding of 16-bit kernels is a few per
# cent; another depth, bit or row is a large share, and the same for many nodes.
_MOST_MEDIAN, _MOST_WORST = 0.05, 0.5


@dataclass(frozen=True)
class TreeCheck:
    """Differences between a tree step and plain steps, as shares of the spread between nodes."""

    logits_median: float
    logits_worst: float
    taps_median: float
    relocated_median: float  # of the rows after an accepted path

    @property
    def is_right(self) -> bool:
        """Whether the differences are rounding."""
        medians = (self.logits_median, self.taps_median, self.relocated_median)
        # One by one: what is no number is not below anything, while a maximum may pass over it.
        return all(median <= _MOST_MEDIAN for median in medians) and self.logits_worst <= _MOST_WORST

    def __str__(self) -> str:
        return (
            f"logits off by {self.logits_median:.2%} (median) and {self.logits_worst:.2%} (worst node), "
            f"context features by {self.taps_median:.2%}, after a relocated path {self.relocated_median:.2%}"
        )


@torch.inference_mode()
def check_trees(target: EngineTarget, pool: EnginePool, *, nodes: int = NODES, seed: int = 0) -> TreeCheck:
    """Run the comparison.

    Args:
        target: a loaded target.
        pool: its pool; as many pages as a short session needs must be free.
        nodes: draft nodes of the tree.
        seed: of tokens and tree.
    """
    source = random.Random(seed)
    ids = [source.randrange(target.vocab_size) for _ in range(PROMPT + nodes + 1 + AFTER)]
    prompt, tree_ids, following = ids[:PROMPT], ids[PROMPT:-AFTER], ids[-AFTER:]
    # Branches among the newest nodes: deep, bushy, and with first children that are not taken.
    parents = [source.randrange(max(0, node - 6), node) for node in range(1, nodes + 1)]
    run = _Runner(target, pool, len(ids))
    try:
        run.open("tree").context("tree", prompt)
        tree = run.tree("tree", tree_ids, parents)
        taken = _path(parents, nodes)
        run.commit("tree", taken)  # before any other step: it is about the last one
        after = run.context("tree", following).logits
        plain_logits, plain_taps = [], []
        for node in range(nodes + 1):
            path = [*prompt, *(tree_ids[step] for step in _path(parents, node))]
            step = run.open("plain").context("plain", path)
            run.close("plain")
            plain_logits.append(step.logits[-1])
            plain_taps.append(torch.cat([tap[-1] for tap in step.taps]))
        whole = [*prompt, *(tree_ids[step] for step in taken), *following]
        expected = run.open("plain").context("plain", whole).logits[-AFTER:]
    finally:
        run.close_all()
    logits = _shares(tree.logits, torch.stack(plain_logits))
    taps = _shares(torch.cat(tree.taps, -1), torch.stack(plain_taps))
    moved = _shares(after, expected)
    return TreeCheck(float(logits.median()), float(logits.max()), float(taps.median()), float(moved.median()))


@torch.inference_mode()
def node_answers(
    target: EngineTarget, pool: EnginePool, prompt: Sequence[int], *, nodes: int = 24, seed: int = 0
) -> list[tuple[list[int], int]]:
    """What one tree step says after each node: (prompt and path, most probable next token)."""
    source = random.Random(seed)
    ids = [source.randrange(target.vocab_size) for _ in range(nodes + 1)]
    parents = [source.randrange(node) for node in range(1, nodes + 1)]
    run = _Runner(target, pool, len(prompt) + nodes + 1)
    try:
        run.open("tree").context("tree", prompt)
        step = run.tree("tree", ids, parents)
    finally:
        run.close_all()
    paths = [[*prompt, *(ids[node] for node in _path(parents, last))] for last in range(nodes + 1)]
    return list(zip(paths, step.logits.argmax(-1).tolist(), strict=True))


def refuse_wrong_trees(target: EngineTarget, pool: EnginePool) -> None:
    """Run the comparison at load.

    Raises:
        EngineUnfit: the engine verifies trees wrongly here, or a private call failed.
    """
    try:
        check = check_trees(target, pool)
    except EngineUnfit:
        raise
    except Exception as error:  # whatever a private call raised, trees cannot be served
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise EngineUnfit(f"engine trtllm: a tree step failed ({reason})") from error
    if not check.is_right:
        raise EngineUnfit(f"engine trtllm: trees are verified wrongly here: {check}")


class _Runner:
    """Steps over a few named requests."""

    def __init__(self, target: EngineTarget, pool: EnginePool, room: int) -> None:
        self._room = room
        self._target = target
        self._pool = pool
        self._open: dict[str, EnginePages] = {}
        self._length: dict[str, int] = {}

    def open(self, name: str) -> _Runner:
        """Reserve room for prompt and tree."""
        pages = self._pool.reserve(self._room)
        if pages is None:
            raise EngineUnfit("engine trtllm: kv_cache_mib has no room to try a tree; raise it")
        self._open[name] = pages
        self._length[name] = 0
        return self

    def context(self, name: str, ids: Sequence[int]) -> TargetStep:
        """Read a chunk; logits and taps of all its rows."""
        depths = torch.arange(len(ids), device=self._target.device)
        step = self._run(name, ids, depths, None)
        self._length[name] += len(ids)
        return step

    def tree(self, name: str, ids: Sequence[int], parents: Sequence[int]) -> TargetStep:
        """Run root and nodes."""
        device = self._target.device
        row = torch.tensor([parents], dtype=torch.int32, device=device)
        count = torch.tensor([len(parents)], dtype=torch.int32, device=device)
        sees = expand(ancestor_bits(row, count))[0]
        return self._run(name, ids, sees.sum(1) - 1, sees)

    def commit(self, name: str, path: Sequence[int]) -> None:
        """Keep the rows of a path."""
        slots, length = self._open[name].slots, self._length[name]
        nodes = torch.tensor(path, device=slots.device)
        self._pool.move(slots[length + nodes], slots[length : length + len(path)])
        self._length[name] += len(path)

    def close(self, name: str) -> None:
        """Give the room back."""
        self._pool.release(self._open.pop(name))

    def close_all(self) -> None:
        """Give all room back."""
        for name in list(self._open):
            self.close(name)

    def _run(
        self, name: str, ids: Sequence[int], depths: torch.Tensor, sees: torch.Tensor | None
    ) -> TargetStep:
        segment = Segment(0, len(ids), self._open[name], self._length[name], depths, sees)
        plan = StepPlan.build(self._pool, (segment,))
        rows = torch.arange(len(ids), device=self._target.device)
        return self._target.forward(torch.tensor(ids, device=self._target.device), plan, rows)


def _path(parents: Sequence[int], node: int) -> list[int]:
    """Node indices from the root to a node."""
    path = [node]
    while path[0]:
        path.insert(0, parents[path[0] - 1])
    return path


def _shares(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """How far each row is off, as a share of the rows' spread."""
    shares: torch.Tensor = (got.float() - expected.float()).norm(dim=-1) / _spread(expected)
    return shares


def _spread(rows: torch.Tensor) -> torch.Tensor:
    spread: torch.Tensor = (rows.float() - rows.float().mean(0)).norm(dim=-1).mean()
    return spread
