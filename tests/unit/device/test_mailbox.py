"""Mailboxes: sections arrive whole, aligned, and apart from each other; captured work is done anew."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from ddtree.device.graphs import Captured, GraphMaker
from ddtree.device.mailbox import Mailbox, Section
from tests.fakes.device import DEVICE

SECTIONS = {
    "lengths": Section((3,)),
    "is_chain": Section((3,), torch.bool),
    "roots": Section((3,), torch.int64),
    "table": Section((3, 5)),
    "chances": Section((2, 2), torch.float32),
}


def test_what_is_sent_arrives_in_every_section_and_in_no_other() -> None:
    box = Mailbox(SECTIONS, DEVICE)
    wanted = {
        "lengths": np.array([7, 8, 9], np.int32),
        "is_chain": np.array([True, False, True]),
        "roots": np.array([1 << 40, -1, 3]),
        "table": np.arange(15, dtype=np.int32).reshape(3, 5),
        "chances": np.array([[0.5, -1.0], [2.0, 3.0]], np.float32),
    }
    for name, array in wanted.items():
        box.host[name][...] = array
    assert all(not box.device[name].any() for name in SECTIONS)
    box.send()
    for name, array in wanted.items():
        assert box.device[name].dtype == SECTIONS[name].dtype
        np.testing.assert_array_equal(box.device[name].cpu().numpy(), array)


def test_what_is_fetched_is_what_the_device_has() -> None:
    box = Mailbox(SECTIONS, DEVICE)
    box.device["table"].fill_(4)
    box.device["roots"][1] = -5
    box.fetch()
    assert box.host["table"].tolist() == [[4] * 5] * 3
    assert box.host["roots"].tolist() == [0, -5, 0]
    assert not box.host["lengths"].any()


def test_sections_are_aligned_for_wide_loads() -> None:
    box = Mailbox(SECTIONS, DEVICE)
    base = box.device["lengths"].data_ptr()
    assert all((tensor.data_ptr() - base) % 16 == 0 for tensor in box.device.values())


def test_captured_work_reads_its_inputs_again() -> None:
    values = torch.tensor([1.0, 2.0], device=DEVICE)
    maker = GraphMaker(DEVICE)
    double = maker.capture(lambda: values * 2)
    assert double().tolist() == [2.0, 4.0]
    values.copy_(torch.tensor([5.0, 6.0]))
    assert double().tolist() == [10.0, 12.0]


class _Graph:
    """Stands for a graph: what was captured is not run again by Python."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


def test_captured_work_that_gives_nothing_is_played_back() -> None:
    graph = _Graph()
    captured = Captured[None](lambda: pytest.fail("it was captured"), cast(Any, graph), None)
    captured()
    captured()
    assert graph.replays == 2
    assert captured.is_still


def test_work_without_a_graph_gives_other_tensors_each_time() -> None:
    assert not Captured(lambda: 3).is_still
