"""One order carried out: streams from the servers, merged, with another server tried where one refuses.

Cancelling whoever reads cancels on the servers. Knows chunks and results, not how an answer is written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from ddtree_client import AsyncClient, AsyncStream, Chunk, OverloadedError, Result, ServerUnavailableError
from ddtree_client.metrics import ClientMetrics
from ddtree_client.types import GenerateOptions
from ddtree_gateway.endpoints import Endpoints
from ddtree_gateway.options import Order, Prompt

_Item = tuple[int, Chunk] | Exception | None  # None: a prompt's answer is complete
_GRACE_S = 1.0
_WAITING_CHUNKS = 16  # of several prompts together; more of them wait at the server


class Generation:
    """An order under way: read `chunks` to the end, then `results`."""

    def __init__(self, order: Order, endpoints: Endpoints, metrics: ClientMetrics) -> None:
        self._order = order
        self._endpoints = endpoints
        self._metrics = metrics
        self._begin = time.monotonic()
        self._results: dict[int, tuple[Result, ...]] = {}
        self.request_id = ""  # of the first prompt, in the servers' logs; known with the first chunk

    @property
    def results(self) -> list[Result]:
        """One per sequence: those of the first prompt, of the second, and so on."""
        return [result for prompt in sorted(self._results) for result in self._results[prompt]]

    async def chunks(self) -> AsyncGenerator[tuple[int, Chunk]]:
        """Chunks with the index of their sequence, as they come.

        Raises:
            DDTreeClientError: a server refused or failed, and no other one could help.
        """
        if len(self._order.prompts) == 1:
            async with aclosing(self._answer(0, self._order.prompts[0])) as one:
                async for item in one:
                    yield item
            return
        queue: asyncio.Queue[_Item] = asyncio.Queue(_WAITING_CHUNKS)
        prompts = enumerate(self._order.prompts)
        tasks = [asyncio.create_task(self._feed(queue, index, prompt)) for index, prompt in prompts]
        try:
            for _ in tasks:
                while (waiting := await queue.get()) is not None:
                    if isinstance(waiting, Exception):
                        raise waiting
                    yield waiting
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(self, queue: asyncio.Queue[_Item], index: int, prompt: Prompt) -> None:
        try:
            async with aclosing(self._answer(index, prompt)) as answer:
                async for item in answer:
                    await queue.put(item)
        except Exception as error:  # noqa: BLE001 - whoever reads the queue raises it
            await queue.put(error)
        else:
            await queue.put(None)

    async def _answer(self, index: int, prompt: Prompt) -> AsyncGenerator[tuple[int, Chunk]]:
        """One prompt's chunks, from the first server that takes it."""
        refusal: ServerUnavailableError | OverloadedError | None = None
        for endpoint in self._endpoints.by_load():
            is_begun = False
            try:
                with endpoint.serving() as client:
                    stream = self._send(client, prompt)
                    chunks = self._metrics.async_chunks(
                        stream, self._order.options.get("draft_mode") or "tree"
                    )
                    async with aclosing(chunks) as counted:  # type: ignore[type-var]  # a generator
                        async for chunk in counted:
                            if index == 0:
                                self.request_id = stream.request_id
                            is_begun = True
                            yield index * self._order.sequences + chunk.row, chunk
                self._results[index] = stream.results
                return
            except (ServerUnavailableError, OverloadedError) as error:
                if isinstance(error, ServerUnavailableError):
                    await endpoint.look()
                # What was shown cannot be taken back, and another server might say something else.
                if is_begun:
                    raise
                # That a server is full says more than that another one is not there; ready ones come first.
                if refusal is None or isinstance(error, OverloadedError):
                    refusal = error
        assert refusal is not None, "a gateway has at least one server"
        raise refusal

    def _send(self, client: AsyncClient, prompt: Prompt) -> AsyncStream:
        passed_s = time.monotonic() - self._begin  # with servers that did not take it
        options: GenerateOptions = {**self._order.options}
        timeout_s = self._order.timeout_s - passed_s
        if self._order.deadline_s is not None:
            left_s = self._order.deadline_s - passed_s
            options["deadline_ms"] = min(max(1, round(1000 * left_s)), 2**31 - 1)
            # The server ends the answer in time; this is for one that does not.
            timeout_s = min(timeout_s, left_s + _GRACE_S)
        return client.stream(
            prompt.text,
            messages=prompt.messages,
            input_ids=prompt.token_ids,
            deadline_s=max(timeout_s, 0.001),
            **options,
        )
