"""A drafter that knows what the target will say, and says it with errors.

It reads the committed ids it is given, lets its own copy of the target decode greedily from there, and
hides the true token among random ones: first, further down, or missing. So every kind of accept and reject
happens, and with `noise=0` every draft position must be accepted. Context features are not used; that they
arrive in the right number is asserted. What the target says after some ids it works out once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from ddtree.types import DrafterInfo, DraftRequest, DraftResult, Status, Usage


class Foresight:
    """What a target says next after any ids, greedily; texts that begin alike share what is known of them."""

    def __init__(self, target_folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
        self.vocab_size: int = self._model.config.get_text_config().vocab_size
        # Where a token leads from a place; place 0 is before the first token.
        self._places: dict[tuple[int, int], int] = {}
        self._says: dict[int, int] = {}

    def path(self, ids: Sequence[int], depth: int) -> list[int]:
        """The next tokens, one after the other."""
        ids, place = list(ids), 0
        for token in ids:
            place = self._after(place, token)
        for _ in range(depth):
            if place not in self._says:
                with torch.no_grad():
                    self._says[place] = int(self._model(torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(self._says[place])
            place = self._after(place, ids[-1])
        return ids[len(ids) - depth :]

    def _after(self, place: int, token: int) -> int:
        return self._places.setdefault((place, token), len(self._places) + 1)


class OracleDrafter:
    """Drafts for sequences of one small target."""

    feature_dtype = torch.float32  # of what it is given

    def __init__(
        self, target_folder: Path, *, block_size: int, draft_hash: str, noise: float = 0.0, seed: int = 0
    ) -> None:
        self._foresight = Foresight(target_folder)
        self._block_size = block_size
        self._draft_hash = draft_hash
        self.noise = noise
        self.pause_s = 0.0  # before each answer, for rounds that last
        self._random = random.Random(seed)
        self._sessions: dict[int, tuple[int, list[int]]] = {}  # id: (epoch, context ids)
        self.lose_next = False  # answer the next call as if the sessions were gone

    def info(self) -> DrafterInfo:
        """Describe like a real drafter."""
        return DrafterInfo(self._block_size, self._draft_hash, cost_ms=1.0, usage=self.usage())

    def usage(self) -> Usage:
        """Sessions; it has no pages."""
        return Usage(len(self._sessions), 0, 1)

    def release(self, session_ids: Sequence[int]) -> Usage:
        """Drop sessions."""
        for session_id in session_ids:
            self._sessions.pop(session_id, None)
        return self.usage()

    def draft(self, request: DraftRequest) -> DraftResult:
        """Take context, give noisy candidates."""
        if self.lose_next:
            self.lose_next = False
            self._sessions.clear()
        assert len(request.context_ids) == len(request.context_features) == int(request.counts.sum())
        time.sleep(self.pause_s)
        depth, width = request.depth, min(request.width, self._foresight.vocab_size)
        status, ids, log_probs = [], [], []
        start = 0
        for index, session_id in enumerate(request.sessions.ids.tolist()):
            count = int(request.counts[index])
            new_ids = request.context_ids[start : start + count].tolist()
            start += count
            state = self._take(session_id, int(request.sessions.epochs[index]),
                               int(request.sessions.lengths[index]), new_ids)  # fmt: skip
            status.append(state)
            is_known = state == Status.OK and depth > 0
            row_ids, row_probs = (
                self._candidates(session_id, int(request.root_tokens[index]), depth, width)
                if is_known
                else (torch.zeros(depth, width), torch.full((depth, width), -torch.inf))
            )
            ids.append(row_ids.int())
            log_probs.append(row_probs.float())
        return DraftResult(torch.tensor(status, dtype=torch.int32), torch.stack(ids), torch.stack(log_probs))

    def _take(self, session_id: int, epoch: int, length: int, new_ids: list[int]) -> Status:
        if length == 0:
            self._sessions[session_id] = (epoch, [])
        known = self._sessions.get(session_id)
        if known is None or known[0] != epoch or len(known[1]) != length:
            return Status.SESSION_LOST
        known[1].extend(new_ids)
        return Status.OK

    def _candidates(
        self, session_id: int, root: int, depth: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids = [*self._sessions[session_id][1], root]
        rows = [self._hide(true, width) for true in self._foresight.path(ids, depth)]
        sharpness = 0.7 if self.noise else 9.0  # a sure oracle drafts one path, as deep as the budget goes
        log_probs = torch.log_softmax(-torch.arange(width, dtype=torch.float32) * sharpness, dim=0)
        return torch.tensor(rows), log_probs.expand(depth, -1)

    def _hide(self, true: int, width: int) -> list[int]:
        """Candidates of one position: distinct ids, the true one at a random rank or missing."""
        others = [token for token in range(self._foresight.vocab_size) if token != true]
        row = self._random.sample(others, min(width, len(others)))
        draw = self._random.random()
        if draw >= self.noise:
            rank = 0
        elif draw < self.noise / 3 or width == 1:  # one candidate has no place further down
            return row + ([true] if len(row) < width else [])
        else:
            rank = self._random.randrange(1, width)
        if len(row) < width:
            return [*row[:rank], true, *row[rank:]]
        row[rank] = true
        return row
