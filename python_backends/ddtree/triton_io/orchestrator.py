"""The model `ddtree` as Triton sees it: requests in, sequences through the engine, responses out.

Every request ends with exactly one final flag, whatever happens: an exception that escapes a coroutine here
would leave its caller waiting for ever and the server unable to stop. Knows no stage.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Protocol

from ddtree import logs
from ddtree.config import ServingConfig
from ddtree.drain_gate import DrainGate
from ddtree.engine import Engine
from ddtree.errors import DDTreeError, InvalidArgument
from ddtree.events import Observe, Outcome, RequestArrived, RequestEnded, RequestWatch, ignore
from ddtree.grammar import GrammarCompiler
from ddtree.limits import Limits
from ddtree.live import Sink
from ddtree.params import GenerationParams, validate
from ddtree.raw_request import RawRequest
from ddtree.scheduler import Scheduler
from ddtree.stages.base import OwnStages, Stages
from ddtree.text import TextCodec
from ddtree.thinking import ThinkingAdvice
from ddtree.triton_io.bls_call import reach_stages
from ddtree.triton_io.observability import Observability
from ddtree.triton_io.requests import parse
from ddtree.triton_io.responses import Answer, lists_outputs, stop_outputs, wants_trace
from ddtree.triton_io.tensors import ResponseChannel, read_inputs

_LOG = logging.getLogger(__name__)
# BLS calls wait in asyncio's default executor, which has only six threads on two cores.
_EXECUTOR_THREADS = 32
_LOOP_END_S = 5.0
_FINALIZE_S = 15  # well below Triton's exit timeout of 30 s
_OUTCOMES: Final[Mapping[str, Outcome]] = {
    "INVALID_ARGUMENT": "invalid",
    "RESOURCE_EXHAUSTED": "overloaded",
    "UNAVAILABLE": "unavailable",
    "CANCELLED": "cancelled",
}
_SHORT_PROMPT_BYTES = 4096  # tokenised in less time than it takes to ask another thread


class DecodeEngine(Protocol):
    """What the orchestrator asks of `ddtree.engine.Engine`."""

    @property
    def limits(self) -> Limits:
        """What requests are checked against; known once started."""
        ...

    async def start(self) -> None:
        """Reach the stages."""
        ...

    async def generate(
        self, params: GenerationParams, sink: Sink, request: RequestWatch | None = None
    ) -> None:
        """Run one sequence, of a request, to its end."""
        ...

    async def stop(self) -> None:
        """End everything."""
        ...


class Orchestrator:
    """Answers requests with an engine."""

    def __init__(
        self,
        engine: DecodeEngine,
        text: TextCodec,
        observability: Observability | None = None,
        outputs: frozenset[str] = frozenset(),
        gate: DrainGate | None = None,
        thinking: ThinkingAdvice | None = None,
        own: OwnStages | None = None,
    ) -> None:
        """Take the engine; `outputs`, asked for by who lists none; and `own`, this process's stages."""
        self._thinking = thinking
        self._own = own
        self._gate = gate or DrainGate(None)
        self._engine = engine
        self._text = text
        self._observability = observability
        self._outputs = outputs
        self._observe: Observe = observability.observe if observability else ignore
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = asyncio.Lock()
        self._is_started = False
        self._grammars: GrammarCompiler | None = None  # once started: only the engine knows the vocabulary
        self._live: defaultdict[str, set[Answer]] = defaultdict(set)

    async def handle(self, requests: Sequence[Any]) -> None:
        """Answer requests; never raises."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.set_default_executor(
                ThreadPoolExecutor(_EXECUTOR_THREADS, thread_name_prefix="ddtree")
            )
            if self._observability is not None:
                self._observability.start()
        await asyncio.gather(*(self._answer(request) for request in requests))

    def close(self) -> None:
        """End the engine; called by another thread than the event loop's, when no request is left."""
        if self._loop is None:
            return
        # Triton stops the loop before it finalizes a model, but the loop must wake up to notice.
        self._loop.call_soon_threadsafe(self._loop.stop)
        deadline = time.monotonic() + _LOOP_END_S
        while self._loop.is_running() and time.monotonic() < deadline:
            time.sleep(0.005)
        if not self._loop.is_running():
            self._loop.run_until_complete(self._stop_all())

    async def _stop_all(self) -> None:
        if self._observability is not None:
            await self._observability.stop()
        await self._engine.stop()

    async def _answer(self, request: Any) -> None:
        channel = ResponseChannel(request)
        wanted = frozenset(request.requested_output_names())
        traced = self._text if wants_trace(wanted, self._outputs) else None
        # Who lists nothing may want JSON, which Triton makes no valid one of where bytes are no text.
        token_bytes = self._text.token_bytes if lists_outputs(wanted, self._outputs) else None
        answer = Answer(channel, wanted, traced, token_bytes=token_bytes)
        watch = self._watch(request)
        self._observe(RequestArrived(watch))
        ended = RequestEnded(watch, "completed")
        request_id = request.request_id()
        try:
            # Before the first await: the input tensors' memory is Triton's.
            parsed = parse(read_inputs(request), request.timeout())
            if parsed.is_stop:
                self._stop(request_id)
                if self._own is not None:
                    await self._own.check()  # a watchdog gives this order to see whether this process is well
                channel.send(stop_outputs(), is_final=True)
                ended = RequestEnded(watch, "stop_order")
            else:
                self._gate.check()
                await self._generate(request_id, parsed.rows, answer, watch)
                if answer.cancelled_by:
                    ended = RequestEnded(watch, "cancelled", answer.cancelled_by)
        except DDTreeError as error:
            answer.fail(error)
            ended = _ended_by(error, watch)
        except Exception:  # noqa: BLE001 - a caller must get an answer
            _LOG.exception("a request failed", extra={"request_id": request_id})
            name = f"request {request_id!r}" if request_id else "this request"
            answer.fail(DDTreeError(f"the server failed on {name}; its log says why"))
            ended = RequestEnded(watch, "failed")
        finally:
            channel.close()
            self._observe(ended)

    def _watch(self, request: Any) -> RequestWatch:
        if self._observability is None:
            return RequestWatch()
        try:
            return self._observability.watch(request)
        except Exception:  # noqa: BLE001 - a caller's odd trace context must not cost the answer
            _LOG.exception("a request cannot be watched")
            return RequestWatch()

    async def _generate(
        self, request_id: str, rows: Sequence[RawRequest], answer: Answer, watch: RequestWatch
    ) -> None:
        self._live[request_id].add(answer)
        try:
            await self._start()
            # All rows before the first one decodes: a refused request costs nobody anything.
            params = [await self._validate(row, f"row {i}: " * (len(rows) > 1)) for i, row in enumerate(rows)]
            answer.warning = self._thinking.about(rows) if self._thinking else ""
            sequences = [
                (each, answer.open_row(row, each, partial(self._text.decode, each.prompt_ids)))
                for row, validated in enumerate(params)
                for each in validated.sequences()
            ]
            # After the first error the answer is over, and the others end because nobody waits for them.
            await asyncio.gather(*(self._engine.generate(each, sink, watch) for each, sink in sequences))
        finally:
            self._live[request_id].discard(answer)
            if not self._live[request_id]:
                del self._live[request_id]

    def _stop(self, request_id: str) -> None:
        """Cancel what runs under this id; it may have ended meanwhile, which is no error."""
        if not request_id:
            raise InvalidArgument(
                "stop needs the id of the request to cancel, got none; send it as request id"
            )
        for answer in self._live.get(request_id, ()):
            answer.stop()

    async def _start(self) -> None:
        # Not in initialize: Triton refuses calls to other models there.
        if self._is_started:
            return
        async with self._starting:
            if not self._is_started:
                await self._engine.start()
                self._grammars = self._text.grammars(self._engine.limits.vocab_size)
                self._is_started = True

    async def _validate(self, raw: RawRequest, prefix: str) -> GenerationParams:
        check = partial(validate, raw, self._engine.limits, self._text, self._grammars)
        try:
            size = len(raw.text_input or raw.messages or b"") + len(raw.chat_template_kwargs or b"")
            if size <= _SHORT_PROMPT_BYTES and not raw.is_guided:
                return check()
            return await asyncio.get_running_loop().run_in_executor(None, check)
        except InvalidArgument as error:
            raise InvalidArgument(f"{prefix}{error.args[0]}") from error


