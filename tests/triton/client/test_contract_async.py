"""The asyncio client against a real tritonserver whose model follows a script."""

from __future__ import annotations

import asyncio

import pytest

from ddtree_client import AsyncClient, Client, DeadlineExceededError, IncompleteAnswerError, OverloadedError
from tests.triton.client.contract_server import LONG, NEVER, one_cancelled_async, script

pytestmark = pytest.mark.triton


async def test_async_streams_side_by_side(address: str) -> None:
    async with AsyncClient(address, timeout_s=30.0) as client:
        stream = client.stream(script("Grü", "ße", delay_s=0.02))
        assert [chunk.text async for chunk in stream] == ["Grü", "ße"]
        assert stream.result.text == "Grüße"
        several = asyncio.create_task(client.generate_many([script("a", "b"), script("c")]))
        many = (client.generate(script(*f"task {number}", delay_s=0.01)) for number in range(16))
        results = await asyncio.gather(*many)
        assert [row.text for row in await several] == ["ab", "c"]
        assert [each.text for each in results] == [f"task {number}" for number in range(16)]
        assert (await client.health()).model_ready("ddtree")


async def test_cancelling_the_task_cancels_on_the_server(client: Client, address: str) -> None:
    async with AsyncClient(address) as other, one_cancelled_async(client) as server:
        task = asyncio.create_task(other.generate(LONG))
        await asyncio.to_thread(server.wait_for, "begun")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await other.generate(script("fine"))).text == "fine"


async def test_async_break_cancels_on_the_server(client: Client, address: str) -> None:
    async with AsyncClient(address) as other:
        stream = other.stream(LONG)
        async with one_cancelled_async(client):
            async for _ in stream:
                break
        async with one_cancelled_async(client) as server, other.stream(LONG) as again:
            await asyncio.to_thread(server.wait_for, "begun")
        with pytest.raises(IncompleteAnswerError):
            _ = again.result


async def test_async_cancel_from_another_task_ends_the_loop_quietly(client: Client, address: str) -> None:
    async with AsyncClient(address) as other, one_cancelled_async(client):
        stream = other.stream(LONG)
        has_begun, texts = asyncio.Event(), list[str]()

        async def cancel() -> None:
            await has_begun.wait()
            stream.cancel()

        task = asyncio.create_task(cancel())
        async for chunk in stream:
            texts.append(chunk.text)
            has_begun.set()
        await task
        assert 0 < len(texts) < 400


async def test_a_task_cancelled_right_after_its_stream_stays_cancelled(client: Client, address: str) -> None:
    async with AsyncClient(address) as other, one_cancelled_async(client):
        stream, has_begun = other.stream(LONG), asyncio.Event()

        async def read() -> None:
            async for _ in stream:
                has_begun.set()

        task = asyncio.create_task(read())
        await has_begun.wait()
        stream.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_async_deadline(client: Client, address: str) -> None:
    async with AsyncClient(address) as other, one_cancelled_async(client):
        with pytest.raises(DeadlineExceededError, match=r"within 0\.8 s"):
            await other.generate(NEVER, deadline_s=0.8)


async def test_async_error_text_becomes_an_exception(address: str) -> None:
    async with AsyncClient(address) as client:
        with pytest.raises(OverloadedError, match="no free pages"):
            await client.generate(script("a", "b", error="RESOURCE_EXHAUSTED: no free pages", error_at=1))
        with pytest.raises(IncompleteAnswerError):
            await client.generate(script("a", truncated=True))
