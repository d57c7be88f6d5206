"""The Triton servers behind a gateway: which of them answer, and which has the least to do.

Knows health and counts, not requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ddtree_client import AsyncClient, DDTreeClientError
from ddtree_gateway.settings import Settings

_LOG = logging.getLogger(__name__)
_CHECK_TIMEOUT_S = 2.0


class Endpoint:
    """One Triton server."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.in_flight = 0  # requests of this gateway
        self.is_ready = False  # as of the last look

    @contextmanager
    def serving(self) -> Iterator[AsyncClient]:
        """Count a request while it runs."""
        self.in_flight += 1
        try:
            yield self.client
        finally:
            self.in_flight -= 1

    async def look(self) -> None:
        """Ask whether the model is ready; never raises."""
        try:
            ready = await self.client.ready(timeout_s=_CHECK_TIMEOUT_S)
        except DDTreeClientError:
            ready = False
        self.note(ready)

    def note(self, ready: bool) -> None:
        """Note how it was found, and say so in the log when that is news."""
        if ready != self.is_ready:
            _LOG.warning("%s is %s", self.client.address, "ready" if ready else "not ready")
        self.is_ready = ready


class Endpoints:
    """All servers of a gateway; belongs to one event loop."""

    def __init__(self, settings: Settings) -> None:
        self._interval_s = settings.check_interval_s
        self.all = tuple(
            Endpoint(AsyncClient(address, model=settings.model, tls=settings.tls))
            for address in settings.endpoints
        )
        self._turn = 0
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look at every server once, and again and again from now on."""
        await self._look()
        self._watch = asyncio.create_task(self._look_always(), name="gateway-health")

    async def stop(self) -> None:
        """Close all connections."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        for endpoint in self.all:
            await endpoint.client.close()

    @property
    def is_ready(self) -> bool:
        """Whether some server takes requests."""
        return any(endpoint.is_ready for endpoint in self.all)

    def by_load(self) -> list[Endpoint]:
        """All servers, the best choice first.

        Ready ones before the others, which are tried too: they may be ready again since the last look. Among
        equals the turn goes round.
        """
        self._turn += 1
        count = len(self.all)
        turned = [self.all[(self._turn + index) % count] for index in range(count)]
        return sorted(turned, key=lambda endpoint: (not endpoint.is_ready, endpoint.in_flight))

    async def _look(self) -> None:
        await asyncio.gather(*(endpoint.look() for endpoint in self.all))

    async def _look_always(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._look()
