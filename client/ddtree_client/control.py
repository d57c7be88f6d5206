"""A Triton server seen from its own machine: HTTP on loopback, with the operators' key if it asks for one.

Standard library only: what watches a server needs neither certificates nor gRPC. It knows the server's
interface and how its models are asked whether they live; it does not know when to do what.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

ORCHESTRATOR = "ddtree"
KEY_HEADER = "admin-key"
_READ_S = 5.0


class ControlError(Exception):
    """The server refused something or does not answer; the message says what."""


@dataclass(frozen=True)
class Reply:
    """A status and what came with it."""

    status: int
    text: str


@dataclass(frozen=True)
class ServerControl:
    """The server whose HTTP port is ``http`` (HOST:PORT) and whose metrics are at ``metrics``."""

    http: str
    metrics: str = ""
    key: str = ""

    def ask_whether_alive(self, model: str, timeout_s: float) -> str:
        """Make a model's own process answer: why it does not, or nothing.

        Readiness is no answer: Triton before 25.12 calls a model ready whose process is dead. TimeoutError
        when there is none in time; ControlError when the server itself does not answer.
        """
        if model == ORCHESTRATOR:
            # Decoupled, so not for `infer`; to stop what does not run is no work at all: nobody has this id.
            path, body = "generate", {"id": f"watchdog-{uuid4().hex}", "stop": True}
        else:
            op = {"name": "op", "shape": [1], "datatype": "BYTES", "data": ["describe"]}
            path, body = "infer", {"inputs": [op], "outputs": [{"name": "stage_ms"}]}
        reply = self._ask(f"{self.http}/v2/models/{model}/{path}", body, timeout_s)
        is_dead = any(words in reply.text for words in ("is not healthy", "is not ready", "unknown model"))
        return reply.text if is_dead else ""

    def reload(self, model: str, timeout_s: float) -> None:
        """Load a model anew, in a process of its own. Raises ControlError.

        Unload comes first: to load what has not changed does nothing. Nobody waits for its end, which never
        comes for a copy whose process died in a call.
        """
        for order in ("unload", "load"):
            reply = self._ask(f"{self.http}/v2/repository/models/{model}/{order}", {}, timeout_s)
            if reply.status != 200:
                raise ControlError(f"{order} of {model} was refused: {reply.text}")

    def total(self, *names: str) -> float | None:
        """Sum of all samples of these metrics; None when there is none of them. Raises ControlError."""
        lines = self._ask(f"{self.metrics}/metrics", None).text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if _name_of(line) in names]
        return sum(values) if values else None

    def _ask(self, address: str, body: dict[str, Any] | None, timeout_s: float = _READ_S) -> Reply:
        """GET without a body, else POST."""
        url = address if "://" in address else f"http://{address}"
        request = urllib.request.Request(  # noqa: S310 - http or what the operator gave
            url, data=None if body is None else json.dumps(body).encode(), headers={KEY_HEADER: self.key}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
                return Reply(int(answer.status), answer.read().decode())
        except urllib.error.HTTPError as error:
            return Reply(error.code, error.read(2000).decode(errors="replace"))
        except TimeoutError:
            raise
        except OSError as error:
            if isinstance(getattr(error, "reason", None), TimeoutError):
                raise TimeoutError(str(error)) from None
            raise ControlError(f"the server at {address} does not answer: {error}") from None


def _name_of(line: str) -> str:
    return line.split("{", 1)[0].split(" ", 1)[0]
