"""The native chain behind the stage contract: TensorRT-LLM's own DFlash decoding, asked for its tokens.

Stands in for the tree verifier where the private calls do not fit. Only public API is used: one streaming
request per session, which drafts and verifies chains inside the engine. A verify call hands on what the
engine's next step emitted, as accepted tokens and a bonus token; no tree reaches the engine, and no hidden
states come out, so the orchestrator does not ask its own drafter (`VerifierInfo.fallback`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ddtree.sampling_spec import NO_LOG_PROBS, SamplingSpec
from ddtree.trtllm.library import Library
from ddtree.types import (
    FeatureRequest,
    FeatureResult,
    PrefillRequest,
    PrefillResult,
    SessionBatch,
    Status,
    Usage,
    VerifierInfo,
    VerifyRequest,
    VerifyResult,
)

_NO_END = -1  # an end id that no token has: where a sequence ends is the orchestrator's business


@dataclass(frozen=True)
class NativeSizes:
    """What the engine is built for and what the stage says of itself."""

    vocab_size: int
    context_length: int
    max_nodes: int
    max_sequences: int
    draft_len: int  # draft tokens of one engine step
    feature_size: int
    feature_dtype: torch.dtype
    draft_hash: str
    session_ttl_s: float


@dataclass
class _Session:
    epoch: int
    limit: int  # most tokens, prompt and output
    spec: SamplingSpec
    ids: list[int] = field(default_factory=list)  # committed
    stream: Any = None
    taken: int = 0  # tokens of the stream that were handed on
    root: int | None = None  # the last one handed on, committed with the next call
    last_used: float = field(default_factory=time.monotonic)


class NativeChainVerifier:
    """Sessions over an engine that decodes by itself. One call at a time."""

    def __init__(self, library: Library, target: Path, draft: Path, sizes: NativeSizes, reason: str) -> None:
        """Start the engine.

        Args:
            library: the installed library.
            target: checkpoint folder of the target.
            draft: checkpoint folder of the DFlash draft.
            sizes: sizes.
            reason: why trees are not verified; the orchestrator tells it.
        """
        self._library = library
        self._sizes = sizes
        self._reason = reason
        self._sessions: dict[int, _Session] = {}
        self.feature_dtype = sizes.feature_dtype
        self._llm = library["LLM"](
            model=str(target),
            speculative_config=library["DFlashDecodingConfig"](
                max_draft_len=sizes.draft_len, speculative_model=str(draft)
            ),
            max_seq_len=sizes.context_length,
            max_batch_size=sizes.max_sequences,
            kv_cache_config=library["NativeKvCacheConfig"](free_gpu_memory_fraction=0.8),
        )

    def info(self) -> VerifierInfo:
        """What the orchestrator must know."""
        sizes = self._sizes
        return VerifierInfo(
            vocab_size=sizes.vocab_size,
            context_length=sizes.context_length,
            max_nodes=sizes.max_nodes,
            # The engine admits and evicts by itself; as far as the orchestrator goes, everything fits.
            pool_slots=sizes.max_sequences * sizes.context_length + sizes.max_nodes + 1,
            feature_size=sizes.feature_size,
            feature_dtype=str(sizes.feature_dtype).removeprefix("torch."),
            draft_hash=sizes.draft_hash,
            cost_rows=(1,),
            cost_ms=(1.0,),
            usage=self.usage(),
            fallback=self._reason,
        )

    def usage(self) -> Usage:
        """Sessions held, those past their time dropped; their pages are the engine's and not counted."""
        deadline = time.monotonic() - self._sizes.session_ttl_s
        for session_id in [key for key, value in self._sessions.items() if value.last_used < deadline]:
            _end(self._sessions.pop(session_id))
        return Usage(len(self._sessions), 0, self._sizes.max_sequences)

    def release(self, session_ids: Sequence[int]) -> Usage:
        """Drop sessions; unknown ids are ignored."""
        for session_id in session_ids:
            session = self._sessions.pop(session_id, None)
            if session is not None:
                _end(session)
        return self.usage()

    def prefill(self, request: PrefillRequest) -> PrefillResult:
        """Add a chunk of committed ids to each session and say what the engine emits after it.

        Whether a chunk is a prompt's last is not told, so each starts the engine's request anew; its cache of
        prefixes makes that cheap.
        """
        statuses, tokens, start = [], [], 0
        ids = request.token_ids.tolist()
        for index, count in enumerate(request.counts.tolist()):
            chunk = ids[start : start + count]
            start += count
            session, status = self._open_or_find(request, index)
            token = 0
            if session is not None:
                session.ids += chunk
                self._start(session)
                (token,) = self._take(session, at_most=1)
            statuses.append(status)
            tokens.append(token)
        features = torch.zeros((start, self._sizes.feature_size), dtype=self.feature_dtype)
        return PrefillResult(_int32(statuses), _int32(tokens), _no_log_probs(len(tokens)), features)

    def verify(self, request: VerifyRequest) -> VerifyResult:
        """Hand on what the engine emitted next; the trees are not looked at."""
        statuses, roots = [], request.root_tokens.tolist()
        emitted: list[list[int]] = []
        for index, row in enumerate(_rows(request.sessions)):
            session = self._find(*row)
            statuses.append(Status.SESSION_LOST if session is None else Status.OK)
            if session is None:
                emitted.append([])
                continue
            session.ids.append(roots[index])
            if session.root != roots[index]:
                self._start(session)  # the caller went another way than the stream
            tokens = self._take(session, at_most=self._sizes.draft_len + 1)
            session.ids += tokens[:-1]
            emitted.append(tokens)
        return self._verified(statuses, emitted)

    def read_features(self, request: FeatureRequest) -> FeatureResult:
        """There are none."""
        lost = torch.full_like(request.counts, int(Status.SESSION_LOST))
        return FeatureResult(lost, torch.zeros((0, self._sizes.feature_size), dtype=self.feature_dtype))

    def _open_or_find(self, request: PrefillRequest, index: int) -> tuple[_Session | None, Status]:
        session_id, epoch, length = _rows(request.sessions)[index]
        if length:
            session = self._find(session_id, epoch, length)
            return session, Status.SESSION_LOST if session is None else Status.OK
        held = self._sessions.get(session_id)
        if held is not None and held.epoch > epoch:  # a late call of an earlier life
            return None, Status.SESSION_LOST
        self.release([session_id])
        spec = SamplingSpec.from_json(request.sampling[index] if request.sampling else "")
        if not _is_served(spec):
            return None, Status.UNSUPPORTED
        session = _Session(epoch, min(int(request.reserve[index]), self._sizes.context_length), spec)
        self._sessions[session_id] = session
        return session, Status.OK

    def _find(self, session_id: int, epoch: int, length: int) -> _Session | None:
        session = self._sessions.get(session_id)
        if session is None or session.epoch != epoch or len(session.ids) != length:
            return None
        session.last_used = time.monotonic()
        return session

    def _start(self, session: _Session) -> None:
        """Ask the engine to go on after the committed ids."""
        _end(session)
        spec = session.spec
        seed = spec.seed + spec.sequence_index
        chosen: dict[str, Any] = {"temperature": spec.temperature, "top_p": spec.top_p, "seed": seed}
        if spec.top_k:
            chosen["top_k"] = spec.top_k
        session.stream = self._llm.generate_async(
            inputs=list(session.ids),
            sampling_params=self._library["SamplingParams"](
                max_tokens=max(1, session.limit - len(session.ids)),
                end_id=_NO_END,
                **(chosen if spec.temperature else {}),
            ),
            streaming=True,
        )
        session.taken = 0

    def _take(self, session: _Session, *, at_most: int) -> list[int]:
        """At least one token and no more than one step's; waits for the engine where none is there."""
        if session.taken == self._count(session) and next(session.stream, None) is None:
            self._start(session)
            next(session.stream)
        tokens = list(session.stream.outputs[0].token_ids[session.taken : session.taken + at_most])
        assert tokens, "the engine answered without a token"
        session.taken += len(tokens)
        session.root = tokens[-1]
        return tokens

    @staticmethod
    def _count(session: _Session) -> int:
        return len(session.stream.outputs[0].token_ids)

    def _verified(self, statuses: Sequence[Status], emitted: Sequence[Sequence[int]]) -> VerifyResult:
        counts = [max(0, len(tokens) - 1) for tokens in emitted]
        accepted = torch.zeros((len(emitted), max(counts, default=0)), dtype=torch.int32)
        for row, tokens in enumerate(emitted):
            accepted[row, : counts[row]] = _int32(tokens[: counts[row]])
        rows = sum(len(tokens) for tokens in emitted)
        drafts = [self._sizes.draft_len if tokens else 0 for tokens in emitted]
        return VerifyResult(
            status=_int32(statuses),
            accepted_tokens=accepted,
            accepted_counts=_int32(counts),
            bonus_tokens=_int32([tokens[-1] if tokens else 0 for tokens in emitted]),
            node_counts=_int32(drafts),
            log_probs=_no_log_probs(len(emitted)),
            features=torch.zeros((rows, self._sizes.feature_size), dtype=self.feature_dtype),
            commit_ms=0.0,
        )


def _end(session: _Session) -> None:
    if session.stream is not None:
        session.stream.abort()


def _is_served(spec: SamplingSpec) -> bool:
    """Whether the engine's own sampling means the same; its random numbers are others in any case."""
    is_bare = not (spec.has_penalty or spec.logit_bias or spec.bad_words or spec.min_p or spec.min_tokens)
    return is_bare and spec.grammar is None and spec.top_log_probs == NO_LOG_PROBS


def _rows(sessions: SessionBatch) -> list[tuple[int, int, int]]:
    return list(zip(sessions.ids.tolist(), sessions.epochs.tolist(), sessions.lengths.tolist(), strict=True))


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor([int(value) for value in values], dtype=torch.int32)


def _no_log_probs(size: int) -> torch.Tensor:
    return torch.zeros((size, 0, 0))
