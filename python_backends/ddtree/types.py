"""The messages between the orchestrator and its stages: one frozen dataclass per direction.

Every message is packed over `S` sequences. Tensors live where the model that made them lives; whoever
carries a message between processes copies it, nobody else. Rows of context features may be references on
the way (see `feature_references`): whoever carries them cuts and joins rows, and looks into none. This
module knows no model and no transport.

Shape letters: `S` sequences, `D` draft positions, `K` candidates per position, `N` draft nodes (padded to
the widest tree of the batch), `H` hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import torch


class Status(IntEnum):
    """What became of one sequence in a stage call."""

    OK = 0
    SESSION_LOST = 1  # unknown id, another epoch, or another committed length: open it again
    POOL_FULL = 2  # no pages for what the session wants to reserve: try again when another one ends
    GRAMMAR_FAILED = 3  # the session's grammar cannot be followed any further
    UNSUPPORTED = 4  # the engine that stands in for the verifier cannot sample as the session asks
    SAMPLER_FAILED = 5  # choosing the session's tokens went wrong, by no fault of its caller


@dataclass(frozen=True)
class SessionBatch:
    """Which sessions a packed call is about, and the state the orchestrator believes them to be in."""

    ids: torch.Tensor  # [S] int64
    epochs: torch.Tensor  # [S] int32, counts re-openings
    lengths: torch.Tensor  # [S] int32, committed length before the call; 0 opens the session

    def __len__(self) -> int:
        return int(self.ids.shape[0])


def _nothing() -> torch.Tensor:
    return torch.zeros(0, dtype=torch.int32)


@dataclass(frozen=True)
class Beginnings:
    """What the sequences that open in a call begin with, so that cached pages can be found.

    A sequence that opens without is served, and shares no page with any other.
    """

    ids: torch.Tensor = field(default_factory=_nothing)  # [sum counts] int32
    counts: torch.Tensor = field(default_factory=_nothing)  # [S] int32, 0 where none opens; or no elements
    salts: tuple[str, ...] = ()  # per sequence: pages are shared only under the same salt

    def split(self) -> tuple[tuple[int, ...], ...]:
        """The ids of each sequence; nothing when nobody opens."""
        ids, start, pieces = self.ids.tolist(), 0, []
        for count in self.counts.tolist():
            pieces.append(tuple(ids[start : start + count]))
            start += count
        return tuple(pieces)


@dataclass(frozen=True)
class PrefillRequest:
    """One chunk of committed ids per sequence, to be added to the verifier's cache.

    A sequence that opens may bring all ids it is to commit as its beginning. Where some of them are cached,
    then or at a later chunk, the chunk starts after those: as many ids as it asked for, or as are left.
    """

    sessions: SessionBatch
    token_ids: torch.Tensor  # [sum counts] int32
    counts: torch.Tensor  # [S] int32, ≥ 1
    reserve: torch.Tensor  # [S] int32, KV slots the session may ever need, tree included
    # Per sequence, `SamplingSpec.to_json`, read where the session opens; absent: all are plain.
    sampling: tuple[str, ...] = ()
    beginnings: Beginnings = field(default_factory=Beginnings)


@dataclass(frozen=True)
class PrefillResult:
    """What the target says after each chunk; rows of a sequence that is not OK are zeros."""

    status: torch.Tensor  # [S] int32
    next_tokens: torch.Tensor  # [S] int32, the target's token after the chunk's last one
    log_probs: torch.Tensor  # [S, E, width] float32 of those tokens, see `log_probs`; E is 0 or 1
    features: torch.Tensor  # [sum of what was read, H] projected context features of the chunks
    # [S] int32, cached ids by which the session grew before its chunk; or no elements: none did.
    reused: torch.Tensor = field(default_factory=_nothing)


@dataclass(frozen=True)
class DraftRequest:
    """Newly committed context for the drafter and the root tokens to draft from.

    `depth == 0` only extends the context. Context ids and features are aligned; the root token has no
    feature yet, so it comes apart. A sequence that opens may bring its first ids as its beginning, and no
    context then: the answer says how much of it the drafter has cached, and what follows is owed to it.
    """

    sessions: SessionBatch  # lengths: context tokens the drafter should already hold
    context_ids: torch.Tensor  # [sum counts] int32
    context_features: torch.Tensor  # [sum counts, H]
    counts: torch.Tensor  # [S] int32, may be 0
    root_tokens: torch.Tensor  # [S] int32
    reserve: torch.Tensor  # [S] int32, slots to hold when the session opens
    depth: int  # draft positions wanted, 0..D
    width: int  # candidates wanted per position
    beginnings: Beginnings = field(default_factory=Beginnings)


def _no_edges() -> torch.Tensor:
    return torch.zeros((0, 0, 0, 0))


@dataclass(frozen=True)
class DraftResult:
    """The drafter's best candidates per position, best first.

    A drafter that scores a token given its parent adds edges: natural log, normalised over a parent's K
    children, from candidate p of position d - 1 to candidate c of position d in `[s, d, p, c]`. The root is
    the only parent at position 0 and stands as p = 0. No elements: a child is as probable under any parent.
    """

    status: torch.Tensor  # [S] int32
    top_ids: torch.Tensor  # [S, D, K] int32
    top_log_probs: torch.Tensor  # [S, D, K] float32, natural log, normalised over the whole vocabulary
    edge_log_probs: torch.Tensor = field(default_factory=_no_edges)  # [S, D, K, K] float32
    reused: torch.Tensor = field(default_factory=_nothing)  # [S] int32 cached ids, or no elements: none

    def select(self, rows: torch.Tensor) -> DraftResult:
        """The results of some sequences, `rows` int64."""
        edges = self.edge_log_probs[rows] if self.edge_log_probs.numel() else self.edge_log_probs
        reused = self.reused[rows] if self.reused.numel() else self.reused
        return DraftResult(self.status[rows], self.top_ids[rows], self.top_log_probs[rows], edges, reused)


@dataclass(frozen=True)
class TreeRequest:
    """What to build trees from.

    `budgets[s]` is the most draft nodes of sequence s; `AUTO_BUDGET` lets the builder choose by the cost
    curve; 0 gives an empty tree. A chain takes the best candidate of each position (given its parent, where
    there are edges, see `DraftResult`). A candidate of log-probability -inf is not there, edges or not.
    """

    top_ids: torch.Tensor  # [S, D, K] int32
    top_log_probs: torch.Tensor  # [S, D, K] float32
    budgets: torch.Tensor  # [S] int32
    is_chain: torch.Tensor  # [S] bool
    round_cost_ms: (
        torch.Tensor
    )  # [R] float32: a round's milliseconds when r + 1 rows are verified, R at most; any number if empty
    edge_log_probs: torch.Tensor = field(default_factory=_no_edges)  # [S, D, K, K] float32, or no elements
    others: int = 0  # sequences of the round that have no candidates: a row and a token each
    auto_limit: int = 0  # most nodes of one tree whose budget is chosen, 0 for any number


AUTO_BUDGET = -1


@dataclass(frozen=True)
class TreeBatch:
    """Draft trees. Node i (1-based; node 0 is the root) stands in column i - 1; parents precede children.

    Columns at and after `counts[s]` are padding and hold zeros. Token id 0 is a real token: only `counts`
    says what is padding.
    """

    tokens: torch.Tensor  # [S, N] int32
    parents: torch.Tensor  # [S, N] int32, node index of the parent, 0 = root, parent < own index
    depths: torch.Tensor  # [S, N] int32, 1..D
    counts: torch.Tensor  # [S] int32

    @classmethod
    def empty(cls, size: int, device: torch.device | None = None) -> TreeBatch:
        """Trees without draft nodes: verifying them is a plain decoding step."""
        nothing = torch.zeros((size, 0), dtype=torch.int32, device=device)
        return cls(nothing, nothing, nothing, torch.zeros(size, dtype=torch.int32, device=device))


@dataclass(frozen=True)
class VerifyRequest:
    """Root and draft nodes to check against the target."""

    sessions: SessionBatch
    root_tokens: torch.Tensor  # [S] int32
    trees: TreeBatch


@dataclass(frozen=True)
class VerifyResult:
    """The accepted paths, already committed in the verifier's cache."""

    status: torch.Tensor  # [S] int32
    accepted_tokens: torch.Tensor  # [S, D'] int32, zero-padded
    accepted_counts: torch.Tensor  # [S] int32
    bonus_tokens: torch.Tensor  # [S] int32
    node_counts: torch.Tensor  # [S] int32, draft nodes verified: what a grammar forbids is not
    log_probs: torch.Tensor  # [S, E, width] float32 of accepted tokens and bonus token; E may be 0
    features: torch.Tensor  # [sum (1 + accepted), H] of root and accepted path; none for a sequence not OK
    commit_ms: float


