"""What listens to one orchestrator: its metrics, its request log, and traces where they are switched on.

Puts the parts together and starts what runs beside the requests; none of them can stop a request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ddtree.config import ServingConfig
from ddtree.events import Listeners, Observe, RequestWatch
from ddtree.metrics import Metrics
from ddtree.metrics_publisher import MetricsPublisher
from ddtree.request_log import RequestLog
from ddtree.stages.base import Stages
from ddtree.tracing import open_tracing
from ddtree.triton_io.metrics import TritonExporter
from ddtree.triton_io.trace_context import trace_context_of

_LOG = logging.getLogger(__name__)


class Observability:
    """The listeners of one model; `observe` is what tells them."""

    def __init__(
        self, model: str, config: ServingConfig, environment: Mapping[str, str] | None = None
    ) -> None:
        """Make every series, at zero; a server without metrics is no error."""
        self._publisher = _publisher(model, config)
        self._tracing = open_tracing(os.environ if environment is None else environment)
        self._task: asyncio.Task[None] | None = None
        self._stages: Stages | None = None
        self._is_idle: Callable[[], bool] = lambda: True
        listeners: list[Observe] = [RequestLog()]
        if self._publisher is not None:
            listeners.append(self._publisher.listener)
        if self._tracing is not None:
            listeners.append(self._tracing)
        self.observe: Observe = Listeners(listeners)

    def watch(self, request: Any) -> RequestWatch:
        """Begin to watch a Triton request."""
        context = trace_context_of(request) if self._tracing is not None else {}
        return RequestWatch(request.request_id(), context)

    def attach(self, stages: Stages, is_idle: Callable[[], bool]) -> None:
        """Take what is asked how full it is, and whether the engine has told the stages of every end."""
        self._stages, self._is_idle = stages, is_idle

    def start(self) -> None:
        """Begin to publish; on the event loop."""
        if self._publisher is not None and self._stages is not None:
            publishing = self._publisher.run(self._stages, self._is_idle)
            self._task = asyncio.get_running_loop().create_task(publishing, name="ddtree-metrics")

    async def stop(self) -> None:
        """End what runs."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._tracing is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._tracing.close)


def _publisher(model: str, config: ServingConfig) -> MetricsPublisher | None:
    metrics = Metrics(build_info(config))
    metrics.max_sequences().set(config.max_sequences)
    try:
        return MetricsPublisher(metrics, TritonExporter(metrics, model))
    except Exception as error:  # noqa: BLE001 - Triton says no in its own words, and requests matter more
        _LOG.warning("no metrics: Triton does not take them (%s)", error)
        return None


def build_info(config: ServingConfig) -> dict[str, str]:
    """What runs: versions and topology."""
    packages = {"version": "ddtree-serving", "torch": "torch", "transformers": "transformers"}
    versions = {label: _version_of(package) for label, package in packages.items()}
    triton = os.environ.get("TRITON_SERVER_VERSION", "unknown")
    return {**versions, "python": platform.python_version(), "triton": triton, "topology": config.topology}


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
