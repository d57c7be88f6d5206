"""Packs and unpacks a verifier's calls: which sequence a row belongs to. Knows no model and no cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from ddtree.accept import Acceptance
from ddtree.sessions import Session
from ddtree.tree_sampling import TargetTokens, no_log_probs
from ddtree.types import (
    FeatureRequest,
    FeatureResult,
    PrefillRequest,
    PrefillResult,
    SessionBatch,
    Status,
    TreeBatch,
    VerifyRequest,
    VerifyResult,
)

if TYPE_CHECKING:
    from ddtree.device.verify_calls import KeptPaths


@dataclass(frozen=True)
class Found:
    """What the session table says to each sequence of a call."""

    sessions: tuple[Session | None, ...]
    statuses: tuple[Status, ...]
    reused: tuple[int, ...]  # cached ids by which a session grew before its chunk

    @property
    def live(self) -> dict[int, Session]:
        """Places in the batch and sessions of those that are served."""
        return {place: session for place, session in enumerate(self.sessions) if session is not None}

    @property
    def status(self) -> torch.Tensor:
        """`[S]` int32."""
        return torch.tensor(self.statuses, dtype=torch.int32)


@dataclass(frozen=True)
class Paths:
    """Accepted paths on the host, one look at the device for all of them."""

    nodes: list[list[int]]  # root first
    tokens: list[list[int]]  # of the draft, without the root's

    @classmethod
    def of(cls, accepted: Acceptance) -> Paths:
        """Wait for the walk."""
        width = 1 + accepted.path_nodes.shape[1]
        told = (accepted.accepted_counts[:, None], accepted.path_nodes, accepted.accepted_tokens)
        rows = torch.cat(told, dim=1).tolist()
        return cls([row[1 : row[0] + 2] for row in rows], [row[width : width + row[0]] for row in rows])


def chunks(request: PrefillRequest, found: Found) -> list[list[int]]:
    """The ids that each sequence reads now: after what was cached of its prefix, where something was."""
    ids, counts = request.token_ids.tolist(), request.counts.tolist()
    pieces = []
    for place, (start, count) in enumerate(zip(starts_of(counts), counts, strict=True)):
        session = found.sessions[place]
        if session is not None and found.reused[place]:
            pieces.append(list(session.prefix.ids[session.length : session.length + count]))
        else:
            pieces.append(ids[start : start + count])
    return pieces


def session_rows(sessions: SessionBatch) -> list[tuple[int, int, int]]:
    """Id, epoch and committed length of each sequence."""
    return list(zip(sessions.ids.tolist(), sessions.epochs.tolist(), sessions.lengths.tolist(), strict=True))


def starts_of(counts: Sequence[int]) -> list[int]:
    """Where each sequence's rows begin."""
    starts, start = [], 0
    for count in counts:
        starts.append(start)
        start += count
    return starts


def select_trees(trees: TreeBatch, live: Sequence[int], device: torch.device) -> TreeBatch:
    """The trees of some sequences, on the device."""
    index = torch.tensor(live)
    fields = (trees.tokens, trees.parents, trees.depths, trees.counts)
    return TreeBatch(*(field[index].to(device) for field in fields))


def parts(request: VerifyRequest, most_rows: int | None) -> list[VerifyRequest]:
    """Divide a call into ones of at most so many rows, roots included; a sequence stays in one piece."""
    if most_rows is None:
        return [request]
    rows = (request.trees.counts + 1).tolist()
    if sum(rows) <= most_rows:
        return [request]
    groups: list[list[int]] = [[]]
    room = most_rows
    for index, count in enumerate(rows):
        if count > room and groups[-1]:
            groups.append([])
            room = most_rows
        groups[-1].append(index)
        room -= count
    return [_part(request, torch.tensor(group)) for group in groups]


def _part(request: VerifyRequest, index: torch.Tensor) -> VerifyRequest:
    sessions, trees = request.sessions, request.trees
    widest = int(trees.counts[index].max())
    tokens, parents, depths = (field[index, :widest] for field in (trees.tokens, trees.parents, trees.depths))
    return VerifyRequest(
        SessionBatch(sessions.ids[index], sessions.epochs[index], sessions.lengths[index]),
        request.root_tokens[index],
        TreeBatch(tokens, parents, depths, trees.counts[index]),
    )


def joined(results: Sequence[VerifyResult]) -> VerifyResult:
    """The results of a call's parts as one."""

    def together(name: str) -> torch.Tensor:
        pieces = [getattr(result, name) for result in results]
        sizes = [max(piece.shape[axis] for piece in pieces) for axis in range(1, pieces[0].dim())]
        padded = []
        for piece in pieces:
            missing = [(0, size - own) for size, own in zip(sizes, piece.shape[1:], strict=True)]
            padded.append(functional.pad(piece, [n for pair in reversed(missing) for n in pair]))
        return torch.cat(padded)

    names = [field.name for field in fields(VerifyResult) if field.name != "commit_ms"]
    commit_ms = sum(result.commit_ms for result in results)
    return VerifyResult(**{name: together(name) for name in names}, commit_ms=commit_ms)


