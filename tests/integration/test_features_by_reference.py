"""Context features that cross by reference: the drafter gets the right ones, whatever the verifier loses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ddtree.errors import Unavailable
from ddtree.shared_features import REFERENCE_BYTES
from ddtree.stages.bls import BlsStages
from ddtree.wire import Arrays
from tests.fakes.pipeline import GreedyReference, generate_all
from tests.fakes.tiny_models import HIDDEN
from tests.fakes.wired_stages import CHUNK, WiredStages, engine_of
from tests.integration.stage_faults import LONG, SHORT, reference_of, request

ROW_BYTES = HIDDEN * 4


@pytest.mark.parametrize(("choice", "width"), [("always", REFERENCE_BYTES), ("auto", ROW_BYTES)])
async def test_answers_are_right_and_so_are_the_features(
    tiny_target: Path, tiny_reference: GreedyReference, choice: str, width: int
) -> None:
    wired = WiredStages(tiny_target, choice)
    async with engine_of(tiny_target, wired) as engine:
        # Chunked and whole prompts, a batch, and one whose beginning is cached and is read back.
        requests = [request(LONG, 12), request(SHORT, 12, budget=0), request(SHORT, 12, budget=5)]
        again = request((*LONG, 5, 6), 12)
        sinks = await generate_all(engine, requests)
        sinks += await generate_all(engine, [again])
        for params, sink in zip([*requests, again], sinks, strict=True):
            assert sink.token_ids == reference_of(tiny_reference, params)
        assert set(wired.widths) == {width}
        assert wired.drafter.rows > len(LONG) + len(SHORT)
        assert wired.drafter.lost == 0


@pytest.mark.parametrize("loss", ["load_verifier", "take_pages"])
async def test_a_verifier_that_goes_while_what_it_referred_to_is_on_the_way(
    tiny_target: Path, tiny_reference: GreedyReference, loss: str
) -> None:
    wired = WiredStages(tiny_target, "always")
    async with engine_of(tiny_target, wired) as engine:
        calls = 0

        def lose(operation: str) -> None:
            nonlocal calls
            calls += operation == "draft"
            if operation == "draft" and calls in (3, 9, 16):  # in a prompt, and between rounds
                getattr(wired, loss)()

        wired.before = lose
        requests = [request(LONG), request(SHORT, budget=5)]
        sinks = await generate_all(engine, requests)
        for params, sink in zip(requests, sinks, strict=True):
            assert sink.token_ids == reference_of(tiny_reference, params)
        assert wired.drafter.lost >= 3, "no reference was stale"
        assert wired.drafter.rows > len(LONG), "nothing was read by reference"


async def test_a_drafter_that_forgets_is_given_its_context_by_reference_again(
    tiny_target: Path, tiny_reference: GreedyReference
) -> None:
    wired = WiredStages(tiny_target, "always")
    async with engine_of(tiny_target, wired) as engine:
        drafts = 0

        def forget(operation: str) -> None:
            nonlocal drafts
            drafts += operation == "draft"
            wired.drafter.lose_next = operation == "draft" and drafts == 8

        wired.before = forget
        (sink,) = await generate_all(engine, [request(LONG)])
        assert sink.token_ids == reference_of(tiny_reference, request(LONG))
        assert wired.drafter.rows > 2 * len(LONG), "its context was read back"


async def test_references_taken_while_sequences_run_that_have_rows_by_value(
    tiny_target: Path, tiny_reference: GreedyReference, caplog: pytest.LogCaptureFixture
) -> None:
    """The two cannot be joined in a message to the drafter: what is owed is read back, no session is lost."""
    wired = WiredStages(tiny_target, "always")
    is_busy = True
    left = len(LONG)  # to read

    async def call(model: str, operation: str, arrays: Arrays) -> Mapping[str, Any]:
        nonlocal is_busy, left
        if operation == "probe" and is_busy:
            raise Unavailable("it is busy")
        if operation == "prefill":
            left = int(len(LONG) - arrays["sessions_lengths"][-1] - arrays["counts"][-1])
        if operation == "verify" and left <= CHUNK and is_busy:
            # The metrics ask again: this answer still comes by value, and the last chunk by reference.
            is_busy = False
            await stages.describe()
        return await wired(model, operation, arrays)

    stages = BlsStages(call)
    async with engine_of(tiny_target, wired, stages) as engine:
        requests = [request(SHORT), request(LONG)]
        sinks = await generate_all(engine, requests)
        for params, sink in zip(requests, sinks, strict=True):
            assert sink.token_ids == reference_of(tiny_reference, params)
    assert not is_busy
    assert set(wired.widths) == {ROW_BYTES, REFERENCE_BYTES}
    assert "drafts" not in caplog.text, "none was done without"


async def test_references_taken_while_what_was_cached_is_still_to_be_read_back(
    tiny_target: Path, tiny_reference: GreedyReference, caplog: pytest.LogCaptureFixture
) -> None:
    """What follows a cached beginning came by value; the beginning itself is read back by reference."""
    wired = WiredStages(tiny_target, "always")
    is_busy, is_cached = True, False

    async def call(model: str, operation: str, arrays: Arrays) -> Mapping[str, Any]:
        nonlocal is_busy
        if operation == "probe" and is_busy:
            raise Unavailable("it is busy")
        answer = await wired(model, operation, arrays)
        if operation == "prefill" and is_cached and is_busy:
            is_busy = False
            await stages.describe()
        return answer

    stages = BlsStages(call)
    async with engine_of(tiny_target, wired, stages) as engine:
        await generate_all(engine, [request(LONG)])
        is_cached = True
        (sink,) = await generate_all(engine, [request(LONG)])
    assert sink.token_ids == reference_of(tiny_reference, request(LONG))
    assert not is_busy
    assert set(wired.widths) == {ROW_BYTES, REFERENCE_BYTES}
    assert "drafts" not in caplog.text
