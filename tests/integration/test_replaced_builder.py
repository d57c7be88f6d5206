"""A tree builder that was replaced by one with a fault: it costs drafts and no right token."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddtree.stages.bls import BlsStages
from ddtree.wire import Arrays
from tests.fakes.pipeline import GreedyReference, generate_all
from tests.fakes.wired_stages import WiredStages, engine_of
from tests.integration.stage_faults import LONG, SHORT, reference_of, request

Spoil = Callable[[Arrays], Arrays]


def too_deep(trees: Arrays) -> Arrays:
    """The deepest nodes stand far below."""
    depths = trees["depths"]
    return trees | {"depths": np.where(depths == depths.max(initial=0), 200, depths)}


def orphans(trees: Arrays) -> Arrays:
    """The last nodes hang from a node that is none."""
    parents = trees["parents"].copy()
    parents[:, -1:] = 5000
    return trees | {"parents": parents}


def narrow(trees: Arrays) -> Arrays:
    """A token is missing."""
    return trees | {"tokens": trees["tokens"][:, :-1]}


def nobody(trees: Arrays) -> Arrays:
    """Trees of no sequence."""
    return {name: array[:0] for name, array in trees.items()}


@pytest.mark.parametrize("spoil", [too_deep, orphans, narrow, nobody])
async def test_what_is_no_tree_is_not_verified(
    tiny_target: Path, tiny_reference: GreedyReference, caplog: pytest.LogCaptureFixture, spoil: Spoil
) -> None:
    wired = WiredStages(tiny_target, "never")

    async def call(model: str, operation: str, arrays: Arrays) -> Mapping[str, Any]:
        answer = await wired(model, operation, arrays)
        return spoil(dict(answer)) if operation == "build_tree" else answer

    async with engine_of(tiny_target, wired, BlsStages(call)) as engine:
        requests = [request(LONG, 12), request(SHORT, 12, budget=5)]
        with caplog.at_level(logging.WARNING):
            sinks = await generate_all(engine, requests)
        for params, sink in zip(requests, sinks, strict=True):
            assert sink.token_ids == reference_of(tiny_reference, params)
            assert sink.stats is not None
            assert sink.stats.draft_tokens == 0
        assert "a round without trees: UNAVAILABLE: model tree_builder answered no draft trees" in caplog.text
