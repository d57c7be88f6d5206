"""Finds models whose process is dead or hangs, and has the server load them again.

Triton 2.51 neither restarts such a process nor says that the model is not ready; newer releases say it, and
restart nothing either. Knows when to do what; `control` knows how.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ddtree_client.control import ORCHESTRATOR, ControlError


class Server(Protocol):
    """What is asked of `ddtree_client.control.ServerControl`."""

    def ask_whether_alive(self, model: str, timeout_s: float) -> str:
        """Why a model does not answer, or nothing."""
        ...

    def reload(self, model: str, timeout_s: float) -> None:
        """Load a model anew."""
        ...


@dataclass(frozen=True)
class WatchLimits:
    """Seconds, but for `patience`."""

    answer_s: float = 10.0  # a model that takes longer may hang
    patience: int = 3  # so many times in a row, and it does; a busy stage answers between two calls
    load_s: float = 600.0
    rest_s: float = 2.0  # after a reload that failed; doubled each time, a minute at most


@dataclass
class _Watched:
    """One model."""

    has_lived: bool = False  # until then it is being loaded for the first time
    silent: int = 0  # times in a row without an answer
    rest_s: float = 0.0
    not_before: float = 0.0


class Watchdog:
    """Looks after the models of one server."""

    def __init__(
        self,
        server: Server,
        models: Sequence[str],
        limits: WatchLimits | None = None,
        end_server: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take what to look after.

        Args:
            server: asked, and told to load.
            models: their names.
            limits: when a model counts as dead.
            end_server: ends the whole server at once. Triton 2.51 never answers the streams of an
                orchestrator that died, so it is not loaded again then: a server that ends breaks their
                connections, and whoever runs it starts it anew. Without it the orchestrator is loaded again.
            clock: seconds.
        """
        self._end_server = end_server
        self._server = server
        self._limits = limits or WatchLimits()
        self._clock = clock
        self._watched = {model: _Watched() for model in models}

    def look(self) -> Iterator[str]:
        """Ask every model once and reload those that need it; yields a line for each thing worth telling."""
        for model, watched in self._watched.items():
            why = self._why_dead(model, watched)
            if not why or self._clock() < watched.not_before:
                continue
            if model == ORCHESTRATOR and self._end_server is not None:
                yield f"{model} does not live ({why}); ending the server, so that its streams end"
                self._end_server()
                return
            yield f"{model} does not live ({why}); loading it again"
            yield self._reload(model, watched)

    def _why_dead(self, model: str, watched: _Watched) -> str:
        try:
            why = self._server.ask_whether_alive(model, self._limits.answer_s)
            watched.silent = 0
            # A process that is dead was there; a model that is not ready may be loading for the first time.
            watched.has_lived = watched.has_lived or not why or "is not healthy" in why
            return why if watched.has_lived else ""
        except TimeoutError:
            watched.silent += 1
            if not watched.has_lived or watched.silent < self._limits.patience:
                return ""
            return f"no answer within {self._limits.answer_s:g} s, {watched.silent} times"
        except ControlError:  # the server is down or starting: nothing to do for one that can load nothing
            return ""

    def _reload(self, model: str, watched: _Watched) -> str:
        started = self._clock()
        try:
            self._server.reload(model, self._limits.load_s)
        except (ControlError, TimeoutError) as error:
            watched.rest_s = min(max(2 * watched.rest_s, self._limits.rest_s), 60.0)
            watched.not_before = self._clock() + watched.rest_s
            return f"{model} could not be loaded again, next try in {watched.rest_s:g} s: {error}"
        watched.silent, watched.rest_s, watched.not_before = 0, 0.0, 0.0
        return f"{model} is back after {self._clock() - started:.1f} s"
