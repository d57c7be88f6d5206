"""The pipe between the benchmark and its workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.errors import BenchmarkError
from benchmarks.measurement import Answer, Job, Setup
from benchmarks.players import Worker

_ROOT = Path(__file__).resolve().parents[3]


def _start(target: str = "somewhere") -> Worker:
    setup = Setup(target=target, draft="draft", dtype="float32", threads=1)
    return Worker("echo", "tests.unit.benchmarks.fake_worker", setup, root=_ROOT)


@pytest.fixture
def worker() -> Iterator[Worker]:
    started = _start()
    yield started
    started.close()


def _job(max_tokens: int) -> Job:
    return Job(input_ids=(5, 6, 7), stop_ids=(2,), max_tokens=max_tokens)


def test_answers_come_back_whole_though_libraries_print(worker: Worker) -> None:
    expected = Answer((5, 6, 7), 1, 0.5, 1.0, rounds=2, stage_ms={"draft": 1.5})
    assert worker.decode(_job(8)) == expected
    assert worker.decode(_job(8)) == expected


def test_a_failure_in_the_worker_is_told(worker: Worker) -> None:
    with pytest.raises(BenchmarkError, match=r"^echo: ValueError: one token is too few$"):
        worker.decode(_job(1))


def test_a_worker_that_ends_is_told_with_its_last_line(worker: Worker) -> None:
    with pytest.raises(BenchmarkError, match=r"^echo: the worker ended \(out of memory\)$"):
        worker.decode(_job(2))
    with pytest.raises(BenchmarkError, match="the worker ended"):
        worker.decode(_job(8))


def test_a_worker_that_cannot_load_is_told() -> None:
    with pytest.raises(BenchmarkError, match=r"^echo: FileNotFoundError: no such target$"):
        _start("nowhere")


def test_a_closed_worker_is_gone_and_can_be_closed_again() -> None:
    worker = _start()
    process = worker._process
    worker.close()
    worker.close()
    assert process.returncode == 0
