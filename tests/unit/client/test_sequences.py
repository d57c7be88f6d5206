"""Several sequences of a row, and bytes of tokens, as the client reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from ddtree_client import IncompleteAnswerError, InvalidRequestError
from ddtree_client.exchange import Exchange
from ddtree_client.wire import many_prompts


def response(**outputs: Any) -> Any:
    made = service_pb2.ModelStreamInferResponse()
    for name, value in outputs.items():
        array = np.asarray(value)
        is_text = array.dtype.kind in "SO"
        array = array.astype(np.object_) if is_text else array.astype(getattr(value, "dtype", np.int32))
        made.infer_response.outputs.add(
            name=name, datatype="BYTES" if is_text else np_to_triton_dtype(array.dtype), shape=array.shape
        )
        content = serialize_byte_tensor(array).item() if is_text else array.tobytes()
        made.infer_response.raw_output_contents.append(content)
    return made


def exchange(rows: int, sequences: int) -> Exchange:
    prompts = many_prompts(["x"] * rows, None)
    options: Any = {"num_return_sequences": sequences, "temperature": 1.0}
    return Exchange(address="a:1", model="m", prompts=prompts, options=options, deadline_s=None)


def data(row: int, sequence: int, text: bytes, finish: bytes = b"stop") -> Any:
    return response(
        batch_index=[row],
        sequence_index=[sequence],
        text_output=[text],
        finish_reason=[finish],
        num_output_tokens=[1],
    )


def test_the_sequences_of_a_row_are_neighbours() -> None:
    four = exchange(2, 2)
    chunks = [
        four.receive(data(*each))
        for each in ((1, 1, b"d"), (0, 0, b"a", b""), (0, 1, b"b"), (1, 0, b"c"), (0, 0, b"a"))
    ]
    assert [result.text for result in four.results()] == ["aa", "b", "c", "d"]
    assert [chunk.row for chunk in chunks if chunk is not None] == [3, 0, 1, 2]
    assert four.finish().row == 0


@pytest.mark.parametrize(("row", "sequence"), [(0, 2), (1, 0), (0, -1)])
def test_a_sequence_that_was_not_asked_for_is_refused(row: int, sequence: int) -> None:
    with pytest.raises(IncompleteAnswerError, match="of 2; is this model"):
        exchange(1, 2).receive(data(row, sequence, b"x"))


def test_a_number_of_sequences_that_cannot_be_is_left_to_the_server() -> None:
    none = exchange(1, -1)
    assert not none.ended
    refusal = "INVALID_ARGUMENT: num_return_sequences must be at least 1, got -1"
    assert none.receive(service_pb2.ModelStreamInferResponse(error_message=refusal)) is None
    with pytest.raises(InvalidRequestError, match="at least 1"):
        none.finish()


def test_bytes_of_tokens_stand_beside_their_log_probs() -> None:
    one = exchange(1, 1)
    one.receive(
        response(
            text_output=[b"a"],
            finish_reason=[b"stop"],
            output_log_probs=np.array([[[-1.0, -2.0]]], dtype=np.float32),
            drawn_log_probs=np.array([[[-1.0, -2.0]]], dtype=np.float32),
            top_log_prob_ids=np.array([[[5, 6], [7, 8]]], dtype=np.int32),
            top_log_probs=np.array([[[-1.0, -3.0], [-2.0, -4.0]]], dtype=np.float32),
            output_token_bytes=[[b"\xf0", b"\x9f"]],
            top_log_prob_bytes=[[[b"5", b"6"], [b"7", b"8"]]],
        )
    )
    first, second = one.results()[0].log_probs
    assert (first.token, first.top_tokens) == (b"\xf0", (b"5", b"6"))
    assert (second.token, second.top, second.top_tokens) == (b"\x9f", ((7, -2.0), (8, -4.0)), (b"7", b"8"))
