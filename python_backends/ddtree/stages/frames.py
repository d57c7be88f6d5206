"""Named arrays as bytes: what a direct call of a stage, and its answer, look like on a socket.

A frame is two lengths, a header in JSON and the arrays' bytes one after another; arrays of byte strings are
told by the lengths of their elements. Knows no socket, and not what arrays mean.
"""

from __future__ import annotations

import json
import operator
import re
import struct
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np

from ddtree.wire import Arrays

_LENGTHS: Final = struct.Struct("<IQ")  # bytes of the header, bytes of the arrays
_MOST_HEADER_BYTES: Final = 1 << 20
_MOST_BYTES: Final = 1 << 32
_STRINGS: Final = "strings"
_NUMBERS: Final = re.compile(r"[<>|][biuf][1248]")  # as numpy writes their types


class BrokenFrame(Exception):
    """What came is no frame; whoever sent it is not what it should be."""


@dataclass(frozen=True)
class Frame:
    """One call or one answer."""

    number: int  # of the call, and of its answer
    arrays: Arrays
    operation: str = ""  # a call's
    error: str = ""  # an answer's; then there are no arrays


def pack(frame: Frame) -> bytes:
    """Give the bytes of a frame."""
    told: list[tuple[str, str, list[int]]] = []
    pieces: list[bytes] = []
    for name, array in frame.arrays.items():
        if array.dtype.hasobject:
            strings = [bytes(element) for element in array.ravel()]
            told.append((name, _STRINGS, [len(text) for text in strings]))
            pieces += strings
        else:
            told.append((name, array.dtype.str, list(array.shape)))
            pieces.append(array.tobytes())
    values = (frame.number, frame.operation, frame.error, told)
    header = json.dumps(values, separators=(",", ":")).encode()
    lengths = _LENGTHS.pack(len(header), sum(map(len, pieces)))
    return b"".join((lengths, header, *pieces))


def unpack(header: bytes, body: bytes) -> Frame:
    """Build a frame; its arrays are views of `body`, read only.

    Raises:
        BrokenFrame: the header is none, or tells of other arrays than `body` holds.
    """
    try:
        number, operation, error, told = json.loads(header)
        frame = Frame(operator.index(number), {}, str(operation), str(error))
        start = 0
        for name, kind, sizes in told:
            frame.arrays[name], start = _read(kind, sizes, body, start)
    except (ValueError, TypeError, RecursionError) as problem:
        raise BrokenFrame(f"a header that cannot be read ({problem})") from None
    if start != len(body):
        raise BrokenFrame(f"{len(body)} bytes of arrays, told were {start}")
    return frame


def _read(kind: str, sizes: list[int], body: bytes, start: int) -> tuple[np.ndarray[Any, Any], int]:
    """One array and where the next one starts."""
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise BrokenFrame(f"an array of sizes {sizes}")
    if kind == _STRINGS:
        strings = np.empty(len(sizes), dtype=np.object_)
        for at, size in enumerate(sizes):
            strings[at] = body[start : start + size]
            start += size
        return strings, start
    if not _NUMBERS.fullmatch(kind):
        raise BrokenFrame(f"an array of {kind!r}")
    dtype = np.dtype(kind)
    stop = start + prod(sizes) * dtype.itemsize
    if stop > len(body):
        raise BrokenFrame(f"an array of {kind} and {sizes}, which is not there")
    return np.ndarray(sizes, dtype, body, start), stop


class FrameReader:
    """Frames out of pieces of a stream, in whatever pieces they come."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> list[Frame]:
        """Take a piece; give the frames that are whole with it.

        Raises:
            BrokenFrame: the stream is of no use from here on.
        """
        self._buffer += piece
        frames: list[Frame] = []
        while (ends := self._ends()) is not None:
            start, header, stop = _LENGTHS.size, *ends
            with memoryview(self._buffer) as view:
                frames.append(unpack(bytes(view[start:header]), bytes(view[header:stop])))
            del self._buffer[:stop]
        return frames

    def _ends(self) -> tuple[int, int] | None:
        """Where the header and the arrays of the first frame end; None while some of it is missing."""
        if len(self._buffer) < _LENGTHS.size:
            return None
        header, body = _LENGTHS.unpack_from(self._buffer)
        if header > _MOST_HEADER_BYTES or body > _MOST_BYTES:
            raise BrokenFrame(f"a frame of {header} and {body} bytes")
        start = _LENGTHS.size + header
        return (start, start + body) if len(self._buffer) >= start + body else None
