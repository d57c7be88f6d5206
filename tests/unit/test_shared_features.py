"""Context features read by reference: always the rows that were meant, or none."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from ddtree.errors import InvalidArgument
from ddtree.feature_references import DrafterReferences
from ddtree.kv_cache import KvPool, Pages
from ddtree.shared_features import REFERENCE_BYTES, FeatureReader, NotShared, SharedFeatures, Span
from ddtree.types import DraftRequest, SessionBatch
from tests.fakes.sharing_verifier import CPU, NUM_PAGES, PAGE, WIDTH, Verifier, make_pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_several_owners_come_in_the_order_of_their_references(dtype: torch.dtype) -> None:
    pool = make_pool(dtype=dtype)
    shared = SharedFeatures(pool)
    first, second = pool.reserve(9), pool.reserve(5)
    assert first is not None
    assert second is not None
    pool.features.copy_(torch.randn(pool.features.shape))
    references = shared.refer(
        [Span(second.indices, 1, 4), 2, Span(first.indices, 3, 9), Span(first.indices, 0, 1)]
    )
    rows, is_fresh = FeatureReader(CPU, dtype).read(references)
    assert is_fresh.tolist() == [True] * 3 + [False] * 2 + [True] * 7
    meant = torch.cat([second.slots[1:4], first.slots[3:9], first.slots[:1]])
    assert rows.dtype == dtype
    assert torch.equal(rows[is_fresh], pool.features[meant])


@pytest.mark.parametrize(("page_size", "pages"), [(1, 1), (1, 7), (3, 2), (16, 1)])
def test_the_rows_to_try_are_told_apart(page_size: int, pages: int) -> None:
    told, references = SharedFeatures(make_pool(page_size=page_size, pages=pages)).probe()
    read, is_fresh = FeatureReader(CPU, torch.float32).read(references)
    assert is_fresh.all()
    assert torch.equal(read, told)
    assert len(torch.unique(read)) == read.numel() > 0


def test_rows_of_a_page_that_was_taken_again_are_stale_and_the_others_are_not() -> None:
    verifier, reader = Verifier(), FeatureReader(CPU, torch.float32)
    leaving, _, gone = verifier.filled(6)
    _, rows, kept = verifier.filled(3)
    verifier.pool.release(leaving)
    assert reader.read(gone)[1].all(), "given back, and nobody has written to it"
    assert verifier.pool.reserve(4) is not None  # the first of its two pages
    read, is_fresh = reader.read(torch.cat([gone, kept]))
    assert is_fresh.tolist() == [False] * 4 + [True] * 5
    assert torch.equal(read[6:], rows)


class _TakenMeanwhile(np.ndarray[Any, Any]):
    """Rows whose page is taken by somebody else while they are copied."""

    pool: KvPool
    pages: Pages

    def __getitem__(self, places: Any) -> Any:
        rows = np.asarray(self)[places]
        self.pool.release(self.pages)
        assert self.pool.reserve(1) is not None
        return rows


def test_rows_that_are_overwritten_while_they_are_copied_are_stale() -> None:
    verifier, reader = Verifier(), FeatureReader(CPU, torch.float32)
    pages, _, references = verifier.filled(3)
    assert reader.read(references)[1].all()
    assert reader._opened is not None
    rows = np.asarray(reader._opened._file.rows).view(_TakenMeanwhile)
    rows.pool, rows.pages = verifier.pool, pages
    reader._opened._file.rows = rows
    assert not reader.read(references)[1].any()


def test_a_slot_beyond_the_pool_is_stale() -> None:
    verifier = Verifier()
    _, _, references = verifier.filled(2)
    references[0, 3], references[1, 3] = PAGE * NUM_PAGES, -1
    assert not FeatureReader(CPU, torch.float32).read(references)[1].any()


def test_what_is_no_such_file_is_not_read(tmp_path: Any) -> None:
    verifier, reader = Verifier(), FeatureReader(CPU, torch.float32)
    _, _, references = verifier.filled(2)
    other = references.clone()
    other[:, 1] += 1  # the key
    with pytest.raises(NotShared, match="the descriptor is another file's by now"):
        reader.read(other)
    with (tmp_path / "empty").open("wb+") as file:
        other[:, 0] = os.getpid() << 32 | file.fileno()
        with pytest.raises(NotShared, match=f"process {os.getpid()} cannot be reached"):
            reader.read(other)
    with pytest.raises(NotShared, match="wanted is"):
        FeatureReader(CPU, torch.bfloat16).read(references)
    assert reader.read(references)[1].all()


@pytest.mark.parametrize("counts", [[2**31 - 1], [2, -1], [0, 0]])
def test_counts_that_do_not_divide_the_references_are_refused_before_anything_is_read(
    counts: list[int],
) -> None:
    """The first of these took 16 GiB and 18 seconds, when a caller of the drafter itself sent it."""
    numbers = torch.tensor(counts, dtype=torch.int32)
    rows = torch.zeros((1, REFERENCE_BYTES // 4))
    sessions = SessionBatch(torch.arange(len(counts)), numbers * 0, numbers * 0)
    request = DraftRequest(sessions, numbers[:1], rows, numbers, numbers, numbers, depth=0, width=0)
    references = DrafterReferences(FeatureReader(CPU, torch.float32), is_wanted=True)
    with pytest.raises(InvalidArgument, match="counts must be 0 or more each and add up to the 1 rows"):
        references.resolved(request)


def test_what_was_made_of_a_file_that_cannot_be_filled_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, os.stat_result]] = []

    def refuse(file: int, _: int) -> None:
        made.append((file, os.fstat(file)))
        raise OSError("no room")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(NotShared, match="no room"):
        SharedFeatures(make_pool())
    ((number, file),) = made
    with suppress(OSError):  # there is none of this number
        assert not os.path.samestat(file, os.fstat(number)), "it is still open"


def test_features_as_wide_as_references_are_refused() -> None:
    with pytest.raises(NotShared, match="would be taken for references"):
        SharedFeatures(make_pool(width=REFERENCE_BYTES // 4))


# Another process that holds the same bytes in a file of its own.
_HOLDER = """
import os, signal, sys
file = os.memfd_create("features")
os.write(file, sys.stdin.buffer.read())
print(file, flush=True)
signal.pause()
"""


def test_the_rows_of_a_process_that_was_killed_are_out_of_reach() -> None:
    verifier, reader = Verifier(), FeatureReader(CPU, torch.float32)
    _, rows, references = verifier.filled(11)
    theirs = references.clone()
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(Path(f"/proc/self/fd/{int(references[0, 0]) & 0xFFFFFFFF}").read_bytes())
            process.stdin.close()
            theirs[:, 0] = process.pid << 32 | int(process.stdout.readline())
            read, is_fresh = reader.read(theirs)
            assert is_fresh.all()
            assert torch.equal(read, rows)
        finally:
            process.kill()
    with pytest.raises(NotShared, match=f"process {process.pid} cannot be reached"):
        reader.read(theirs)


@pytest.mark.parametrize("lost", ["key", "place", "page", "none"])
def test_rows_of_two_verifiers_are_each_read_where_they_are(lost: str) -> None:
    """The last row decided for all, so one on the way from a verifier that was gone cost the whole batch."""
    reader = FeatureReader(CPU, torch.float32)
    earlier, verifier = Verifier(), Verifier()
    (leaving, old, theirs), (_, new, ours) = earlier.filled(2), verifier.filled(5)
    if lost == "key":
        theirs[:, 1] += 1
    if lost == "place":
        theirs[:, 0] = 0  # no process
    if lost == "page":
        earlier.pool.release(leaving)
        assert earlier.pool.reserve(1) is not None
    for _ in range(2):
        read, is_fresh = reader.read(torch.cat([theirs[:1], ours[:3], ours[3:], theirs[1:]]))
        assert is_fresh.tolist() == [lost == "none"] + [True] * 5 + [lost == "none"]
        assert torch.equal(read[is_fresh], torch.cat([old[:1], new, old[1:]])[is_fresh])


def test_rows_of_verifiers_of_another_width_than_the_last_ones_are_stale() -> None:
    reader, verifier = FeatureReader(CPU, torch.float32), Verifier()
    narrow = SharedFeatures(make_pool(width=WIDTH - 1))
    _, rows, references = verifier.filled(2)
    read, is_fresh = reader.read(torch.cat([narrow.probe()[1], references]))
    assert is_fresh.tolist() == [False] * PAGE + [True] * 2
    assert torch.equal(read[is_fresh], rows)


def test_no_more_verifiers_are_looked_for_than_there_can_be() -> None:
    """A caller of the drafter itself names what it likes; each name costs opening a file."""
    reader, verifier = FeatureReader(CPU, torch.float32), Verifier()
    _, _, references = verifier.filled(3)
    unknown = references.repeat(2, 1)
    unknown[:, 1] += torch.arange(1, 7)
    assert reader.read(torch.cat([references, unknown[:3]]))[1].any()
    with pytest.raises(NotShared):
        reader.read(torch.cat([references, unknown]))


def test_a_sequence_is_not_lost_with_another_ones_references() -> None:
    reader, verifier = FeatureReader(CPU, torch.float32), Verifier()
    _, rows, references = verifier.filled(3)
    references[2, 0] = 0  # of the second sequence, no process
    numbers = torch.tensor([2, 1], dtype=torch.int32)
    sessions = SessionBatch(torch.arange(2), numbers * 0, numbers)
    features = references.view(torch.uint8).view(torch.float32)
    request = DraftRequest(
        sessions, numbers[[0, 0, 0]], features, numbers, numbers, numbers, depth=0, width=0
    )
    resolved = DrafterReferences(reader, is_wanted=True).resolved(request)
    assert torch.equal(resolved.context_features[:2], rows[:2])
    assert (resolved.sessions.lengths == numbers).tolist() == [True, False]


class ReferenceMachine(RuleBasedStateMachine):
    """Owners come, grow, publish pages and go; whoever kept a reference reads what was meant, or nothing."""

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.verifier = Verifier()
        self.reader = FeatureReader(CPU, torch.float32)
        self.live: dict[int, tuple[Pages, int]] = {}
        self.kept: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # owner, rows, references
        self.next_owner = 0

    @rule(target=owners, slots=st.integers(1, PAGE * 4), keys=st.lists(st.integers(0, 3), max_size=3))
    def open(self, slots: int, keys: list[int]) -> int:
        """An owner that shares the published pages it begins with; the others are taken from whoever left."""
        table = self.verifier.pool.table
        found = [table.find(bytes([key])) for key in dict.fromkeys(keys)]
        shared = [page for page in found if page is not None][: -(-slots // PAGE)]
        pages = self.verifier.pool.reserve_after(shared, slots)
        self.next_owner += 1
        if pages is not None:
            self.live[self.next_owner] = pages, len(shared) * PAGE
        return self.next_owner

    @rule(owner=owners, count=st.integers(1, PAGE * 2), key=st.integers(0, 3))
    def write(self, owner: int, count: int, key: int) -> None:
        """Commit rows behind those that are there, and let others find the last page that became full."""
        if owner not in self.live:
            return
        pages, length = self.live[owner]
        stop = min(length + count, pages.capacity)
        rows = self.verifier.fill(pages, length, stop)
        references = self.verifier.shared.refer([Span(pages.indices, length, stop)])
        self.kept.append((owner, rows, references))
        self.live[owner] = pages, max(length, stop)
        if stop // PAGE > length // PAGE:
            page = pages.indices[stop // PAGE - 1]
            table = self.verifier.pool.table
            if table.references(page) == 1 and table.key(page) is None:
                table.publish(page, bytes([key]))

    @rule(owner=consumes(owners))
    def close(self, owner: int) -> None:
        """Give pages back; the references to them live on."""
        if owner in self.live:
            self.verifier.pool.release(self.live.pop(owner)[0])

    @invariant()
    def every_fresh_row_is_what_was_meant(self) -> None:
        for owner, rows, references in self.kept:
            if not len(references):
                continue
            read, is_fresh = self.reader.read(references)
            assert torch.equal(read[is_fresh], rows[is_fresh])
            assert is_fresh.all() or owner not in self.live, "a living owner's rows stay"

    def teardown(self) -> None:
        """Nothing is left of the pages that were taken."""
        self.verifier.pool.check_integrity(pages for pages, _ in self.live.values())


TestReferences = ReferenceMachine.TestCase
TestReferences.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