def status_of(found: Sequence[Session | None]) -> torch.Tensor:
    """`[S]` int32: whose sessions are there."""
    return torch.tensor(
        [Status.OK if session is not None else Status.SESSION_LOST for session in found], dtype=torch.int32
    )


def nothing_prefilled(found: Found, features: torch.Tensor) -> PrefillResult:
    """The result when no sequence could be prefilled; `features` are zeros."""
    status = found.status
    return PrefillResult(
        status, torch.zeros_like(status), no_log_probs(len(status)), features, torch.zeros_like(status)
    )


def prefilled(found: Found, first: TargetTokens, features: torch.Tensor) -> PrefillResult:
    """Put what the target says after each live sequence's chunk to its place in the batch."""
    status, index = found.status, torch.tensor(list(found.live))
    next_tokens = torch.zeros_like(status)
    next_tokens[index] = first.tokens[:, 0].to("cpu", torch.int32)
    entries = torch.zeros((len(status), *first.log_probs.shape[1:]))
    entries[index] = first.log_probs.cpu()
    for at, why in first.failed.items():
        status[index[at]] = why
    reused = torch.tensor(found.reused, dtype=torch.int32)
    return PrefillResult(status, next_tokens, entries, features, reused)


def stored(request: FeatureRequest, found: Sequence[Session | None], features: torch.Tensor) -> FeatureResult:
    """What the pool's `features` `[slots, H]` hold of tokens that are committed."""
    pieces, status = [features[:0]], []
    spans = zip(found, request.starts.tolist(), request.counts.tolist(), strict=True)
    for session, start, count in spans:
        is_there = session is not None and start + count <= session.length
        status.append(Status.OK if is_there else Status.SESSION_LOST)
        if session is not None and is_there:
            pieces.append(features[session.pages.slots[start : start + count]])
    return FeatureResult(torch.tensor(status, dtype=torch.int32), torch.cat(pieces))


def nothing_verified(status: torch.Tensor, features: torch.Tensor) -> VerifyResult:
    """The result when no sequence could be verified; `features` has no rows."""
    zeros = torch.zeros(len(status), dtype=torch.int32)
    return VerifyResult(
        status=status,
        accepted_tokens=zeros[:, None][:, :0],
        accepted_counts=zeros,
        bonus_tokens=zeros,
        node_counts=zeros,
        log_probs=no_log_probs(len(status)),
        features=features,
        commit_ms=0.0,
    )


def kept(
    status: torch.Tensor,
    live: Sequence[int],
    node_counts: torch.Tensor,
    paths: KeptPaths,
    commits: Sequence[Status],
) -> VerifyResult:
    """Put paths that a captured call kept to the places of the live sequences in the batch."""
    index = torch.tensor(live)

    def place(values: torch.Tensor) -> torch.Tensor:
        if len(live) == len(status):
            return values
        spread = torch.zeros((len(status), *values.shape[1:]), dtype=torch.int32)
        spread[index] = values
        return spread

    status[index] = torch.tensor(commits, dtype=torch.int32)
    lengths = zip(paths.accepted_counts.tolist(), commits, strict=True)
    pieces = [paths.features[at, : n + 1] for at, (n, what) in enumerate(lengths) if what == Status.OK]
    return VerifyResult(
        status=status,
        accepted_tokens=place(torch.from_numpy(paths.accepted_tokens)),
        accepted_counts=place(torch.from_numpy(paths.accepted_counts)),
        bonus_tokens=place(torch.from_numpy(paths.bonus_tokens)),
        node_counts=place(node_counts),
        log_probs=no_log_probs(len(status)),
        features=torch.cat([paths.features[0, :0], *pieces]),  # a copy: the next call writes there again
        commit_ms=paths.keep_ms,
    )


def verified(
    status: torch.Tensor,
    live: Sequence[int],
    node_counts: torch.Tensor,
    target: TargetTokens,
    accepted: Acceptance,
    features: torch.Tensor,
    commit_ms: float,
) -> VerifyResult:
    """Put the results of the live sequences back to their places in the batch."""
    index = torch.tensor(live)

    def place(values: torch.Tensor, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        spread = torch.zeros((len(status), *values.shape[1:]), dtype=dtype)
        spread[index] = values.to("cpu", dtype)
        return spread

    if target.failed:
        for at, why in target.failed.items():
            status[index[at]] = why
        pieces = features.split((accepted.accepted_counts + 1).tolist())
        features = torch.cat([piece for at, piece in enumerate(pieces) if at not in target.failed])
    return VerifyResult(
        status=status,
        accepted_tokens=place(accepted.accepted_tokens),
        accepted_counts=place(accepted.accepted_counts),
        bonus_tokens=place(accepted.bonus_tokens),
        node_counts=place(node_counts),
        log_probs=place(target.log_probs, torch.float32),
        features=features,
        commit_ms=commit_ms,
    )
