"""Deltas to a request's responses: which arrays, in how many responses, and which one is the last.

Some clients never see an empty last response, so the final flag goes with the last data. Knows arrays and
names, not Triton: what sends them is a `Channel`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, Protocol

import numpy as np

from ddtree.detokenize import Decoder
from ddtree.errors import DDTreeError
from ddtree.events import CancelCause
from ddtree.log_probs import TokenLogProbs
from ddtree.params import GenerationParams
from ddtree.round_trace import SequenceTrace
from ddtree.sampling_spec import NO_LOG_PROBS
from ddtree.sequence import Delta, Stats

Arrays = dict[str, np.ndarray[Any, Any]]
_CANCELLED: Final = "cancelled"


class Channel(Protocol):
    """The way back to a request's caller. That the caller went away is no error and raises nothing."""

    def send(self, outputs: Arrays, *, is_final: bool) -> None:
        """Send one response."""
        ...

    def fail(self, error: DDTreeError) -> None:
        """Send an error as the last response."""
        ...

    def is_cancelled(self) -> bool:
        """Tell whether the caller went away."""
        ...


class Answer:
    """The responses of one request, whose rows end in any order; exactly one response is the last."""

    def __init__(
        self,
        channel: Channel,
        wanted: Collection[str],
        trace_decoder: Decoder | None = None,
        *,
        token_bytes: Callable[[int], bytes] | None = None,
    ) -> None:
        """Take the outputs wanted; with `trace_decoder` every row's rounds are traced in its words.

        With `token_bytes`, which gives the bytes of one id, they come beside log-probs.
        """
        self._channel = channel
        self.token_bytes = token_bytes
        self.warning = ""  # for the caller; goes with each row's last response
        self._wanted = wanted
        self._trace_decoder = trace_decoder
        self._open_rows = 0
        self._is_stopped = False
        self._has_cancelled_row = False
        self._is_over = False

    def open_row(self, row: int, params: GenerationParams, prompt_text: Callable[[], str]) -> RowSink:
        """Add a row; all rows are added before the first one emits.

        Args:
            row: its place in the request.
            params: what it asks for.
            prompt_text: gives the text of the prompt, for callers who want it back.
        """
        self._open_rows += 1
        trace = SequenceTrace(self._trace_decoder) if self._trace_decoder is not None else None
        return RowSink(self, row, params, prompt_text, trace)

    def stop(self) -> None:
        """Let all rows end as cancelled, since another request asked for it."""
        self._is_stopped = True

    @property
    def cancelled_by(self) -> CancelCause | None:
        """Why a row ended before its answer did; None when all rows came to their end."""
        if not self._has_cancelled_row:
            return None
        return "stop_request" if self._is_stopped else "client_gone"

    def note_cancelled(self) -> None:
        """Note that a row ended because nobody waits for it."""
        self._has_cancelled_row = True

    def fail(self, error: DDTreeError) -> None:
        """End the whole request with an error, unless it is over."""
        if not self._is_over:
            self._is_over = True
            self._channel.fail(error)

    def is_cancelled(self) -> bool:
        """Tell whether the rows still live have nobody to answer."""
        return self._is_over or self._is_stopped or self._channel.is_cancelled()

    def send(self, outputs: Arrays, *, is_last_of_row: bool) -> None:
        """Send one row's response, the wanted outputs of it."""
        if self._is_over:
            return
        is_final = self._open_rows == int(is_last_of_row)
        if self.warning and is_last_of_row:
            outputs = outputs | _text("warning", self.warning)
        wanted = {name: array for name, array in outputs.items() if name in self._wanted}
        self._channel.send(wanted, is_final=is_final)
        # Only now: an answer whose last response could not be made is not over, and owes its caller an error.
        self._open_rows -= is_last_of_row
        self._is_over = is_final


