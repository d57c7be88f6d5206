"""What one packed forward is: which rows belong to which session, and who may see whom.

Rows of all sequences stand one after another in one batch row. A segment is one sequence's share: either a
chunk of a prompt (each row sees the rows before it) or a tree (each row sees its ancestors). Where the target
has recurrent layers too, the plan carries their step. This module knows the shapes, not how attention is
computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ddtree.kv_cache import KvPool, Pages
from ddtree.recurrent.step import RecurrentStep, Span


@dataclass(frozen=True)
class Segment:
    """One sequence's rows in the packed forward."""

    start: int  # first row in the packed forward
    count: int  # rows
    pages: Pages
    prefix: int  # committed length: all of it is visible to every row
    depths: torch.Tensor  # [count] position of each row after the prefix; 0 for the first
    sees: torch.Tensor | None  # [count, count] bool, which rows see which; None: each sees those before it
    is_shared: bool = False  # whether others may go on from this session's full pages

    @property
    def stop(self) -> int:
        """One past the last row."""
        return self.start + self.count


@dataclass(frozen=True)
class StepPlan:
    """One packed forward. The additive masks are made once per step and shared by all layers."""

    pool: KvPool
    segments: tuple[Segment, ...]
    slots: torch.Tensor  # [rows] int64, pool slot where each row's keys and values are staged
    recurrent: RecurrentStep | None = None
    _masks: dict[tuple[int, int | None, int], torch.Tensor | None] = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls,
        pool: KvPool,
        segments: tuple[Segment, ...],
        *,
        keeps: bool = False,
    ) -> StepPlan:
        """Stage each segment's rows at the slots that follow its committed ones.

        The caller has checked that the rows fit into the session's pages.

        Args:
            pool: the pages, and the states of the recurrent layers if the target has any.
            segments: the sequences.
            keeps: whether the recurrent states take in all rows at once; otherwise they wait for a commit.
        """
        for segment in segments:
            assert segment.prefix + segment.count <= segment.pages.capacity, "a segment overruns its pages"
        slots = [segment.pages.slots[segment.prefix : segment.prefix + segment.count] for segment in segments]
        recurrent = None
        if pool.states is not None:
            recurrent = RecurrentStep.build(pool.states, _spans(pool, segments, keeps=keeps), keeps=keeps)
        return cls(pool, segments, torch.cat(slots), recurrent)

    def page_layer(self, layer: int) -> int:
        """Where a decoder layer stands among those that have pages."""
        return layer if self.recurrent is None else self.recurrent.pool.shape.others_before(layer)

    @property
    def positions(self) -> torch.Tensor:
        """Sequence position of each row, `[rows]` int64: committed length + depth, never the flat index."""
        return torch.cat([segment.prefix + segment.depths for segment in self.segments])

    def mask(self, index: int, window: int | None, groups: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask `[groups * count, prefix + count]` of segment `index`; None when all is visible.

        Args:
            index: which segment.
            window: sliding window in positions (a key is seen if `query - key < window`), or None.
            groups: query heads per KV head; their rows stand one group after another.
            dtype: of the scores.
        """
        key = (index, window, groups)
        if key not in self._masks:
            visible = self._visible(self.segments[index], window)
            self._masks[key] = None if visible is None else _additive(visible, groups, dtype)
        return self._masks[key]

    @staticmethod
    def _visible(segment: Segment, window: int | None) -> torch.Tensor | None:
        beyond_window = window is not None and segment.prefix + segment.count > window
        if segment.count == 1 and not beyond_window:
            return None
        device = segment.depths.device
        if segment.sees is None:
            tail = torch.ones((segment.count, segment.count), dtype=torch.bool, device=device).tril()
        else:
            tail = segment.sees
        visible = torch.nn.functional.pad(tail, (segment.prefix, 0), value=True)
        if beyond_window:
            assert window is not None
            rows = segment.prefix + segment.depths
            keys = torch.cat([torch.arange(segment.prefix, device=device), rows])
            visible = visible & (rows[:, None] - keys < window)
        return visible


def _spans(pool: KvPool, segments: tuple[Segment, ...], *, keeps: bool) -> list[Span]:
    spans = []
    for segment in segments:
        state = pool.state_of(segment.pages)
        assert state is not None, "a pool with states has one for every session's pages"
        is_marked = keeps and segment.is_shared
        mark = pool.mark(segment.pages, segment.prefix, segment.count) if is_marked else None
        spans.append(Span(segment.start, segment.count, state, segment.depths, segment.sees, mark))
    return spans


def _additive(visible: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, float("-inf")).repeat(groups, 1)
