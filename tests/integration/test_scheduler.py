"""The scheduler's order and bounds, step by step, without any stage."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree.errors import ResourceExhausted
from ddtree.live import Live
from ddtree.scheduler import Scheduler
from ddtree.sequence import SequenceState
from tests.fakes.lives import make_live

Steps = list[tuple[int, int]]


def scheduler_of(
    *lives: Live, max_sequences: int = 2, max_waiting: int = 8, prefill_chunk: int = 10
) -> Scheduler:
    scheduler = Scheduler(max_sequences=max_sequences, max_waiting=max_waiting, prefill_chunk=prefill_chunk)
    for live in lives:
        scheduler.add(live)
    return scheduler


def some(count: int, **options: Any) -> list[Live]:
    return [make_live(number, **options) for number in range(count)]


def finish_prefill(live: Live) -> None:
    live.committed = live.to_commit
    live.sequence.state = SequenceState.DECODING
    live.sequence.append([7])


def test_places_are_given_by_arrival() -> None:
    lives = some(4)
    scheduler = scheduler_of(*lives)
    assert (scheduler.num_running, scheduler.num_waiting, list(scheduler)) == (0, 4, lives)
    scheduler.admit()
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 2)
    scheduler.remove(lives[0])
    scheduler.admit()
    assert list(scheduler) == [lives[1], lives[2], lives[3]]
    assert scheduler.running == (lives[1], lives[2])


def test_one_chunk_of_ids_is_shared_in_order() -> None:
    lives = [make_live(0, prompt=4), make_live(1, prompt=25)]
    scheduler = scheduler_of(*lives)
    scheduler.admit()
    chunks: list[Steps] = []
    while batch := scheduler.prefill_batch():
        chunks.append([(live.sequence.session_id, count) for live, count in batch])
        for live, count in batch:
            live.committed += count
            if live.committed == live.to_commit:
                finish_prefill(live)
    assert chunks == [[(0, 4), (1, 6)], [(1, 10)], [(1, 9)]]
    assert scheduler.decode_batch() == lives


def test_those_who_decode_are_not_prefilled_and_the_reverse() -> None:
    lives = some(2)
    scheduler = scheduler_of(*lives)
    scheduler.admit()
    finish_prefill(lives[1])
    assert [live for live, _ in scheduler.prefill_batch()] == [lives[0]]
    assert scheduler.decode_batch() == [lives[1]]


def test_a_reopened_sequence_reads_everything_but_its_root_again() -> None:
    (live,) = some(1, prompt=6)
    scheduler = scheduler_of(live)
    scheduler.admit()
    finish_prefill(live)
    live.sequence.append([8, 9], draft_tokens=1)
    live.committed = 8
    live.reopen()
    assert (live.sequence.epoch, live.recoveries, live.committed) == (1, 1, 0)
    assert scheduler.prefill_batch() == [(live, 8)]


def test_the_queue_is_bounded_in_a_burst_too() -> None:
    scheduler = scheduler_of(*some(5), max_sequences=2, max_waiting=3)
    with pytest.raises(ResourceExhausted, match="0 sequences are running and 5 are waiting"):
        scheduler.add(make_live(9))
    scheduler.admit()
    with pytest.raises(ResourceExhausted, match="2 sequences are running and 3 are waiting"):
        scheduler.add(make_live(9))
    scheduler.remove(next(iter(scheduler)))
    scheduler.add(make_live(9))


def test_a_postponed_sequence_waits_before_all_that_came_later_until_somebody_ends() -> None:
    lives = some(5)
    scheduler = scheduler_of(*lives, max_sequences=4)
    scheduler.admit()
    scheduler.postpone(lives[1])
    scheduler.postpone(lives[2])
    assert list(scheduler) == [lives[0], lives[3], lives[1], lives[2], lives[4]]
    assert lives[1].sequence.state is SequenceState.WAITING
    scheduler.admit()
    assert scheduler.num_running == 2  # the pool is full: nobody is let in
    scheduler.remove(lives[3])
    scheduler.admit()
    assert list(scheduler.running) == [lives[0], lives[1]], "the first one alone: the pages are for it"
    scheduler.admit()
    assert scheduler.num_running == 2
    lives[1].committed = 1  # it found room
    scheduler.admit()
    assert list(scheduler.running) == [lives[0], lives[1], lives[2]]
    lives[2].committed = 1
    scheduler.admit()
    assert list(scheduler.running) == [lives[0], lives[1], lives[2], lives[4]]


def test_small_ones_that_come_later_never_take_the_pages_a_big_one_waits_for() -> None:
    """Ten pages; three are in use by each small one. The big one needs eight."""
    big, small = make_live(4, prompt=8), [make_live(n, prompt=3) for n in (0, 1, 2, 5, 6, 7, 8)]
    scheduler = scheduler_of(*small[:3], big, *small[3:], max_sequences=8)
    held: dict[int, int] = {}
    began: list[int] = []
    for _ in range(40):
        scheduler.admit()
        for live, count in scheduler.prefill_batch():
            if live.committed == 0 and sum(held.values()) + live.to_commit > 10:
                scheduler.postpone(live)
                continue
            if live.committed == 0:
                held[live.sequence.session_id] = live.to_commit
                began.append(live.sequence.session_id)
            live.committed += count
            if live.committed == live.to_commit:
                finish_prefill(live)
        if decoding := scheduler.decode_batch():  # one ends in each step
            scheduler.remove(decoding[0])
            held.pop(decoding[0].sequence.session_id)
    assert began == [0, 1, 2, 4, 5, 6, 7, 8]
    assert not scheduler


def test_a_short_prompt_does_not_wait_for_a_long_one_that_came_before() -> None:
    lives = [make_live(0, prompt=100), make_live(1, prompt=30), make_live(2, prompt=4)]
    scheduler = scheduler_of(*lives, max_sequences=3)
    scheduler.admit()
    chunks: list[Steps] = []
    for _ in range(3):
        batch = scheduler.prefill_batch()
        chunks.append([(live.sequence.session_id, count) for live, count in batch])
        for live, count in batch:
            live.committed += count
            if live.committed == live.to_commit:
                finish_prefill(live)
    assert chunks == [[(0, 5), (1, 1), (2, 4)], [(0, 5), (1, 5)], [(0, 5), (1, 5)]]


def test_pages_are_reserved_by_arrival_whatever_the_prompts_need() -> None:
    lives = [make_live(0, prompt=9), make_live(1, prompt=30), make_live(2, prompt=4), make_live(3, prompt=2)]
    scheduler = scheduler_of(*lives, max_sequences=4, prefill_chunk=4)
    scheduler.admit()
    batch = scheduler.prefill_batch()
    assert [(live.sequence.session_id, count) for live, count in batch] == [(0, 2), (1, 1), (2, 1)]


def test_the_last_running_sequence_cannot_be_postponed() -> None:
    (live,) = some(1, prompt=6, max_tokens=20)
    scheduler = scheduler_of(live)
    scheduler.admit()
    with pytest.raises(ResourceExhausted, match=r"cannot hold 26 tokens; .*kv_cache_mib"):
        scheduler.postpone(live)
    assert scheduler.running == (live,)


def test_a_waiting_sequence_that_leaves_frees_no_page() -> None:
    lives = some(4)
    scheduler = scheduler_of(*lives, max_sequences=3)
    scheduler.admit()
    scheduler.postpone(lives[2])
    scheduler.remove(lives[3])
    scheduler.admit()
    assert scheduler.running == (lives[0], lives[1])


def test_who_waits_is_told_why() -> None:
    first, *others = some(4)
    scheduler = scheduler_of(first, max_sequences=1)
    assert "no step began meanwhile" in scheduler.why_waiting(first, "its deadline came")
    scheduler.admit()
    scheduler.add(others[0])
    assert "all places are taken (1 sequences are running" in scheduler.why_waiting(others[0], "time is up")
