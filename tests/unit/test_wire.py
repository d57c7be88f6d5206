"""Every message survives the way through named arrays, empty ones and bfloat16 included."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided

from ddtree import types
from ddtree.wire import Arrays, decode, encode, names

MESSAGES = (
    types.PrefillRequest, types.PrefillResult, types.DraftRequest, types.DraftResult, types.TreeRequest,
    types.TreeBatch, types.VerifyRequest, types.VerifyResult, types.FeatureRequest, types.FeatureResult,
    types.FeatureProbe,
)  # fmt: skip
# The dimensions of a field (one a sequence if not listed): S sequences, D positions, K candidates, N nodes,
# H features, T rows, R row counts.
SHAPES = {
    "ids": "S", "epochs": "S", "lengths": "S", "token_ids": "T", "counts": "S", "reserve": "S", "status": "S",
    "next_tokens": "S", "features": "TH", "context_ids": "T", "context_features": "TH", "root_tokens": "S",
    "top_ids": "SDK", "top_log_probs": "SDK", "budgets": "S", "is_chain": "S", "round_cost_ms": "R",
    "tokens": "SN", "parents": "SN", "depths": "SN", "accepted_tokens": "SD", "accepted_counts": "S",
    "bonus_tokens": "S", "starts": "S", "node_counts": "S", "log_probs": "SDK",
}  # fmt: skip
DTYPES = {
    "ids": torch.int64, "is_chain": torch.bool, "top_log_probs": torch.float32,
    "round_cost_ms": torch.float32,
    "log_probs": torch.float32,
}  # fmt: skip
FULL = {"S": 3, "D": 2, "K": 4, "N": 5, "H": 6, "T": 7, "R": 8}
EMPTIES = [
    {"N": 0}, {"D": 0}, {"T": 0}, {"R": 0}, {"S": 0, "T": 0},
    {"S": 0, "T": 0, "N": 0, "D": 0, "K": 0, "R": 0},
]  # fmt: skip


def make(message_type: Any, sizes: dict[str, int], feature_dtype: torch.dtype) -> Any:
    """A message with distinct values everywhere."""
    values: dict[str, Any] = {}
    for name, kind in get_type_hints(message_type).items():
        if is_dataclass(kind):
            values[name] = make(kind, sizes, feature_dtype)
        elif kind is torch.Tensor:
            letters = SHAPES.get(name, "S")
            shape = [sizes[letter] for letter in letters]
            dtype = feature_dtype if letters == "TH" else DTYPES.get(name, torch.int32)
            numbers = torch.arange(int(np.prod(shape))).reshape(shape) - 3
            values[name] = numbers % 2 == 0 if dtype is torch.bool else (numbers * 1.0).to(dtype)
        elif kind == tuple[str, ...]:
            values[name] = tuple(f'{{"é": {index}}}' if index else "" for index in range(sizes["S"]))
        else:
            values[name] = kind(7)
    return message_type(**values)


def assert_equal(got: Any, sent: Any) -> None:
    assert type(got) is type(sent)
    for field in fields(sent):
        mine, theirs = getattr(got, field.name), getattr(sent, field.name)
        if is_dataclass(theirs):
            assert_equal(mine, theirs)
        elif isinstance(theirs, torch.Tensor):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), field.name
            assert torch.equal(mine, theirs), field.name
        else:
            assert mine == theirs
            assert type(mine) is type(theirs)


def through_triton(arrays: Arrays) -> Arrays:
    """What comes out on the other side: memory of somebody else's, and empty arrays without strides."""
    return {
        name: array.copy()
        if array.dtype == np.object_
        else np.frombuffer(array.tobytes(), dtype=array.dtype).reshape(array.shape)
        if array.size
        else as_strided(np.zeros(0, dtype=array.dtype), shape=array.shape, strides=(0,) * array.ndim)
        for name, array in arrays.items()
    }


@pytest.mark.parametrize("sizes", [{}, *EMPTIES], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("message_type", MESSAGES, ids=lambda kind: kind.__name__)
def test_round_trip(message_type: type, dtype: torch.dtype, sizes: dict[str, int]) -> None:
    sent = make(message_type, {**FULL, **sizes}, dtype)
    assert_equal(decode(message_type, through_triton(encode(sent)), dtype), sent)
    assert names(message_type) == tuple(encode(sent))


def test_names_and_types_are_those_of_the_stage_models_configurations() -> None:
    arrays = encode(make(types.VerifyRequest, FULL, torch.bfloat16))
    assert {name: str(array.dtype) for name, array in arrays.items()} == {
        "sessions_ids": "int64", "sessions_epochs": "int32", "sessions_lengths": "int32",
        "root_tokens": "int32", "trees_tokens": "int32", "trees_parents": "int32",
        "trees_depths": "int32", "trees_counts": "int32",
    }  # fmt: skip


def test_features_cross_as_bytes_and_nothing_of_a_view_is_lost() -> None:
    wide = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    result = types.FeatureResult(
        torch.zeros(4, dtype=torch.int32), wide[::2, :4]
    )  # rows that are not contiguous
    arrays = encode(result)
    assert (arrays["features"].dtype, arrays["features"].shape) == (np.uint8, (2, 8))
    assert_equal(decode(types.FeatureResult, arrays, torch.bfloat16), result)


def test_what_is_decoded_owns_its_memory() -> None:
    arrays = encode(make(types.TreeBatch, FULL, torch.float32))
    decoded = decode(types.TreeBatch, arrays, torch.float32)
    before = decoded.tokens.clone()
    arrays["tokens"][:] = -1  # Triton takes the memory back after the call
    assert torch.equal(decoded.tokens, before)


def test_numbers_keep_their_kind() -> None:
    request = make(types.DraftRequest, FULL, torch.float32)
    arrays = encode(request)
    assert (arrays["depth"].tolist(), arrays["depth"].dtype) == ([7], np.int32)
    result = make(types.VerifyResult, FULL, torch.float32)
    assert (encode(result)["commit_ms"].tolist(), encode(result)["commit_ms"].dtype) == ([7.0], np.float32)


def test_a_missing_array_is_named() -> None:
    arrays = encode(make(types.VerifyRequest, FULL, torch.float32))
    del arrays["trees_depths"]
    with pytest.raises(KeyError, match="depths"):
        decode(types.VerifyRequest, arrays, torch.float32)
