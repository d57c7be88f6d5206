"""A sequence between its arrival and its last delta: what the scheduler, the planner and the loop note of it.

Holds no rule about order or cost; knows no stage.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ddtree.draft_choice import Outlook
from ddtree.errors import DDTreeError
from ddtree.events import RequestWatch
from ddtree.round_trace import SequenceTrace
from ddtree.sequence import Delta, Sequence, SequenceState, Stats
from ddtree.types import AUTO_BUDGET

_PROGRESS = 16  # drafts after which an earlier loss of the drafter's session is forgotten


class Sink(Protocol):
    """Where one sequence's answer goes."""

    @property
    def trace(self) -> SequenceTrace | None:
        """Keeps the sequence's rounds, for a caller who asked to see them."""
        ...

    def emit(self, delta: Delta, stats: Stats) -> None:
        """Take what a round added; the delta with a finish reason is the last."""
        ...

    def is_cancelled(self) -> bool:
        """Whether nobody waits for the answer any more."""
        ...


@dataclass
class DraftContext:
    """What the drafter holds of a sequence, and what it is still owed."""

    is_wanted: bool
    is_lost: bool = False
    losses: int = 0  # without `_PROGRESS` drafts in between
    drafts: int = 0  # since the last loss
    epoch: int = 0
    length: int = 0  # context tokens the drafter holds
    behind_until: int = 0  # tokens `[length, behind_until)` are to be read back from the verifier first
    pending_ids: list[int] = field(default_factory=list)
    pending_features: list[torch.Tensor] = field(default_factory=list)  # each [n, H], aligned with the ids

    def owe(self, ids: list[int], features: torch.Tensor) -> None:
        """Remember newly committed tokens and their context features `[len(ids), H]`."""
        assert len(ids) == len(features), f"{len(ids)} ids, {len(features)} features"
        if self.is_wanted and not self.is_lost:
            self.pending_ids += ids
            self.pending_features.append(features)

    @property
    def is_behind(self) -> bool:
        """Whether what is owed begins after tokens that the drafter was never given."""
        return self.is_wanted and not self.is_lost and self.behind_until > self.length

    @property
    def is_ready(self) -> bool:
        """Whether the drafter has, with what is owed, all that was committed."""
        return self.is_wanted and not self.is_lost and not self.is_behind

    def begin_behind(self, length: int) -> None:
        """Begin a new life: the verifier has so many tokens, and their features did not come from it."""
        self.forget()
        self.behind_until = length

    def fall_behind(self, length: int) -> None:
        """Note that the verifier has so many tokens by now; all that the drafter lacks is to be read back."""
        self.behind_until = length
        self._drop_pending()  # it stands before them, and would be delivered again behind them

    def delivered(self) -> None:
        """Note that the drafter took all that was owed."""
        self.length += len(self.pending_ids)
        self._drop_pending()

    def lose(self) -> None:
        """Note that the drafter does not have the session; it is opened again before the next draft."""
        self.is_lost = True
        self.losses = 1 if self.drafts >= _PROGRESS else self.losses + 1
        self.drafts = 0
        self._drop_pending()

    def forget(self) -> None:
        """Begin a new life: nothing is held, nothing is owed yet."""
        self.is_lost = False
        self.epoch += 1
        self.length = self.behind_until = 0
        self._drop_pending()

    def give_up(self) -> None:
        """Decode without drafts from now on."""
        self.is_wanted = False
        self._drop_pending()

    def _drop_pending(self) -> None:
        self.pending_ids, self.pending_features = [], []


@dataclass(eq=False)
class Live:
    """A sequence between its arrival and its last delta."""

    sequence: Sequence
    sink: Sink
    done: asyncio.Future[None]
    draft: DraftContext
    node_cap: int  # most draft nodes a round may stage for it
    settings: str = ""  # how its tokens are chosen, `SamplingSpec.to_json`; read where its session opens
    committed: int = 0  # committed length in the verifier
    failure: DDTreeError | None = None  # why it cannot be answered any more; it ends with the next step
    recoveries: int = 0  # since the last round that it took part in
    deadline_ns: int | None = None  # of the scheduler's clock
    waiting_since_ns: int = 0
    outlook: Outlook = field(default_factory=Outlook)  # what its drafts give
    is_postponed: bool = False  # the pool once had no pages for it
    request: RequestWatch = field(default_factory=RequestWatch)  # whose row it is, for those who listen

    @property
    def log_fields(self) -> dict[str, object]:
        """What a log record about it carries."""
        return {"request_id": self.request.request_id, "session_id": self.sequence.session_id}

    @property
    def to_commit(self) -> int:
        """Ids the verifier must hold before rounds can go on: all but the root token."""
        return self.sequence.length - bool(self.sequence.output_ids)

    @property
    def is_budget_open(self) -> bool:
        """Whether the request leaves it to the engine how much to draft, or not to draft at all."""
        params = self.sequence.params
        return params.draft_mode == "tree" and params.tree_budget == AUTO_BUDGET

    def reopen(self) -> None:
        """Start a new life in the stages; prefill brings back what was committed."""
        self.recoveries += 1
        self.committed = 0
        self.sequence.epoch += 1
        self.sequence.state = SequenceState.PREFILLING
        self.draft.forget()
