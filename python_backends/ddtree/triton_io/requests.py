"""A request's input tensors to one raw request per row.

Values are copied out, because Triton takes the memory of the tensors back. Knows names and shapes, not rules
about values (`ddtree.params`), and arrays, not Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

from ddtree.errors import InvalidArgument
from ddtree.raw_request import RawRequest

Arrays = Mapping[str, np.ndarray[Any, Any]]

_PROMPTS: Final = ("text_input", "messages", "input_ids")
_LISTS: Final = frozenset({"input_ids", "stop_words", "stop_token_ids", "bad_words", "guided_choice"})
_NAMES: Final = frozenset(field.name for field in fields(RawRequest)) - {"timeout_us"}


@dataclass(frozen=True)
class ParsedRequest:
    """What a request says, one entry per row; nothing is checked yet but the shapes."""

    rows: tuple[RawRequest, ...]
    is_stop: bool  # asks to cancel the live request of the same id instead of generating


def parse(inputs: Arrays, timeout_us: int = 0) -> ParsedRequest:
    """Read the inputs that are there; those that mean nothing here are passed over.

    Args:
        inputs: arrays by name.
        timeout_us: how long the transport says that the answer is waited for, microseconds; 0 for ever.

    Raises:
        InvalidArgument: a tensor does not have one entry per row.
    """
    is_stop = "stop" in inputs and bool(inputs["stop"].any())
    if is_stop:
        return ParsedRequest(rows=(), is_stop=True)
    count = _count_rows(inputs)
    columns = {name: _rows_of(name, array, count) for name, array in inputs.items() if name in _NAMES}
    rows = (
        RawRequest(**{name: column[row] for name, column in columns.items()}, timeout_us=timeout_us or None)
        for row in range(count)
    )
    return ParsedRequest(rows=tuple(rows), is_stop=False)


def _count_rows(inputs: Arrays) -> int:
    for name in _PROMPTS:
        if name in inputs and inputs[name].ndim:
            return max(int(inputs[name].shape[0]), 1)
    return 1


def _rows_of(name: str, array: np.ndarray[Any, Any], count: int) -> list[Any]:
    """Split a list of shape [rows, n], or scalars of shape [rows, 1], [rows], or [1] for all rows."""
    if name in _LISTS:
        if array.ndim and array.shape[0] == count:
            return list(array.reshape(count, -1).tolist())
        raise InvalidArgument.of(name, f"must have {count} rows", list(array.shape), f"send [{count}, n]")
    if array.size == count:
        return list(array.reshape(count).tolist())
    if array.size == 1:
        return list(array.reshape(1).tolist()) * count
    rule = f"must have one value for each of {count} rows"
    raise InvalidArgument.of(name, rule, list(array.shape), f"send [{count}, 1]")
