"""Frames carry named arrays as they are, in whatever pieces they come; what is no frame is refused."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from ddtree.stages.frames import BrokenFrame, Frame, FrameReader, pack

SHAPES = st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
NUMBERS = st_numpy.arrays(st.sampled_from([np.int64, np.int32, np.float32, np.uint8, np.bool_]), SHAPES)
STRINGS = st.lists(st.binary(max_size=20), max_size=4)


def strings_of(texts: list[bytes]) -> np.ndarray[Any, Any]:
    array = np.empty(len(texts), dtype=np.object_)
    array[:] = texts
    return array


ARRAYS = st.dictionaries(st.text(max_size=8), NUMBERS | STRINGS.map(strings_of), max_size=5)
FRAMES = st.builds(Frame, st.integers(0, 2**40), ARRAYS, st.text(max_size=9), st.text(max_size=30))


def assert_same(found: Frame, wanted: Frame) -> None:
    assert (found.number, found.operation, found.error) == (wanted.number, wanted.operation, wanted.error)
    assert list(found.arrays) == list(wanted.arrays)
    for name, array in wanted.arrays.items():
        assert found.arrays[name].dtype == array.dtype
        assert found.arrays[name].shape == array.shape
        if array.dtype.hasobject:
            assert list(found.arrays[name]) == list(array)
        else:
            assert found.arrays[name].tobytes() == array.tobytes()


@given(st.lists(FRAMES, max_size=4), st.data())
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(
    frames: list[Frame], data: st.DataObject
) -> None:
    stream = b"".join(map(pack, frames))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    reader, found = FrameReader(), []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += reader.feed(stream[start:stop])
    assert len(found) == len(frames)
    for ours, theirs in zip(found, frames, strict=True):
        assert_same(ours, theirs)


def test_a_strided_array_crosses_by_its_values() -> None:
    array = np.arange(24, dtype=np.int32).reshape(2, 3, 4)[:, ::-1, ::2]
    (found,) = FrameReader().feed(pack(Frame(1, {"a": array})))
    assert np.array_equal(found.arrays["a"], array)


def test_what_came_is_nobodys_to_write_and_stays_when_more_comes() -> None:
    reader = FrameReader()
    (first,) = reader.feed(pack(Frame(1, {"a": np.arange(3)})))
    reader.feed(pack(Frame(2, {"a": np.full(3, 9)})))
    assert first.arrays["a"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="read-only"):
        first.arrays["a"][0] = 1


def framed(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<IQ", len(text), len(body)) + text + body


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (struct.pack("<IQ", 2**31, 0), "a frame of 2147483648"),
        (struct.pack("<IQ", 2, 2**40), "1099511627776 bytes"),
        (b"GET / HTTP/1.1\r\nHost: ddtree\r\n\r\n", "a frame of"),
        (framed(b"\xff\xfe{}"), "cannot be read"),
        (framed([1, "draft"]), "cannot be read"),
        (framed({"number": 1}), "cannot be read"),
        (framed([1, "", "", [["a", "<f4", [2]]]], b"1234567"), "which is not there"),
        (framed([1, "", "", [["a", "<f4", [1]]]], b"12345678"), "8 bytes of arrays, told were 4"),
        (framed([1, "", "", [["a", "<f4", [-1, -1]]]], b"1234"), "an array of sizes"),
        (framed([1, "", "", [["a", "|O", [1]]]], b"12345678"), r"an array of '\\|O'"),
        (framed([1, "", "", [["a", "strings", [9]]]], b"1234"), "4 bytes of arrays, told were 9"),
        (framed([1, "", "", [["a", "no type", [1]]]], b"1234"), "an array of 'no type'"),
        (framed([1, "", "", [["a", "f4,(", [1]]]], b"1234"), "an array of"),
        (framed([1, "", "", [["a", "<f4", [1e300]]]], b"1234"), "an array of sizes"),
        (framed([1, "", "", [["a", "<f4", 7]]], b"1234"), "cannot be read"),
        (framed([[], "", "", []]), "cannot be read"),
        (framed(b'[Infinity, "", "", []]'), "cannot be read"),
        (framed(b"[" * 100_000), "cannot be read"),
        (framed([1, "", "", [["a", "<f4", ["x"]]]], b"1234"), "an array of sizes"),
    ],
)
def test_what_is_no_frame_is_refused(stream: bytes, words: str) -> None:
    with pytest.raises(BrokenFrame, match=words):
        FrameReader().feed(stream)


@given(st.binary(max_size=80))
def test_noise_is_refused_or_waited_for(noise: bytes) -> None:
    with suppress(BrokenFrame):
        FrameReader().feed(noise)


@given(FRAMES, st.data())
def test_a_frame_with_a_wrong_byte_is_read_or_refused(frame: Frame, data: st.DataObject) -> None:
    stream = bytearray(pack(frame))
    stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    with suppress(BrokenFrame):
        FrameReader().feed(bytes(stream))