def _ended_by(error: DDTreeError, watch: RequestWatch) -> RequestEnded:
    outcome = _OUTCOMES.get(error.code, "failed")
    if outcome == "cancelled":
        return RequestEnded(watch, outcome, "shutdown")  # the only reason for the engine to cancel by itself
    return RequestEnded(watch, outcome, error="" if isinstance(error, InvalidArgument) else str(error))


def _output_names(args: Mapping[str, str]) -> frozenset[str]:
    return frozenset(output["name"] for output in json.loads(args["model_config"])["output"])


class TritonPythonModel:
    """Triton's interface."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load what this process needs; an error here stops the server with its message."""
        logs.configure(args["model_name"])
        config = ServingConfig.from_triton(json.loads(args["model_config"]))
        text = TextCodec.from_folder(config.target)
        observability = Observability(args["model_name"], config)
        stages = self._load_stages(config, observability.observe)
        scheduler = Scheduler(
            max_sequences=config.max_sequences,
            max_waiting=config.max_waiting,
            prefill_chunk=config.prefill_chunk,
            queue_timeout_ms=config.queue_timeout_ms,
        )
        engine = Engine(
            stages,
            text,
            scheduler=scheduler,
            feed_chunk=config.prefill_chunk,
            max_step_nodes=config.max_step_nodes,
            observe=observability.observe,
        )
        observability.attach(stages, lambda: engine.is_idle)
        self._orchestrator = Orchestrator(
            engine,
            text,
            observability,
            _output_names(args),
            DrainGate(config.drain_file),
            ThinkingAdvice(config.draft, text.chat_template),
            stages if isinstance(stages, OwnStages) else None,
        )

    async def execute(self, requests: Sequence[Any]) -> None:
        """Answer requests; Triton runs this in the background, so that many overlap."""
        await self._orchestrator.handle(requests)

    def finalize(self) -> None:
        """End what runs; a process that cannot end says in the log where it hangs, and is ended."""
        faulthandler.dump_traceback_later(_FINALIZE_S, exit=True)
        self._orchestrator.close()

    def _load_stages(self, config: ServingConfig, observe: Observe) -> Stages:
        if config.topology == "bls":
            return reach_stages(config, observe)
        # Only here: the models' modules have no business in a process that only calls stages.
        from ddtree.assembly import load_in_process

        stages = load_in_process(config)
        stages.observe = observe
        return stages
