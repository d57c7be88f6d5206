"""The safetensors files of a checkpoint folder: which there are, and what their headers say.

Loads no weights. This module knows files and headers, not which tensors a model needs. Its errors name the
file; whoever asks says whose it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ddtree.errors import CheckpointError

FLOAT_TYPES = ("BF16", "F16", "F32")
_BITS = {"BF16": 16, "F16": 16, "F32": 32, "I64": 64, "I32": 32, "BOOL": 8, "U8": 8, "I8": 8, "F64": 64}


@dataclass(frozen=True)
class Header:
    """What a safetensors file says about a tensor without its values."""

    path: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_values(self) -> int:
        """Numbers in the tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on disk (8-bit floats are the only types not listed)."""
        return self.num_values * _BITS.get(self.dtype, 8) // 8


def read_headers(path: Path) -> dict[str, Header]:
    """Read one file's headers; opening it also checks that the file is as long as they say.

    Raises:
        CheckpointError: no whole safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, not a mapping
            return {
                name: Header(path, tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()
            }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: expected a safetensors file, found {error}") from error


def weight_files(folder: Path) -> tuple[Path, list[Path]]:
    """Give the file that lists the tensors and the files that hold them.

    Raises:
        CheckpointError: there are none, the index is no index, or it names a file that is not there.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.is_file():
        if not single.is_file():
            raise CheckpointError(f"{single}: expected weights or {index.name}, found neither")
        return single, [single]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, OSError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index}: expected JSON with a weight_map, found {error!r}") from error
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder / name}: expected a shard that {index.name} names, found no such file"
            )
    return index, [folder / name for name in names]


def total_bytes(headers: Mapping[str, Header]) -> int:
    """Bytes of all tensors."""
    return sum(header.nbytes for header in headers.values())
