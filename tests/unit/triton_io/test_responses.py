"""Which responses a request gets, and that exactly one of them is the last."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.errors import DDTreeError, Unavailable
from ddtree.log_probs import TokenLogProbs
from ddtree.params import GenerationParams
from ddtree.sampling_spec import SamplingSpec
from ddtree.sequence import Delta, FinishReason, Stats
from ddtree.triton_io.responses import Answer, RowSink, delta_outputs, stop_outputs, wants_trace

STATS = Stats(prompt_tokens=4, arrival_ns=0, rounds=2, draft_tokens=8, accepted_tokens=2, emitted_tokens=5)
ALWAYS = frozenset(delta_outputs(Delta("", (), "stop"), STATS, 0))
ALL = ALWAYS | {
    "output_log_probs", "drawn_log_probs", "cum_log_probs", "top_log_prob_ids", "top_log_probs",
}  # fmt: skip


@dataclass
class RecordingChannel:
    """Keeps what was sent."""

    sent: list[dict[str, Any]] = field(default_factory=list)
    finals: list[bool] = field(default_factory=list)
    errors: list[DDTreeError] = field(default_factory=list)
    is_gone: bool = False

    def send(self, outputs: dict[str, np.ndarray[Any, Any]], *, is_final: bool) -> None:
        self.sent.append({name: array.tolist() for name, array in outputs.items()})
        self.finals.append(is_final)

    def fail(self, error: DDTreeError) -> None:
        self.errors.append(error)

    def is_cancelled(self) -> bool:
        return self.is_gone


def rows_of(channel: RecordingChannel, *streams: bool, **params: Any) -> tuple[Answer, list[RowSink]]:
    answer = Answer(channel, ALL)
    sinks = [
        answer.open_row(row, GenerationParams(prompt_ids=(7, 8), stream=stream, **params), lambda: "PROMPT ")
        for row, stream in enumerate(streams)
    ]
    return answer, sinks


def test_every_output_of_a_last_response() -> None:
    outputs = delta_outputs(Delta("é", (5, 6), "length"), STATS, row=3)
    assert {name: (array.dtype.str, array.tolist()) for name, array in outputs.items()} == {
        "text_output": ("|O", ["é".encode()]),
        "finish_reason": ("|O", [b"length"]),
        "output_ids": ("<i4", [[[5, 6]]]),
        "sequence_length": ("<i4", [[2]]),
        "batch_index": ("<i4", [[3]]),
        "sequence_index": ("<i4", [[0]]),
        "num_input_tokens": ("<i4", [[4]]),
        "num_output_tokens": ("<i4", [[2]]),
        "num_rounds": ("<i4", [[2]]),
        "total_draft_tokens": ("<i4", [[8]]),
        "total_accepted_draft_tokens": ("<i4", [[2]]),
        "acceptance_rate": ("<f4", [[0.25]]),
    }


def with_log_probs(*ids: int, reason: FinishReason = "") -> Delta:
    entries = (TokenLogProbs(-0.5 * token, -0.25, ((token, -0.5), (token + 1, -4.0))) for token in ids)
    return Delta("x", ids, reason, tuple(entries))


def test_log_probs_come_with_their_tokens_and_their_sum_grows() -> None:
    channel = RecordingChannel()
    sampling = SamplingSpec(top_log_probs=2, sequence_index=3)
    _, (sink,) = rows_of(channel, True, sampling=sampling)
    sink.emit(with_log_probs(1, 2), STATS)
    sink.emit(with_log_probs(reason="stop"), STATS)
    first, last = channel.sent
    assert (first["output_log_probs"], first["drawn_log_probs"]) == ([[[-0.5, -1.0]]], [[[-0.25, -0.25]]])
    assert (first["cum_log_probs"], last["cum_log_probs"]) == ([[-1.5]], [[-1.5]])
    assert first["top_log_prob_ids"] == [[[1, 2], [2, 3]]]
    assert first["top_log_probs"] == [[[-0.5, -4.0], [-0.5, -4.0]]]
    assert (last["output_log_probs"], last["top_log_probs"]) == ([[[]]], [[]])
    assert first["sequence_index"] == [[3]]


def test_log_probs_are_kept_for_the_single_response() -> None:
    channel = RecordingChannel()
    _, (sink,) = rows_of(channel, False, sampling=SamplingSpec(top_log_probs=0))
    sink.emit(with_log_probs(1), STATS)
    sink.emit(with_log_probs(2, 3, reason="length"), STATS)
    (sent,) = channel.sent
    assert sent["output_log_probs"] == [[[-0.5, -1.0, -1.5]]]
    assert sent["cum_log_probs"] == [[-3.0]]
    assert "top_log_probs" not in sent


def test_bytes_of_tokens_come_beside_their_log_probs() -> None:
    channel = RecordingChannel()
    answer = Answer(
        channel, ALL | {"output_token_bytes", "top_log_prob_bytes"}, token_bytes=lambda token: bytes([token])
    )
    params = GenerationParams(prompt_ids=(7,), stream=True, sampling=SamplingSpec(top_log_probs=2))
    sink = answer.open_row(0, params, str)
    sink.emit(with_log_probs(1, 2), STATS)
    sink.emit(with_log_probs(reason="stop"), STATS)
    first, last = channel.sent
    assert first["output_token_bytes"] == [[b"\x01", b"\x02"]]
    assert first["top_log_prob_bytes"] == [[[b"\x01", b"\x02"], [b"\x02", b"\x03"]]]
    assert last["output_token_bytes"] == [[]]


def test_nobody_gets_log_probs_unasked() -> None:
    channel = RecordingChannel()
    _, (sink,) = rows_of(channel, True)
    sink.emit(Delta("x", (1,), "stop"), STATS)
    assert not [name for name in channel.sent[0] if "log_prob" in name]


def test_totals_come_only_at_the_end() -> None:
    outputs = delta_outputs(Delta("a", (5,)), STATS, row=0)
    assert ALWAYS - outputs.keys() == {
        "num_rounds", "total_draft_tokens", "total_accepted_draft_tokens", "acceptance_rate"
    }  # fmt: skip


def test_no_tokens_are_an_empty_tensor_of_three_dimensions() -> None:
    assert delta_outputs(Delta("", (), "cancelled"), STATS, row=0)["output_ids"].shape == (1, 1, 0)
    assert stop_outputs().keys() == {"text_output", "finish_reason"}


def test_a_stream_sends_each_delta() -> None:
    channel = RecordingChannel()
    _, (sink,) = rows_of(channel, True)
    sink.emit(Delta("a", (5,)), STATS)
    sink.emit(Delta("", (6,)), STATS)
    sink.emit(Delta("b", (9,), "stop"), STATS)
    assert [sent["text_output"] for sent in channel.sent] == [[b"a"], [b""], [b"b"]]
    assert [sent["output_ids"] for sent in channel.sent] == [[[[5]]], [[[6]]], [[[9]]]]
    assert channel.finals == [False, False, True]


def test_without_stream_everything_comes_at_once() -> None:
    channel = RecordingChannel()
    _, (sink,) = rows_of(channel, False)
    sink.emit(Delta("a", (5,)), STATS)
    assert channel.sent == []
    sink.emit(Delta("b", (6, 9), "stop"), STATS)
    (sent,) = channel.sent
    assert (sent["text_output"], sent["output_ids"], sent["num_output_tokens"]) == (
        [b"ab"],
        [[[5, 6, 9]]],
        [[3]],
    )
    assert channel.finals == [True]


@pytest.mark.parametrize(("stream", "expected"), [(False, b"PROMPT ab"), (True, b"ab")])
def test_the_prompt_comes_first_only_without_stream(stream: bool, expected: bytes) -> None:
    channel = RecordingChannel()
    _, (sink,) = rows_of(channel, stream, exclude_input_in_output=False)
    sink.emit(Delta("ab", (5, 6), "stop"), STATS)
    (sent,) = channel.sent
    assert sent["text_output"] == [expected]
    assert sent["output_ids"] == [[[5, 6] if stream else [7, 8, 5, 6]]]
    assert sent["num_output_tokens"] == [[2]]


@given(st.data(), st.lists(st.booleans(), min_size=1, max_size=4))
def test_whatever_the_order_of_rows_the_last_response_is_final(
    data: st.DataObject, streams: list[bool]
) -> None:
    channel = RecordingChannel()
    _, sinks = rows_of(channel, *streams)
    left = {row: data.draw(st.integers(1, 3)) for row in range(len(streams))}
    while left:
        row = data.draw(st.sampled_from(sorted(left)))
        left[row] -= 1
        reason: FinishReason = "" if left[row] else "length"
        sinks[row].emit(Delta("a", (5,), reason), STATS)
        if not left[row]:
            del left[row]
    assert channel.finals == [False] * (len(channel.finals) - 1) + [True]
    ended = [sent["batch_index"][0][0] for sent in channel.sent if sent["finish_reason"] != [b""]]
    assert sorted(ended) == list(range(len(streams)))


def test_an_error_ends_every_row_and_comes_once() -> None:
    channel = RecordingChannel()
    answer, (first, second) = rows_of(channel, True, True)
    first.emit(Delta("a", (5,)), STATS)
    error = Unavailable("gone")
    answer.fail(error)
    answer.fail(Unavailable("again"))
    assert second.is_cancelled()
    second.emit(Delta("b", (), "cancelled"), STATS)
    assert (channel.errors, len(channel.sent)) == ([error], 1)


def test_an_error_after_the_end_is_not_sent() -> None:
    channel = RecordingChannel()
    answer, (sink,) = rows_of(channel, True)
    sink.emit(Delta("a", (5,), "stop"), STATS)
    answer.fail(Unavailable("late"))
    assert channel.errors == []


def test_rows_are_cancelled_by_a_caller_who_left_and_by_a_stop_request() -> None:
    channel = RecordingChannel()
    answer, (sink,) = rows_of(channel, True)
    assert not sink.is_cancelled()
    channel.is_gone = True
    assert sink.is_cancelled()
    channel.is_gone = False
    answer.stop()
    assert sink.is_cancelled()
    sink.emit(Delta("a", (), "cancelled"), STATS)
    assert channel.finals == [True]


def test_outputs_nobody_wants_are_left_out() -> None:
    channel = RecordingChannel()
    answer = Answer(channel, {"text_output", "cum_log_probs"})
    answer.open_row(0, GenerationParams(prompt_ids=(7,)), str).emit(Delta("a", (5,), "stop"), STATS)
    assert channel.sent == [{"text_output": [b"a"]}]


class _Letters:
    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(97 + token) for token in token_ids)

    def is_silent(self, token_id: int) -> bool:
        return token_id < 0

    def is_byte(self, token_id: int) -> bool:
        return token_id < 0


def test_a_trace_is_kept_for_who_lists_it_and_for_nobody_else() -> None:
    declared = {"text_output", "finish_reason", "trace"}
    assert wants_trace({"text_output", "trace"}, declared)
    assert not wants_trace({"text_output"}, declared)
    # Without a list of outputs Triton shows all that are declared.
    assert not wants_trace(declared, declared)
    _, (untraced,) = rows_of(RecordingChannel(), True)
    assert untraced.trace is None


@pytest.mark.parametrize("stream", [True, False])
def test_the_trace_comes_with_the_round_that_it_is_about(stream: bool) -> None:
    channel = RecordingChannel()
    answer = Answer(channel, {"text_output", "trace"}, _Letters())
    sink = answer.open_row(0, GenerationParams(prompt_ids=(7,), stream=stream), lambda: "")
    sink.emit(Delta("a", (0,)), STATS)
    sink.emit(Delta("bc", (1, 2), "stop"), STATS)
    sent = [[json.loads(each)["emitted"]["ids"] for each in one["trace"]] for one in channel.sent]
    assert sent == ([[[0]], [[1, 2]]] if stream else [[[0], [1, 2]]])
    assert {"text_output", "trace"} == set(channel.sent[0])


class BrokenChannel(RecordingChannel):
    """Takes no response, as Triton takes no array that is no tensor."""

    def send(self, outputs: dict[str, np.ndarray[Any, Any]], *, is_final: bool) -> None:
        raise TypeError(f"no tensor among {list(outputs)}, {is_final=}")


def test_an_answer_whose_last_response_cannot_be_made_still_owes_an_error() -> None:
    channel = BrokenChannel()
    answer, (sink,) = rows_of(channel, True)
    with pytest.raises(TypeError):
        sink.emit(Delta("x", (1,), "stop"), STATS)
    assert not answer.is_cancelled(), "the row is not over before its caller was told"
    answer.fail(Unavailable("the answer could not be sent"))
    assert [str(error) for error in channel.errors] == ["UNAVAILABLE: the answer could not be sent"]
