"""Tensors of every shape that clients send, to rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddtree.errors import InvalidArgument
from ddtree.raw_request import RawRequest
from ddtree.triton_io.requests import ParsedRequest, parse


def strings(*rows: list[bytes]) -> np.ndarray[Any, Any]:
    return np.array(rows, dtype=np.object_)


def rows_of(**inputs: np.ndarray[Any, Any]) -> tuple[RawRequest, ...]:
    return parse(inputs).rows


def test_a_row_per_prompt_with_its_own_values() -> None:
    rows = rows_of(
        text_input=strings([b"a"], [b"b"]),
        max_tokens=np.array([[3], [4]], np.int32),
        stream=np.array([[True], [False]]),
        stop_words=strings([b"x", b"y"], [b"z", b""]),
    )
    assert rows == (
        RawRequest(text_input=b"a", max_tokens=3, stream=True, stop_words=[b"x", b"y"]),
        RawRequest(text_input=b"b", max_tokens=4, stream=False, stop_words=[b"z", b""]),
    )


@pytest.mark.parametrize("shape", [(1,), (1, 1), (2,), (2, 1)])
def test_scalars_come_in_several_shapes(shape: tuple[int, ...]) -> None:
    rows = rows_of(text_input=strings([b"a"], [b"b"]), top_k=np.full(shape, 7, np.int32))
    assert [row.top_k for row in rows] == [7, 7]


def test_values_are_plain_and_survive_the_tensors() -> None:
    seed, temperature = np.array([[2**64 - 1]], np.uint64), np.array([[0.5]], np.float32)
    ids, stream = np.array([[5, 6]], np.int32), np.array([True])
    (row,) = rows_of(input_ids=ids, seed=seed, temperature=temperature, stream=stream)
    ids[:], seed[:], temperature[:], stream[:] = 0, 0, 0, False
    assert row == RawRequest(input_ids=[5, 6], seed=2**64 - 1, temperature=0.5, stream=True)
    kinds = [type(value) for value in (row.input_ids[0], row.seed, row.temperature, row.stream)]  # type: ignore[index]
    assert kinds == [int, int, float, bool]


def test_token_rows_and_empty_lists() -> None:
    rows = rows_of(input_ids=np.array([[1, 2], [3, 4]], np.int32), input_lengths=np.array([2, 1], np.int32))
    assert [(row.input_ids, row.input_lengths) for row in rows] == [([1, 2], 2), ([3, 4], 1)]
    (row,) = rows_of(input_ids=np.zeros((1, 0), np.int32), stop_words=np.zeros((1, 0), np.object_))
    assert (row.input_ids, row.stop_words) == ([], [])


def test_a_request_without_prompt_is_one_row() -> None:
    assert rows_of(max_tokens=np.array([[3]], np.int32)) == (RawRequest(max_tokens=3),)
    assert rows_of() == (RawRequest(),)


def test_names_that_mean_nothing_here_are_passed_over() -> None:
    assert rows_of(text_input=strings([b"a"]), pad_id=np.array([[0]])) == (RawRequest(text_input=b"a"),)


def test_stop_needs_nothing_else() -> None:
    inputs = {"input_ids": np.zeros((1, 0), np.int32), "stop": np.array([[True]])}
    assert parse(inputs) == ParsedRequest(rows=(), is_stop=True)
    inputs["stop"] = np.array([[False]])
    assert not parse(inputs).is_stop


@pytest.mark.parametrize(
    ("inputs", "complaint"),
    [
        (
            {"top_p": np.ones((3, 1))},
            r"top_p must have one value for each of 2 rows, got \[3, 1\]; send \[2, 1\]",
        ),
        ({"top_p": np.ones((0,))}, "top_p must have one value"),
        ({"stop_words": strings([b"a"])}, r"stop_words must have 2 rows, got \[1, 1\]; send \[2, n\]"),
        ({"input_ids": np.array(5)}, r"input_ids must have 2 rows, got \[\]"),
    ],
)
def test_shapes_that_fit_no_row_are_refused(inputs: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        parse({"text_input": strings([b"a"], [b"b"]), **inputs})


def test_the_transports_timeout_comes_with_every_row_and_is_no_input() -> None:
    texts = np.array([[b"a"], [b"b"]], dtype=np.object_)
    rows = parse({"text_input": texts, "timeout_us": np.array([[7]])}, timeout_us=1500).rows
    assert [row.timeout_us for row in rows] == [1500, 1500]
    assert parse({"text_input": texts}).rows[0].timeout_us is None
