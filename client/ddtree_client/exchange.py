"""One request and its answer, without any input or output of its own.

An `Exchange` is fed the responses of a stream in order and turns them into chunks, then results. The sync and
the asyncio client share it, so what an answer means is written once. It does not know connections, threads or
event loops.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from ddtree_client.errors import DDTreeClientError, IncompleteAnswerError, error_from_status, error_from_text
from ddtree_client.types import Chunk, GenerateOptions, Result, Stats, TokenLogProbs, TracedRound
from ddtree_client.wire import Prompts, ResponseValues, build_request, read_response


@dataclass
class _Row:
    """The answer of one row as far as it has arrived."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[TokenLogProbs] = field(default_factory=list)
    trace: list[TracedRound] = field(default_factory=list)
    output_tokens: int = 0
    first_chunk_tokens: int = 0
    first_token_s: float | None = None
    last_s: float = 0.0
    finish_reason: str = ""
    input_tokens: int = 0
    rounds: int = 0
    accepted_draft_tokens: int = 0
    draft_tokens: int = 0
    warning: str = ""

    def add(self, values: ResponseValues, now_s: float) -> None:
        new_tokens = len(values.token_ids) if values.output_tokens is None else values.output_tokens
        self.texts.append(values.text)
        self.token_ids.extend(values.token_ids)
        self.log_probs.extend(values.log_probs)
        self.trace.extend(values.trace)
        self.output_tokens += new_tokens
        self.last_s = now_s
        if self.first_token_s is None and new_tokens > 0:
            self.first_token_s, self.first_chunk_tokens = now_s, new_tokens
        self.finish_reason = values.finish_reason or self.finish_reason
        self.warning = values.warning or self.warning
        # Counters are cumulative and may come late or more than once: the newest counts.
        self.input_tokens = _newest(values.input_tokens, self.input_tokens)
        self.rounds = _newest(values.rounds, self.rounds)
        self.accepted_draft_tokens = _newest(values.accepted_draft_tokens, self.accepted_draft_tokens)
        self.draft_tokens = _newest(values.draft_tokens, self.draft_tokens)

    def result(self) -> Result:
        return Result(
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stats=Stats(
                input_tokens=self.input_tokens,
                output_tokens=self.output_tokens,
                rounds=self.rounds,
                accepted_draft_tokens=self.accepted_draft_tokens,
                draft_tokens=self.draft_tokens,
                first_chunk_tokens=self.first_chunk_tokens,
                time_to_first_token_s=self.last_s if self.first_token_s is None else self.first_token_s,
                total_s=self.last_s,
            ),
            log_probs=tuple(self.log_probs),
            trace=tuple(self.trace),
            warning=self.warning,
        )


class Exchange:
    """A request ready to be sent to ``address``, and the state of its answer. Time starts at construction."""

    def __init__(
        self,
        *,
        address: str,
        model: str,
        prompts: Prompts,
        options: GenerateOptions,
        deadline_s: float | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.request_id = uuid4().hex
        self.deadline_s = deadline_s
        self.request = build_request(
            model=model, request_id=self.request_id, prompts=prompts, options=options
        )
        self._address = address
        # Of each row; a number below 1 is the server's to refuse.
        self._sequences = max(1, options.get("num_return_sequences") or 1)
        self._rows = tuple(_Row() for _ in prompts.rows for _ in range(self._sequences))
        self._clock = clock
        self._started = clock()
        self._last_chunk: Chunk | None = None
        self._error: DDTreeClientError | None = None

    @property
    def ended(self) -> bool:
        """Nothing more is to come: every row has sent its last chunk, or the server has reported an error."""
        return self._error is not None or all(row.finish_reason for row in self._rows)

    def receive(self, response: Any) -> Chunk | None:
        """The chunk in a ``ModelStreamInferResponse``, if it has one to show at once.

        The very last chunk is kept for `finish`, and so is an error that the server reports: both are
        shown when the stream is closed. Cancelling a stream that the server is just closing makes Triton
        2.51 count the request as running for ever, and its shutdown then takes the whole exit timeout.
        """
        if response.error_message:
            self._error = self._error or error_from_text(response.error_message)
            return None
        values = read_response(response.infer_response)
        if values is None:
            return None
        if self._error is not None:  # other rows go on: no reason to wait for them
            raise self._error
        row = values.row * self._sequences + values.sequence
        if not (0 <= row < len(self._rows) and 0 <= values.sequence < self._sequences):
            raise IncompleteAnswerError(
                f"the server at {self._address} answered row {values.row} of a request of "
                f"{len(self._rows) // self._sequences} rows, sequence {values.sequence} of "
                f"{self._sequences}; is this model the `ddtree` of this project?"
            )
        now_s = self._clock() - self._started
        self._rows[row].add(values, now_s)
        chunk = Chunk(
            text=values.text,
            token_ids=values.token_ids,
            row=row,
            final=values.finish_reason != "",
            finish_reason=values.finish_reason,
            elapsed_s=now_s,
            log_probs=values.log_probs,
            trace=values.trace,
        )
        if not self.ended:
            return chunk
        self._last_chunk = chunk
        return None

    def fail(self, code: str, details: str) -> None:
        """Notes that the stream was broken with gRPC status ``code``. After the end that changes nothing."""
        if not self.ended:
            self._error = error_from_status(code, details, address=self._address, deadline_s=self.deadline_s)

    def close(self) -> None:
        """Notes that the server has closed the stream."""
        if not self.ended:
            self._error = self._incomplete()

    def finish(self) -> Chunk:
        """The last chunk, once the stream is closed. Raises the error instead, if there is one."""
        if self._error is not None:
            raise self._error
        assert self._last_chunk is not None, "finish comes after the end of the stream"
        return self._last_chunk

    def results(self) -> tuple[Result, ...]:
        """One result per sequence. Raises IncompleteAnswerError while a row has not sent its last chunk."""
        if not all(row.finish_reason for row in self._rows):
            raise self._incomplete()
        return tuple(row.result() for row in self._rows)

    def _incomplete(self) -> IncompleteAnswerError:
        missing = [index for index, row in enumerate(self._rows) if not row.finish_reason]
        return IncompleteAnswerError(
            f"the answer is not complete (rows {missing} of {len(self._rows)} have no last chunk): "
            "the stream was not read to its end, was cancelled, or the server closed it early"
        )


def _newest(new: int | None, old: int) -> int:
    return old if new is None else new