@dataclass(frozen=True)
class FeatureRequest:
    """Ask the verifier for stored context features of committed tokens `[starts, starts + counts)`."""

    sessions: SessionBatch
    starts: torch.Tensor  # [S] int32
    counts: torch.Tensor  # [S] int32


@dataclass(frozen=True)
class FeatureResult:
    """Stored features; none for a sequence that is not OK."""

    status: torch.Tensor  # [S] int32
    features: torch.Tensor  # [sum counts, H]


@dataclass(frozen=True)
class FeatureProbe:
    """Some rows by which stages try whether references to context features can be read."""

    context_features: torch.Tensor  # [rows, H]


@dataclass(frozen=True)
class Usage:
    """What a stage holds right now."""

    sessions: int
    pages_used: int  # by sessions; one that several share counts once
    pages_total: int
    pages_cached: int = 0  # full pages that no session holds, kept until somebody needs pages
    states_used: int = 0  # recurrent states, by sessions; where the target has recurrent layers
    states_total: int = 0
    snapshots: int = 0  # states that no session holds, kept for sequences that begin alike


@dataclass(frozen=True)
class VerifierInfo:
    """What the orchestrator must know of the loaded target."""

    vocab_size: int
    context_length: int  # most tokens a sequence may hold, prompt and output
    max_nodes: int  # most draft nodes one sequence may verify in a step
    pool_slots: int  # KV slots of the whole pool
    feature_size: int  # width of a projected context feature
    feature_dtype: str
    draft_hash: str  # hash of the drafter's projection this stage loaded
    cost_rows: tuple[int, ...]  # verified rows whose cost was measured at load
    cost_ms: tuple[float, ...]
    usage: Usage
    # Why the engine decodes by itself instead of verifying trees, without a drafter. Empty: it does not.
    fallback: str = ""
    shares: str = ""  # the memory in which it lets others read context features; empty: in none
    takes_all_cores: bool = False  # whether it computes on every core of the host


@dataclass(frozen=True)
class DrafterInfo:
    """What the orchestrator must know of the loaded drafter."""

    block_size: int
    draft_hash: str
    cost_ms: float  # one draft of one sequence, measured at load
    usage: Usage
    shares: str = ""  # the memory in which it can read context features of others; empty: in none
    takes_all_cores: bool = False  # whether it computes on every core of the host
