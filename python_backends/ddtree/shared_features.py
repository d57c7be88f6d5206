"""Context features that another process reads where the verifier keeps them, beside its pages.

The verifier's pool lies in memory that both processes see: on a CPU in an anonymous file, on a GPU in the
pool's own allocation, whose handle stands in that file. What crosses a hop is a *reference* to each row:

    where the file is (process, descriptor) | the file's key | the page's turn | the row's slot

A page's turn counts how often the page was taken, and stands in the file. A slot of committed tokens is not
written again before its page is taken anew, and the turn moves before that: so a reference whose turn is the
page's, before a row was copied and after, gives the row that was meant. Any other one is *stale*. The file
goes with its process, whichever way that ends. This module knows pages; neither messages nor sessions.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from ddtree.device.memory_handle import Handle, handle_of, opened
from ddtree.kv_cache import KvPool
from ddtree.page_table import PageTable

REFERENCE_BYTES: Final = 4 * 8  # of one row's reference
_HEADER_BYTES: Final = 4096
_PROBED_ROWS: Final = 4
# Verifiers whose rows are read in a call: the present one, and what is still on the way from those before it.
_MOST_SOURCES: Final = 4


class NotShared(Exception):
    """This memory cannot be shared, or not be reached from here."""


def place_of(device: torch.device) -> str:
    """Names the memory a device computes in; processes that give the same name may share it."""
    if device.type != "cuda":
        return device.type
    return f"cuda {torch.cuda.get_device_properties(device).uuid}"


@dataclass(frozen=True)
class Span:
    """Rows of one session, `[start, stop)` of its slots."""

    pages: Sequence[int]
    start: int
    stop: int


@dataclass(frozen=True)
class _Header:
    """What stands in the file before the turns."""

    key: int
    place: str
    dtype: str
    page_size: int
    num_pages: int
    row_bytes: int
    handle: str  # what opens a GPU's memory; empty: the rows follow the turns
    offset: int  # bytes from what the handle opens to the first row


class _File:
    """The file as its owner and its readers see it."""

    def __init__(self, memory: mmap.mmap, header: _Header) -> None:
        self.header = header
        self.turns = np.frombuffer(memory, np.int64, count=header.num_pages, offset=_HEADER_BYTES)
        self.shape = (header.num_pages * header.page_size, header.row_bytes)
        self.rows: NDArray[np.uint8] | None = None
        if not header.handle:
            rows = np.frombuffer(memory, np.uint8, offset=_HEADER_BYTES + self.turns.nbytes)
            self.rows = rows.reshape(self.shape)

    @classmethod
    def create(cls, file: int, header: _Header) -> _File:
        rows = 0 if header.handle else header.num_pages * header.page_size * header.row_bytes
        os.ftruncate(file, _HEADER_BYTES + header.num_pages * 8 + rows)
        memory = mmap.mmap(file, 0)
        memory.write(json.dumps(asdict(header)).encode())
        return cls(memory, header)

    @classmethod
    def open(cls, file: int) -> _File:
        memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)
        return cls(memory, _Header(**json.loads(memory[:_HEADER_BYTES].rstrip(b"\0"))))


class _TurnedPages(PageTable):
    """A page table that counts how often each page was taken, before anybody may write to it."""

    def __init__(self, turns: NDArray[np.int64]) -> None:
        super().__init__(len(turns))
        self._turns = turns

    def take(self, wanted: int, shared: Sequence[int] = ()) -> tuple[int, ...] | None:
        """See `PageTable.take`."""
        taken = super().take(wanted, shared)
        if taken is not None:
            self._turns[list(taken[len(shared) :])] += 1
        return taken


class SharedFeatures:
    """The features of a pool, where others can read them. One for each pool, before its first session."""

    def __init__(self, pool: KvPool) -> None:
        """Move a CPU's features into a file, or export a GPU's; count the turns of the pool's pages.

        Raises:
            NotShared: the system, the driver or the features' size does not allow it.
        """
        assert not pool.pages_used, "pages are counted from their first session on"
        features = pool.features
        row_bytes = features.shape[1] * features.itemsize
        if row_bytes == REFERENCE_BYTES:
            raise NotShared(f"features of {row_bytes} bytes would be taken for references")
        self.place = place_of(features.device)
        try:
            handle = handle_of(features) if features.is_cuda else Handle("", 0)
            self._number = os.memfd_create("ddtree-features")
            dtype = str(features.dtype).removeprefix("torch.")
            sizes = (pool.page_size, pool.num_pages, row_bytes)
            header = _Header(secrets.randbits(63), self.place, dtype, *sizes, handle.text, handle.offset)
            try:
                self._file = _File.create(self._number, header)
            except BaseException:
                os.close(self._number)
                raise
        except (OSError, AttributeError) as error:
            raise NotShared(f"the system does not let memory be shared: {error}") from error
        pool.table = _TurnedPages(self._file.turns)
        if self._file.rows is not None:
            pool.features = torch.from_numpy(self._file.rows).view(features.dtype)
        self._probed = pool.features[:_PROBED_ROWS]
        self._probed.normal_()

    def probe(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Some rows and the references to them; before the first session they hold random numbers."""
        return self._probed, self.refer([Span(range(_PROBED_ROWS), 0, len(self._probed))])

    def refer(self, spans: Sequence[Span | int]) -> torch.Tensor:
        """References `[rows, 4]` int64; a number stands for so many rows that nobody reads.

        Waits for the GPU: another process may read the rows as soon as it has their references.
        """
        words = [torch.empty((0, 4), dtype=torch.int64), *map(self._words, spans)]
        if self._probed.is_cuda:
            torch.cuda.synchronize(self._probed.device)
        return torch.cat(words)

    def _words(self, span: Span | int) -> torch.Tensor:
        if isinstance(span, int):
            return torch.zeros((span, 4), dtype=torch.int64)
        size = self._file.header.page_size
        places = np.arange(span.start, span.stop)
        pages = np.asarray(span.pages, dtype=np.int64)[places // size]
        words = np.empty((len(places), 4), dtype=np.int64)
        words[:, 0] = os.getpid() << 32 | self._number
        words[:, 1] = self._file.header.key
        words[:, 2] = self._file.turns[pages]
        words[:, 3] = pages * size + places % size
        return torch.from_numpy(words)


class FeatureReader:
    """Reads rows by reference, out of the memory of whichever process they name."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """Take the device that the rows are wanted on, and what they must be."""
        self.place = place_of(device)
        self._device = device
        self._dtype = dtype
        self._opened: _OpenedFeatures | None = None

    def read(self, references: torch.Tensor) -> tuple[torch.Tensor, NDArray[np.bool_]]:
        """Rows `[n, H]` on the device, and which of them are what was meant: others hold anything.

        Each row is read where it says that it is. Those of a verifier that cannot be reached are stale, and
        so are those of another width than the last reachable one's, and of more verifiers than there can be.

        Args:
            references: `[n, 4]` int64, at least one, see `SharedFeatures.refer`.

        Raises:
            NotShared: none of the rows can be reached.
        """
        words = references.numpy()
        named = words[::-1, :2]
        is_change = np.append([True], (named[1:] != named[:-1]).any(axis=1))  # mostly all rows name one
        sources = list(dict.fromkeys(map(tuple, named[is_change].tolist())))
        rows: torch.Tensor | None = None
        all_fresh = np.zeros(len(words), dtype=np.bool_)
        failure = ""
        for place, key in sources[:_MOST_SOURCES]:
            try:
                source = self._open(place, key)
            except (OSError, ValueError, TypeError) as error:
                failure = f"process {place >> 32} cannot be reached: {error}"
                continue
            meant = np.flatnonzero((words[:, 0] == place) & (words[:, 1] == key))
            part, is_fresh = source.read(words[meant, 2], words[meant, 3])
            if len(meant) == len(words):
                return part, is_fresh
            if rows is None:
                rows = part.new_zeros((len(words), part.shape[1]))
            if part.shape[1] == rows.shape[1]:
                rows[torch.from_numpy(meant).to(rows.device)] = part
                all_fresh[meant] = is_fresh
        if rows is None:
            raise NotShared(failure)
        return rows, all_fresh

    def _open(self, place: int, key: int) -> _OpenedFeatures:
        if self._opened is None or self._opened.key != key or not self._opened.is_kept:
            self._opened = None  # first: memory of a process that has ended is held by this one alone
            found = _OpenedFeatures(place, self._device, self._dtype)
            if found.key != key:
                raise ValueError("the descriptor is another file's by now")
            self._opened = found
        return self._opened


class _OpenedFeatures:
    """Another process's features, or this one's."""

    def __init__(self, place: int, device: torch.device, dtype: torch.dtype) -> None:
        self._path = Path(f"/proc/{place >> 32}/fd/{place & 0xFFFFFFFF}")
        file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)  # it may be anything
        try:
            self._inode = os.fstat(file).st_ino
            self._file = _File.open(file)
        finally:
            os.close(file)
        header, wanted = self._file.header, (place_of(device), str(dtype).removeprefix("torch."))
        if (header.place, header.dtype) != wanted:
            raise ValueError(f"they are {header.dtype} on {header.place}, wanted is {wanted}")
        self.key = header.key
        self._dtype = dtype
        self._memory: torch.Tensor | None = None
        if header.handle:
            memory = opened(Handle(header.handle, header.offset), self._file.shape, device)
            self._memory = memory.view(dtype)

    @property
    def is_kept(self) -> bool:
        """Whether the process that wrote them still lives."""
        try:
            return self._path.stat().st_ino == self._inode
        except OSError:
            return False

    def read(
        self, turns: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> tuple[torch.Tensor, NDArray[np.bool_]]:
        """Copy rows; see `FeatureReader.read`."""
        is_fresh = (slots >= 0) & (slots < self._file.shape[0])
        slots = np.where(is_fresh, slots, 0)
        pages = slots // self._file.header.page_size
        is_fresh &= self._file.turns[pages] == turns
        if self._memory is None:
            assert self._file.rows is not None, "rows lie in the file or behind a handle"
            rows = torch.from_numpy(self._file.rows[slots]).view(self._dtype)
        else:
            rows = self._memory[torch.from_numpy(slots).to(self._memory.device)]
        if rows.is_cuda:
            torch.cuda.current_stream(rows.device).synchronize()  # the turns are looked at after the copy
        # Whoever takes a page moves its turn before anything is written to it.
        is_fresh &= self._file.turns[pages] == turns
        return rows, is_fresh & self.is_kept
