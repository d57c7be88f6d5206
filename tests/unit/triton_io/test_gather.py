"""Answers of sequences put beside one another."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree.triton_io.gather import gather


def answer(row: int, sequence: int, ids: list[int], text: bytes) -> dict[str, Any]:
    return {
        "batch_index": np.array([[row]], dtype=np.int32),
        "sequence_index": np.array([[sequence]], dtype=np.int32),
        "output_ids": np.array([[ids]], dtype=np.int32),
        "sequence_length": np.array([[len(ids)]], dtype=np.int32),
        "text_output": np.array([text], dtype=np.object_),
        "output_token_bytes": np.array([[bytes([each]) for each in ids]], dtype=np.object_),
        "top_log_probs": np.array([[[-float(each), -9.0] for each in ids]], dtype=np.float32),
    }


def test_rows_and_sequences_are_sorted_and_padded() -> None:
    whole = gather(
        [
            answer(1, 0, [7], b"c"),
            answer(0, 1, [5, 6], b"b"),
            answer(0, 0, [1, 2, 3], b"a"),
            answer(1, 1, [8], b""),
        ]
    )
    assert whole["text_output"].tolist() == [[b"a", b"b"], [b"c", b""]]
    assert whole["output_ids"].tolist() == [[[1, 2, 3], [5, 6, 0]], [[7, 0, 0], [8, 0, 0]]]
    assert whole["sequence_length"].tolist() == [[3, 2], [1, 1]]
    assert whole["output_token_bytes"].tolist()[0] == [[b"\x01", b"\x02", b"\x03"], [b"\x05", b"\x06", b""]]
    assert whole["top_log_probs"].shape == (2, 2, 3, 2)
    assert whole["top_log_probs"][1, 1].tolist() == [[-8, -9], [0, 0], [0, 0]]
    assert whole["output_ids"].dtype == np.int32
    assert whole["text_output"].dtype == np.object_


def test_one_answer_keeps_its_shape() -> None:
    whole = gather([answer(0, 0, [4, 5], b"x")])
    assert whole["output_ids"].tolist() == [[[4, 5]]]
    assert type(whole["text_output"][0, 0]) is bytes
    assert whole["text_output"][0, 0] == b"x"


def test_an_answer_without_tokens_is_an_empty_one() -> None:
    assert gather([answer(0, 0, [], b"")])["output_ids"].shape == (1, 1, 0)


def test_what_one_answer_lacks_is_empty_there() -> None:
    lacking = answer(0, 0, [], b"")
    del lacking["top_log_probs"]  # as of a sequence that its deadline ended before its first token
    for responses in ([lacking, answer(0, 1, [3], b"c")], [answer(0, 1, [3], b"c"), lacking]):
        assert gather(responses)["top_log_probs"].tolist() == [[[[0, 0]], [[-3, -9]]]]
