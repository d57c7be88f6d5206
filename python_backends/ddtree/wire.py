"""Messages between stages as named arrays, and back: what a hop carries.

A message is flattened by field name, nested ones with their name in front (`sessions_ids`). bfloat16 has no
numpy type, so context features cross as bytes, last axis in bytes; the receiver knows the dtype from what
the stages said of themselves. This module knows the messages, not Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_type_hints

import numpy as np
import torch

_Message = TypeVar("_Message")
_FEATURE_FIELDS = frozenset({"features", "context_features"})
Arrays = dict[str, np.ndarray[Any, Any]]


def encode(message: Any) -> Arrays:
    """Flatten a message into host arrays."""
    arrays: Arrays = {}
    for field in fields(message):
        value = getattr(message, field.name)
        if is_dataclass(value):
            arrays |= {f"{field.name}_{name}": array for name, array in encode(value).items()}
        elif isinstance(value, torch.Tensor):
            arrays[field.name] = _to_bytes(value) if field.name in _FEATURE_FIELDS else value.cpu().numpy()
        elif isinstance(value, tuple):
            arrays[field.name] = np.array([text.encode() for text in value], dtype=np.object_)
        elif isinstance(value, int):
            arrays[field.name] = np.array([value], dtype=np.int32)
        else:
            arrays[field.name] = np.array([value], dtype=np.float32)
    return arrays


def decode(
    message_type: type[_Message], arrays: Mapping[str, np.ndarray[Any, Any]], feature_dtype: torch.dtype
) -> _Message:
    """Build a message from named arrays; the tensors own their memory.

    Raises:
        KeyError: an array of the message is missing.
    """
    values: dict[str, Any] = {}
    for name, kind in _types_of(message_type).items():  # type: ignore[arg-type]  # a class is hashable
        if is_dataclass(kind):
            inner = {
                key.removeprefix(f"{name}_"): array
                for key, array in arrays.items()
                if key.startswith(f"{name}_")
            }
            values[name] = decode(kind, inner, feature_dtype)  # type: ignore[arg-type]
        elif kind is torch.Tensor:
            array = np.array(arrays[name])
            is_bytes = name in _FEATURE_FIELDS
            values[name] = _from_bytes(array, feature_dtype) if is_bytes else torch.from_numpy(array)
        elif kind == tuple[str, ...]:
            values[name] = tuple(bytes(text).decode() for text in arrays[name])
        else:
            values[name] = kind(arrays[name][0])
    return message_type(**values)


def names(message_type: Any) -> tuple[str, ...]:
    """What the arrays of a message are called."""
    found: list[str] = []
    for name, kind in _types_of(message_type).items():
        found += [f"{name}_{inner}" for inner in names(kind)] if is_dataclass(kind) else [name]
    return tuple(found)


@cache  # reading annotations takes as long as all the rest, and every message of a round would
def _types_of(message_type: Any) -> Mapping[str, Any]:
    return get_type_hints(message_type)


def _to_bytes(features: torch.Tensor) -> np.ndarray[Any, Any]:
    return features.contiguous().cpu().view(torch.uint8).numpy()


def _from_bytes(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    if not array.size:  # an empty array comes without strides, and no view can be made of it
        return torch.empty((*array.shape[:-1], array.shape[-1] // dtype.itemsize), dtype=dtype)
    return torch.from_numpy(np.array(array)).view(dtype)
