"""The model `ddtree` with its real request side and an engine that repeats the prompt instead of decoding.

A prompt's first word is an order: `slow` takes 100 ms a round, `fail` ends with an error after one round,
`bug` with an exception that nobody foresaw, `report` answers how earlier sequences ended. It knows no stages.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ddtree.config import ServingConfig
from ddtree.errors import Unavailable
from ddtree.events import RequestWatch
from ddtree.limits import Limits
from ddtree.live import Sink
from ddtree.params import GenerationParams
from ddtree.sequence import Sequence
from ddtree.text import TextCodec
from ddtree.triton_io.orchestrator import Orchestrator, _output_names
from ddtree.triton_io.orchestrator import TritonPythonModel as RealModel

_LOG = logging.getLogger(__name__)
_ROUND_TOKENS = 3


class EchoEngine:
    """Emits the prompt again, three tokens a round of five draft tokens."""

    limits = Limits.for_target(vocab_size=400, context_length=512, max_nodes=64)

    def __init__(self, text: TextCodec) -> None:
        self._text = text
        self._ended: Counter[str] = Counter()
        self._live = 0

    async def start(self) -> None:
        """Nothing to reach."""

    async def generate(
        self, params: GenerationParams, sink: Sink, request: RequestWatch | None = None
    ) -> None:
        """Repeat the prompt."""
        del request
        self._live += 1
        self._ended["most at once"] = max(self._ended["most at once"], self._live)
        try:
            await self._repeat(params, sink)
        finally:
            self._live -= 1

    async def stop(self) -> None:
        """Leave a trace in the server's log."""
        await asyncio.sleep(0)
        _LOG.warning("the echo engine was stopped")

    async def _repeat(self, params: GenerationParams, sink: Sink) -> None:
        order, _, _ = self._text.decode(params.prompt_ids).partition(" ")
        ids = list(params.prompt_ids)
        if order == "report":
            ids = self._text.encode(json.dumps(self._ended))
        sequence = Sequence(params, session_id=1, decoder=self._text)
        for start in range(0, len(ids), _ROUND_TOKENS):
            await asyncio.sleep(0.1 if order == "slow" else 0)
            if sink.is_cancelled():
                self._ended["cancelled"] += 1
                sink.emit(sequence.end("cancelled"), sequence.stats)
                return
            if start and order == "fail":
                raise Unavailable("the engine was told to fail; retry later")
            if start and order == "bug":
                raise ZeroDivisionError("nobody foresaw this")
            chunk = ids[start : start + _ROUND_TOKENS]
            if start + _ROUND_TOKENS >= len(ids):
                chunk.append(min(self._text.stop_ids))
            delta = sequence.append(chunk, draft_tokens=5 if start else None)
            sink.emit(delta, sequence.stats)
            if delta.finish_reason:
                self._ended[delta.finish_reason] += 1
                return


class TritonPythonModel(RealModel):
    """The real model but for the engine."""

    def initialize(self, args: Mapping[str, str]) -> None:
        config = ServingConfig.from_triton(json.loads(args["model_config"]))
        text = TextCodec.from_folder(config.target)
        engine: Any = EchoEngine(text)
        self._orchestrator = Orchestrator(engine, text, outputs=_output_names(args))
