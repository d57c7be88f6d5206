"""The stages' messages with references in place of context features, where both stages share memory.

A `[rows, H]` tensor becomes one of references, which whoever carries it divides and joins like rows and need
not understand. The verifier makes them of what its sessions hold after a call, the drafter reads the rows
before one. A sequence whose references are stale is lost to the drafter, as if it had been forgotten:
the orchestrator opens it again and has its context read back. Knows no transport.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import numpy as np
import torch

from ddtree.draft import Drafter
from ddtree.errors import InvalidArgument, Unavailable
from ddtree.sessions import Session
from ddtree.shared_features import REFERENCE_BYTES, FeatureReader, NotShared, SharedFeatures, Span
from ddtree.trtllm.native import NativeChainVerifier
from ddtree.types import (
    DraftRequest,
    FeatureProbe,
    FeatureRequest,
    FeatureResult,
    PrefillRequest,
    PrefillResult,
    SessionBatch,
    Status,
    VerifyRequest,
    VerifyResult,
)
from ddtree.verify import TargetVerifier

_LOG = logging.getLogger(__name__)
_Result = TypeVar("_Result", PrefillResult, VerifyResult, FeatureResult)
_NOBODYS_LENGTH: Final = 2**31 - 1  # a committed length that no session has


class VerifierReferences:
    """The verifier's answers with references; as they are where it shares nothing."""

    def __init__(self, shared: SharedFeatures | None, sessions: Iterable[Session]) -> None:
        """Take what is shared, and the verifier's sessions, whose rows are there."""
        self._shared = shared
        self._sessions = sessions

    @classmethod
    def of(cls, verifier: TargetVerifier | NativeChainVerifier, choice: str) -> VerifierReferences:
        """Share a loaded verifier's features as the setting says: always, never, or on a GPU (`auto`)."""
        if not isinstance(verifier, TargetVerifier) or not _is_wanted(choice, verifier.pool.features.device):
            return cls(None, ())
        try:
            return cls(SharedFeatures(verifier.pool), verifier.sessions)
        except NotShared as error:
            _LOG.warning("context features cross by value: %s", error)
            return cls(None, ())

    @property
    def place(self) -> str:
        """The memory they are in; empty: they are not shared."""
        return self._shared.place if self._shared else ""

    def probe(self, *, by_reference: bool) -> FeatureProbe:
        """Some rows, or references to them.

        Raises:
            Unavailable: nothing is shared.
        """
        if self._shared is None:
            raise Unavailable("this verifier shares no context features")
        rows, references = self._shared.probe()
        return FeatureProbe(references if by_reference else rows)

    def prefilled(self, request: PrefillRequest, result: PrefillResult) -> PrefillResult:
        """Refer to the chunks that were read; rows of a sequence that is not OK are nobody's."""
        reused = result.reused.tolist() or [0] * len(request.sessions)
        starts = [
            length + cached for length, cached in zip(request.sessions.lengths.tolist(), reused, strict=True)
        ]
        held = self._held(request.sessions, result.status)
        spans = [
            count if session is None else Span(session.pages.indices, start, session.length)
            for session, start, count in zip(held, starts, request.counts.tolist(), strict=True)
        ]
        # One whose session ended in this call may have read less than it asked for: nobody can say any more.
        return self._referring(result, spans, len(result.features))

    def verified(self, request: VerifyRequest, result: VerifyResult) -> VerifyResult:
        """Refer to root and accepted path of each sequence."""
        held = self._held(request.sessions, result.status)
        spans = [
            Span(session.pages.indices, session.length - accepted - 1, session.length)
            for session, accepted in zip(held, result.accepted_counts.tolist(), strict=True)
            if session is not None
        ]
        return self._referring(result, spans, len(result.features))

    def read(self, request: FeatureRequest, result: FeatureResult) -> FeatureResult:
        """Refer to stored features."""
        held = self._held(request.sessions, result.status)
        spans = [
            Span(session.pages.indices, start, start + count)
            for session, start, count in zip(
                held, request.starts.tolist(), request.counts.tolist(), strict=True
            )
            if session is not None
        ]
        return self._referring(result, spans, len(result.features))

    def _held(self, sessions: SessionBatch, status: torch.Tensor) -> list[Session | None]:
        """The session of each sequence that is OK."""
        by_id = {session.session_id: session for session in self._sessions}
        rows = zip(sessions.ids.tolist(), status.tolist(), strict=True)
        return [by_id.get(session_id) if what == Status.OK else None for session_id, what in rows]

    def _referring(self, result: _Result, spans: Sequence[Span | int], rows: int) -> _Result:
        """The result with references for its features, by value where these would be another number."""
        if self._shared is None:
            return result
        references = self._shared.refer(spans)
        return replace(result, features=references) if len(references) == rows else result


