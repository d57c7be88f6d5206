"""What the client takes and gives: options of a request, chunks of an answer, its statistics.

Plain data; nothing here knows Triton, gRPC or tensor names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

DraftMode = Literal["tree", "chain", "off"]
Message = Mapping[str, str]
"""One turn of a conversation: ``{"role": "user", "content": "…"}``."""
TracedRound = Mapping[str, Any]
"""A round as the server traced it: its tree, the accepted path, its times; see the server's docs/TRACE.md."""


class GenerateOptions(TypedDict, total=False):
    """Options of a request.

    All may be absent or None: the server then uses its default (greedy, 16 tokens).
    """

    max_tokens: int | None
    """Most tokens to generate."""
    stop: str | Sequence[str] | None
    """Strings that end the answer; they are not part of it."""
    bad_words: str | Sequence[str] | None
    """Strings that must not be generated."""
    draft_mode: DraftMode | str | None
    """``tree`` (default), ``chain`` (linear drafts) or ``off`` (plain decoding). The output is the same."""
    tree_budget: int | None
    """Most draft nodes in a tree, the root not counted; absent or -1: the server chooses."""
    temperature: float | None
    """0 or absent: greedy. The other settings of sampling are in the server's docs/SAMPLING.md."""
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    """Same seed, same answer, however it is drafted; absent: a new one each time."""
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    """Added to the logit of a token id."""
    min_tokens: int | None
    stop_token_ids: Sequence[int] | None
    """Token ids that end the answer, besides the model's own."""
    return_log_probs: bool | None
    """Give the log-probability of every token with its chunk."""
    num_return_sequences: int | None
    """Sequences per row, above 1 only with a temperature; row i's are the results i * n to i * n + n - 1."""
    chat_template_kwargs: Mapping[str, object] | None
    """With ``messages``: variables of the model's chat template, e.g. ``{"enable_thinking": False}``."""
    deadline_ms: int | None
    """The server ends the answer so long after its arrival, with what there is, and reason ``deadline``."""
    cache_salt: str | None
    """Prompts share cached pages of a common beginning only with prompts of the same salt."""
    num_top_log_probs: int | None
    """With them, the most probable tokens at each place: 0 to 20."""
    guided_json: str | Mapping[str, object] | None
    """A JSON schema that the answer must match. At most one of the four is given."""
    guided_regex: str | None
    """A regular expression that the whole answer must match."""
    guided_grammar: str | None
    """An EBNF (with ``::=``) or Lark grammar that the answer must match."""
    guided_choice: Sequence[str] | None
    """The answer is one of these strings."""
    trace: bool | None
    """Give with every chunk the rounds that made it (``Chunk.trace``)."""
    ignore_eos: bool | None
    """Go on after the model's stop token, to measure with a fixed length."""


@dataclass(frozen=True)
class Tls:
    """PEM files of an encrypted connection.

    With a key and a chain the client proves who it is (mutual TLS).
    """

    root_certificates: Path | None = None
    private_key: Path | None = None
    certificate_chain: Path | None = None


@dataclass(frozen=True)
class TokenLogProbs:
    """Natural log-probabilities of one emitted token."""

    model: float  # by the model, before temperature and everything else
    drawn: float  # in the distribution it was drawn from; 0 at temperature 0
    top: tuple[tuple[int, float], ...]  # the model's most probable tokens, (id, log-probability)
    token: bytes = b""  # which need not be whole characters
    top_tokens: tuple[bytes, ...] = ()  # one per entry of top


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer, as it arrived. The texts of a row's chunks, joined, are the answer."""

    text: str
    token_ids: tuple[int, ...]
    row: int  # of the request; with num_return_sequences n, row * n + the sequence's index
    final: bool  # the row's last chunk
    finish_reason: str  # "stop", "length", "cancelled" or "deadline" on the last, "" before
    elapsed_s: float  # since the request was sent
    log_probs: tuple[TokenLogProbs, ...] = ()  # one per token id, when asked for
    trace: tuple[TracedRound, ...] = ()  # the rounds it is made of, when asked for


@dataclass(frozen=True)
class Stats:
    """Numbers of one answer. Times are the client's, in seconds since the request was sent."""

    input_tokens: int
    output_tokens: int
    rounds: int
    accepted_draft_tokens: int
    draft_tokens: int
    first_chunk_tokens: int  # tokens that had arrived at time_to_first_token_s
    time_to_first_token_s: float
    total_s: float

    @property
    def acceptance_length(self) -> float | None:
        """Tokens emitted per round, without the first, which the prefill emits; None without rounds."""
        return (self.output_tokens - 1) / self.rounds if self.rounds > 0 else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted draft tokens as a share of all draft tokens; None when nothing was drafted."""
        return self.accepted_draft_tokens / self.draft_tokens if self.draft_tokens > 0 else None

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed: tokens after the first chunk over the time after it; None with a single chunk."""
        duration = self.total_s - self.time_to_first_token_s
        tokens = self.output_tokens - self.first_chunk_tokens
        return tokens / duration if tokens > 0 and duration > 0 else None


@dataclass(frozen=True)
class Result:
    """A complete answer; ``warning`` is what the server says about its speed, mostly nothing."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stats: Stats
    log_probs: tuple[TokenLogProbs, ...] = ()  # one per token id, when asked for
    trace: tuple[TracedRound, ...] = ()  # the rounds it is made of, when asked for
    warning: str = ""
