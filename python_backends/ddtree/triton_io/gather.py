"""The responses to one request of `ddtree`, one for each sequence, as the outputs of a single response.

Rows come in any order and have any length. Knows arrays and names, not Triton.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Arrays = Mapping[str, np.ndarray[Any, Any]]

# Dimensions of one sequence's value: tokens, or tokens and alternatives. Others are scalars.
_DIMENSIONS = {
    "output_ids": 1,
    "output_log_probs": 1,
    "drawn_log_probs": 1,
    "output_token_bytes": 1,
    "top_log_prob_ids": 2,
    "top_log_probs": 2,
    "top_log_prob_bytes": 2,
}


def gather(responses: Sequence[Arrays]) -> dict[str, np.ndarray[Any, Any]]:
    """Put sequences beside one another: `[rows, sequences of a row, …]`, the shorter padded with zeros.

    An output that an answer lacks, as one without tokens may, counts as an empty one. `sequence_length` says
    how much of a sequence counts.

    Args:
        responses: at least one, each the whole answer of one sequence.
    """
    places = [(_whole(each, "batch_index"), _whole(each, "sequence_index")) for each in responses]
    shape = tuple(max(place[axis] for place in places) + 1 for axis in (0, 1))
    names = dict.fromkeys(name for each in responses for name in each)
    return {name: _stack(name, responses, places, shape) for name in names}


def _stack(
    name: str, responses: Sequence[Arrays], places: Sequence[tuple[int, int]], shape: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    inner = _DIMENSIONS.get(name, 0)
    given = [(place, each[name]) for place, each in zip(places, responses, strict=True) if name in each]
    values = [array.reshape(array.shape[array.ndim - inner :] or ()) for _, array in given]
    longest = tuple(max(value.shape[axis] for value in values) for axis in range(inner))
    dtype = values[0].dtype
    whole = np.full((*shape, *longest), b"" if dtype == np.object_ else 0, dtype=dtype)
    for (place, _), value in zip(given, values, strict=True):
        inside = tuple(slice(length) for length in value.shape)
        # The dots make it a view: a single place would take the array itself for its object.
        whole[place + inside + (...,)] = value
    return whole


def _whole(response: Arrays, name: str) -> int:
    return int(response[name].reshape(-1)[0]) if name in response else 0
