"""One live sequence: what was generated so far, what of it may be shown, and when it ends.

Trims a round's tokens at the first stop id, at the token that completes a stop string, and at
`max_tokens`. Knows nothing of stages, batches or transports.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from ddtree.detokenize import Decoder, IncrementalDetokenizer
from ddtree.log_probs import TokenLogProbs
from ddtree.params import GenerationParams
from ddtree.stops import StopFinder, StopScan

Ending = Literal["cancelled", "deadline"]  # from outside, wherever the sequence stands
FinishReason = Literal["", "stop", "length"] | Ending


class SequenceState(Enum):
    """Where a sequence stands in its life."""

    WAITING = "waiting"  # no stage knows it
    PREFILLING = "prefilling"  # some committed ids are not in the verifier's cache yet
    DECODING = "decoding"  # takes part in rounds
    FINISHED = "finished"


@dataclass(frozen=True)
class Delta:
    """What one round adds to the answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason = ""  # empty while the sequence goes on
    log_probs: tuple[TokenLogProbs, ...] = ()  # one per token id, or none when nobody asked


@dataclass(frozen=True)
class Stats:
    """What a sequence cost and gave so far; times are of the monotonic clock."""

    prompt_tokens: int
    arrival_ns: int
    first_token_ns: int = 0  # 0 until there is one
    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0  # only those emitted: a stop inside the path must not inflate it
    emitted_tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Emitted draft tokens over drafted ones; 0 without drafts."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens per round; 0 before the first. The prefill's token belongs to no round."""
        return (self.emitted_tokens - 1) / self.rounds if self.rounds else 0.0


class Sequence:
    """The orchestrator's view of one sequence; the scheduler owns `state`, `epoch` and the order of calls."""

    def __init__(
        self,
        params: GenerationParams,
        session_id: int,
        decoder: Decoder,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.params = params
        self.session_id = session_id
        self.epoch = 0
        self.state = SequenceState.WAITING
        self.output_ids: list[int] = []
        self.stats = Stats(prompt_tokens=len(params.prompt_ids), arrival_ns=clock())
        self._clock = clock
        self._stop_ids = frozenset() if params.ignore_eos else params.stop_ids
        self._detokenizer = IncrementalDetokenizer(decoder)
        self._stops = StopFinder(params.stop_strings)

    @property
    def is_finished(self) -> bool:
        """Tell whether the last delta was given."""
        return self.state is SequenceState.FINISHED

    @property
    def all_ids(self) -> list[int]:
        """Prompt and output; the last output id is the root token, whose KV is not committed yet."""
        return [*self.params.prompt_ids, *self.output_ids]

    @property
    def length(self) -> int:
        """How many ids `all_ids` has, without building it."""
        return len(self.params.prompt_ids) + len(self.output_ids)

    @property
    def root_token(self) -> int:
        """The last output id, from which the next round drafts."""
        assert self.output_ids, "there is no root token before the prefill's first token"
        return self.output_ids[-1]

    @property
    def remaining_tokens(self) -> int:
        """How many more tokens may be emitted."""
        return self.params.max_tokens - len(self.output_ids)

    def append(
        self,
        tokens: Tokens[int],
        draft_tokens: int | None = None,
        log_probs: Tokens[TokenLogProbs] = (),
    ) -> Delta:
        """Take the accepted tokens and the bonus token of a round, or the prefill's token.

        Args:
            tokens: in order, the bonus token last; at least one.
            draft_tokens: how many draft nodes the round verified; None for the prefill's token, which no
                round made.
            log_probs: one per token, or none.

        Returns:
            The new text and the tokens kept. With a finish reason it is the last delta.
        """
        assert tokens, "a round always yields its bonus token"
        assert not self.is_finished, f"session {self.session_id} is finished"
        kept, text, reason = self._take(tokens)
        self.output_ids += kept
        if reason:
            self.state = SequenceState.FINISHED
        self._count(kept, accepted=min(len(kept), len(tokens) - 1), draft_tokens=draft_tokens)
        return Delta(text, tuple(kept), reason, tuple(log_probs[: len(kept)]))

    def end(self, reason: Ending) -> Delta:
        """End the sequence where it stands and give what text was held back."""
        assert not self.is_finished, f"session {self.session_id} is finished"
        self.state = SequenceState.FINISHED
        text, _ = self._flush()
        return Delta(text, (), reason)

    def _take(self, tokens: Tokens[int]) -> tuple[list[int], str, FinishReason]:
        left = self.remaining_tokens
        kept, end = list(tokens[:left]), None
        if not self._stop_ids.isdisjoint(kept):
            end = next(place for place, token in enumerate(kept) if token in self._stop_ids)
            del kept[end + 1 :]
        # All at once, unless a stop string is in the text: decoding is most of a round's time here.
        ahead = self._detokenizer.fork() if self._stops.is_looking else self._detokenizer
        text = ahead.push(kept[:end])
        is_early = len(self.output_ids) < self.params.sampling.min_tokens
        if is_early and self._stops.may_find(text):
            return self._take_one_by_one(kept)
        scan = self._stops.push(text)
        if scan.stop is not None:
            return self._take_one_by_one(kept)
        self._detokenizer = ahead
        if end is None and len(kept) < left:
            return kept, scan.text, ""
        rest, is_stop = self._flush()
        return kept, scan.text + rest, "length" if end is None and not is_stop else "stop"

    def _take_one_by_one(self, tokens: Tokens[int]) -> tuple[list[int], str, FinishReason]:
        """Take tokens so that the one that completes a stop string is known."""
        kept: list[int] = []
        text = ""
        for token in tokens:
            kept.append(token)
            if token in self._stop_ids:
                rest, _ = self._flush()
                return kept, text + rest, "stop"
            piece = self._detokenizer.push([token])
            if len(self.output_ids) + len(kept) <= self.params.sampling.min_tokens:
                scan = StopScan(piece, None)
            else:
                scan = self._stops.push(piece)
            text += scan.text
            if scan.stop is not None:
                return kept, text, "stop"
            if len(kept) == self.remaining_tokens:
                rest, is_stop = self._flush()
                return kept, text + rest, "stop" if is_stop else "length"
        return kept, text, ""

    def _flush(self) -> tuple[str, bool]:
        """Give the held-back text, and whether a stop string was still in it."""
        scan = self._stops.push(self._detokenizer.finish())
        if scan.stop is not None:
            return scan.text, True
        return scan.text + self._stops.finish(), False

    def _count(self, kept: list[int], accepted: int, draft_tokens: int | None) -> None:
        before = self.stats
        is_round = draft_tokens is not None
        # Made anew rather than by `replace`, which takes several times as long: this is done for every round.
        self.stats = Stats(
            prompt_tokens=before.prompt_tokens,
            arrival_ns=before.arrival_ns,
            first_token_ns=before.first_token_ns or self._clock(),
            rounds=before.rounds + is_round,
            draft_tokens=before.draft_tokens + (draft_tokens or 0),
            accepted_tokens=before.accepted_tokens + (accepted if is_round else 0),
            emitted_tokens=before.emitted_tokens + len(kept),
        )