class RowSink:
    """Where the engine puts one row's deltas; see `ddtree.live.Sink`."""

    def __init__(
        self,
        answer: Answer,
        row: int,
        params: GenerationParams,
        prompt_text: Callable[[], str],
        trace: SequenceTrace | None = None,
    ) -> None:
        self.trace = trace
        self._rounds: list[str] = []
        self._answer = answer
        self._row = row
        self._params = params
        self._prompt_text = prompt_text
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._log_probs: list[TokenLogProbs] = []
        self._total_log_prob = 0.0

    def emit(self, delta: Delta, stats: Stats) -> None:
        """Send a delta, or keep it until the last one when the caller wants a single response."""
        if delta.finish_reason == _CANCELLED:
            self._answer.note_cancelled()
        self._texts.append(delta.text)
        self._ids += delta.token_ids
        self._log_probs += delta.log_probs
        if self.trace is not None:
            self._rounds += self.trace.take(delta)
        if not (self._params.stream or delta.finish_reason):
            return
        text, ids, log_probs = "".join(self._texts), tuple(self._ids), tuple(self._log_probs)
        self._texts.clear()
        self._ids.clear()
        self._log_probs.clear()
        sampling = self._params.sampling
        outputs = delta_outputs(
            Delta(text, ids, delta.finish_reason), stats, self._row, sampling.sequence_index
        )
        if sampling.top_log_probs != NO_LOG_PROBS:
            self._total_log_prob += sum(entry.model for entry in log_probs)
            outputs |= log_prob_outputs(log_probs, self._total_log_prob, sampling.top_log_probs)
            if self._answer.token_bytes is not None:
                outputs |= token_byte_outputs(ids[: len(log_probs)], log_probs, self._answer.token_bytes)
        if self._rounds:
            outputs |= {"trace": np.array([each.encode() for each in self._rounds], dtype=np.object_)}
            self._rounds.clear()
        if not (self._params.stream or self._params.exclude_input_in_output):
            whole = (*self._params.prompt_ids, *ids)
            outputs |= _text("text_output", self._prompt_text() + text) | _id_outputs(whole)
        self._answer.send(outputs, is_last_of_row=bool(delta.finish_reason))

    def is_cancelled(self) -> bool:
        """Tell whether nobody waits for this row any more."""
        return self._answer.is_cancelled()


def lists_outputs(wanted: Collection[str], declared: Collection[str]) -> bool:
    """Tell whether a caller listed outputs; Triton shows a request without a list as one that lists all."""
    return set(wanted) != set(declared)


def wants_trace(wanted: Collection[str], declared: Collection[str]) -> bool:
    """Tell whether a caller listed `trace`."""
    return "trace" in wanted and lists_outputs(wanted, declared)


def delta_outputs(delta: Delta, stats: Stats, row: int, sequence_index: int = 0) -> Arrays:
    """Give the outputs of one response; the totals come with the last one of a row."""
    outputs = _text("text_output", delta.text) | _text("finish_reason", delta.finish_reason)
    outputs |= _id_outputs(delta.token_ids)
    counts = {
        "batch_index": row,
        "sequence_index": sequence_index,
        "num_input_tokens": stats.prompt_tokens,
        "num_output_tokens": len(delta.token_ids),
    }
    if delta.finish_reason:
        counts["num_rounds"] = stats.rounds
        counts["total_draft_tokens"] = stats.draft_tokens
        counts["total_accepted_draft_tokens"] = stats.accepted_tokens
        outputs["acceptance_rate"] = np.array([[stats.acceptance_rate]], dtype=np.float32)
    return outputs | {name: np.array([[count]], dtype=np.int32) for name, count in counts.items()}


def log_prob_outputs(entries: Sequence[TokenLogProbs], total: float, top: int) -> Arrays:
    """Give the log-probs of a response's tokens, their sum over the sequence, and `top` alternatives."""
    outputs = {
        "output_log_probs": np.array([[[entry.model for entry in entries]]], dtype=np.float32),
        "drawn_log_probs": np.array([[[entry.drawn for entry in entries]]], dtype=np.float32),
        "cum_log_probs": np.array([[total]], dtype=np.float32),
    }
    if top:
        pairs = np.array([entry.top for entry in entries], dtype=np.float64).reshape(1, len(entries), top, 2)
        outputs["top_log_prob_ids"] = pairs[..., 0].astype(np.int32)
        outputs["top_log_probs"] = pairs[..., 1].astype(np.float32)
    return outputs


def token_byte_outputs(
    ids: Sequence[int], entries: Sequence[TokenLogProbs], token_bytes: Callable[[int], bytes]
) -> Arrays:
    """Give the bytes of a response's tokens and of their alternatives, in the order of their log-probs."""
    tops = [[token_bytes(int(token)) for token, _ in entry.top] for entry in entries]
    outputs = {"output_token_bytes": np.array([[token_bytes(each) for each in ids]], dtype=np.object_)}
    if any(tops):
        outputs["top_log_prob_bytes"] = np.array([tops], dtype=np.object_)
    return outputs


def stop_outputs() -> Arrays:
    """Give the response to a request that asked to stop another one: it has no tokens."""
    return _text("text_output", "") | _text("finish_reason", _CANCELLED)


def _id_outputs(ids: Iterable[int]) -> Arrays:
    # [row, beam, tokens] and [row, beam], as clients index them.
    output_ids = np.array([[list(ids)]], dtype=np.int32)
    return {"output_ids": output_ids, "sequence_length": np.array([[output_ids.shape[-1]]], dtype=np.int32)}


def _text(name: str, text: str) -> Arrays:
    # One dimension: existing clients join the elements of the array.
    return {name: np.array([text.encode("utf-8")], dtype=np.object_)}