class DrafterReferences:
    """The drafter's calls with the rows that references mean."""

    def __init__(self, reader: FeatureReader | None, *, is_wanted: bool) -> None:
        """Take what reads rows; None: none of them is ever a reference."""
        self._reader = reader
        self._is_wanted = is_wanted

    @classmethod
    def of(cls, drafter: Drafter, choice: str) -> DrafterReferences:
        """Read for a loaded drafter; it says so as the setting says, see `VerifierReferences.of`."""
        device, dtype = drafter.pool.features.device, drafter.feature_dtype
        is_told_apart = drafter.model.config.hidden_size * dtype.itemsize != REFERENCE_BYTES
        reader = FeatureReader(device, dtype) if is_told_apart else None
        return cls(reader, is_wanted=_is_wanted(choice, device))

    @property
    def place(self) -> str:
        """The memory it can read references to; empty: it reads none."""
        return self._reader.place if self._reader and self._is_wanted else ""

    def probe(self, request: FeatureProbe) -> FeatureProbe:
        """The rows that references mean.

        Raises:
            Unavailable: they cannot be read.
        """
        try:
            assert self._reader is not None, "who reads nothing is not asked"
            rows, is_fresh = self._reader.read(_references(request.context_features))
        except NotShared as error:
            raise Unavailable(str(error)) from error
        return FeatureProbe(rows[torch.from_numpy(is_fresh)])

    def resolved(self, request: DraftRequest) -> DraftRequest:
        """The request with context features, whether it brings them or references to them.

        A sequence of which a reference is stale gets a length that no session has, so it is answered lost.

        Raises:
            InvalidArgument: the counts do not divide the rows.
        """
        rows = request.context_features
        if self._reader is None or not len(rows) or rows.shape[1] * rows.itemsize != REFERENCE_BYTES:
            return request
        counts = request.counts.numpy().astype(np.int64)
        if (counts < 0).any() or counts.sum() != len(rows):
            raise InvalidArgument.of(
                "counts",
                f"must be 0 or more each and add up to the {len(rows)} rows of context_features",
                counts.tolist(),
                "send a count for every sequence",
            )
        try:
            rows, is_fresh = self._reader.read(_references(rows))
        except NotShared as error:
            _LOG.warning("%s", error)
            is_fresh = np.zeros(len(rows), dtype=np.bool_)
        places = np.repeat(np.arange(len(counts)), counts)
        stale = torch.from_numpy(np.unique(places[~is_fresh]))
        lengths = request.sessions.lengths.clone()
        lengths[stale] = _NOBODYS_LENGTH
        if len(stale):
            _LOG.info("the context features of %d sequences are not there any more", len(stale))
        return replace(request, context_features=rows, sessions=replace(request.sessions, lengths=lengths))


def _is_wanted(choice: str, device: torch.device) -> bool:
    return choice == "always" or (choice == "auto" and device.type == "cuda")


def _references(rows: torch.Tensor) -> torch.Tensor:
    """`[n, 4]` int64 of what crossed as values of some other type."""
    return rows.contiguous().view(torch.uint8).view(torch.int64)
