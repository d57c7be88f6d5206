"""What a sequence's rounds did, for a caller who asked to see it: trees, probabilities, accepted path, times.

A sequence is traced when its sink carries a `SequenceTrace`; without one nothing here is kept or copied.
The engine hands over a round between verify and commit (`note_round`), the sink turns what its delta brought
into JSON (`SequenceTrace.take`). Path probabilities are what the round's drafts promised (`Promise`), which
the engine has anyway: no message between the stages carries them. Knows no stage and no transport.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddtree.detokenize import Decoder, IncrementalDetokenizer
from ddtree.types import Status, TreeBatch, VerifyResult

if TYPE_CHECKING:
    from ddtree.live import Live
    from ddtree.promise import Promise
    from ddtree.sequence import Delta

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verified:
    """One packed round as it stands after verify; nothing is copied out of it before somebody traces."""

    drafting: Sequence[Live]  # those of the batch that had candidates, a row of `promise` each
    promise: Promise | None  # None: there are no trees, or none can be told of
    trees: TreeBatch
    verdict: VerifyResult
    stage_ms: Mapping[str, float]  # draft, build_tree, verify; of all sequences of the round together


class SequenceTrace:
    """One traced sequence; made for callers who want it and for nobody else."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._detokenizer = IncrementalDetokenizer(decoder)
        self._texts: dict[int, str] = {}
        self._round = 0
        self._noted: dict[str, Any] | None = None
        self._verified_s = 0.0

    def note(self, live: Live, place: int, size: int, verified: Verified) -> None:
        """Keep what the round of `size` sequences says of this one, which stands at `place` in it."""
        verdict, params = verified.verdict, live.sequence.params
        nodes = self._nodes(live, place, verified)
        count = int(verdict.accepted_counts[place])
        accepted = verdict.accepted_tokens[place, :count].tolist()
        self._noted = {
            "sequences": size,
            "committed": live.committed,
            "draft_mode": params.draft_mode,
            "tree_budget": params.tree_budget,
            "drafting": why(live, verified.drafting, len(nodes["ids"])),
            "root": self._token(live.sequence.root_token),
            "nodes": nodes,
            "nodes_verified": int(verdict.node_counts[place]),
            "accepted_path": follow(nodes, accepted),
            "bonus": self._token(int(verdict.bonus_tokens[place])),
            "stage_ms": {name: round(ms, 3) for name, ms in verified.stage_ms.items()},
            "cache_commit_ms": round(verdict.commit_ms, 3),
        }
        self._verified_s = time.perf_counter()

    def take(self, delta: Delta) -> list[str]:
        """The JSON of what made this delta: one entry, or none when it has no tokens.

        Entry 0 of a sequence is the prefill's token, which no round made: it has no tree.
        """
        noted, self._noted = self._noted, None
        if not delta.token_ids:
            return []
        if noted is None:
            noted = {"drafting": "prefill"}
        else:
            self._round += 1
            noted["stage_ms"]["commit"] = round((time.perf_counter() - self._verified_s) * 1e3, 3)
        texts = [self._detokenizer.push([token]) for token in delta.token_ids]
        if delta.finish_reason:
            texts[-1] += self._detokenizer.finish()
        emitted = {"ids": list(delta.token_ids), "texts": texts}
        record = {"round": self._round, **noted, "emitted": emitted, "finish_reason": delta.finish_reason}
        return [json.dumps(record, ensure_ascii=False, separators=(",", ":"))]

    def _nodes(self, live: Live, place: int, verified: Verified) -> dict[str, list[Any]]:
        trees = verified.trees
        count = int(trees.counts[place])
        ids = trees.tokens[place, :count].tolist()
        parents = trees.parents[place, :count].tolist()
        depths = trees.depths[place, :count].tolist()
        probabilities: list[float] = []
        if verified.promise is not None and live in verified.drafting:
            probabilities = verified.promise.paths[verified.drafting.index(live), :count].tolist()
        return {
            "ids": ids,
            "texts": [self._text(token) for token in ids],
            "parents": parents,
            "depths": depths,
            "path_probabilities": [float(f"{each:.4g}") for each in probabilities],
        }

    def _token(self, token: int) -> dict[str, Any]:
        return {"id": token, "text": self._text(token)}

    def _text(self, token: int) -> str:
        """What the token adds to a text; empty for special tokens."""
        if token not in self._texts:
            # After itself: decoders strip the space of the very first token.
            once = self._decoder.decode([token])
            self._texts[token] = self._decoder.decode([token, token])[len(once) :]
        return self._texts[token]


def note_round(batch: Sequence[Live], verified: Verified) -> None:
    """Let those who trace keep their part of a round; between verify and commit."""
    for place, live in enumerate(batch):
        trace = live.sink.trace
        if trace is None or int(verified.verdict.status[place]) != Status.OK:
            continue
        try:
            trace.note(live, place, len(batch), verified)
        except Exception:  # noqa: BLE001 - the round is committed in the caches: nobody's tokens may be lost
            _LOG.exception("a round cannot be traced", extra=live.log_fields)


def why(live: Live, drafting: Sequence[Live], nodes: int) -> str:
    """Say whether the round drafted for this sequence, or why not.

    Returns:
        `drafted`; `empty_tree` (candidates came, but no node was worth its cost, or no tree could be built);
        `off` (by draft mode or a budget of 0); `gave_up` (the drafter cannot hold the sequence);
        `last_token` (only one more may be emitted); `drafter_lost` (its session is opened again in the next
        round); or `paused` (drafting does not pay at the moment).
    """
    params, draft = live.sequence.params, live.draft
    if live in drafting:
        return "drafted" if nodes else "empty_tree"
    if params.draft_mode == "off" or params.tree_budget == 0:
        return "off"
    if not draft.is_wanted:
        return "gave_up"
    if live.sequence.remaining_tokens <= 1:
        return "last_token"
    return "drafter_lost" if draft.is_lost else "paused"


def follow(nodes: Mapping[str, Sequence[int]], accepted: Sequence[int]) -> list[int]:
    """The accepted path as node indices, from the child of the root on; `accepted` are its tokens."""
    children = {
        (parent, token): index
        for index, (parent, token) in enumerate(zip(nodes["parents"], nodes["ids"], strict=True), start=1)
    }
    path: list[int] = []
    for token in accepted:
        path.append(children[path[-1] if path else 0, token])
    return path
