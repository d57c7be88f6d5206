"""What the kubelet runs inside the server's container: is it ready, is it alive.

Standard library only, over the container's own loopback, so that it needs neither a certificate nor a key.
It knows the server's HTTP interface and one metric name; it does not know the engine.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

PROGRESS = "ddtree_rounds_total"
DRAINING = "this server is draining"  # how a refusal by a shut gate begins
_POLL_S = 1.0
_READ_S = 5.0
_TINY_REQUEST = {"text_input": "a", "max_tokens": 1, "draft_mode": "off"}

Verdict = tuple[bool, str]


class Server:
    """The server in this container."""

    def __init__(self, http: str, metrics: str) -> None:
        self._http = http
        self._metrics = metrics

    def is_ready(self, model: str) -> bool:
        """Whether a model says that it is ready. Raises OSError when nobody answers."""
        try:
            with urllib.request.urlopen(f"{self._http}/v2/models/{model}/ready", timeout=_READ_S) as answer:  # noqa: S310 - http, by construction
                return bool(answer.status == 200)
        except urllib.error.HTTPError:
            return False

    def generate(self, timeout_s: float) -> None:
        """Have one token generated. Raises OSError (HTTPError when the server refused)."""
        request = urllib.request.Request(  # noqa: S310 - http, by construction
            f"{self._http}/v2/models/ddtree/generate",
            data=json.dumps(_TINY_REQUEST).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
            answer.read()

    def total(self, name: str) -> float | None:
        """Sum of all samples of a metric; None when there is none. Raises OSError."""
        with urllib.request.urlopen(f"{self._metrics}/metrics", timeout=_READ_S) as answer:  # noqa: S310
            lines = answer.read().decode().splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if _name_of(line) == name]
        return sum(values) if values else None


def _name_of(line: str) -> str:
    return line.split("{", 1)[0].split(" ", 1)[0]


def ready(server: Server, models: Sequence[str]) -> Verdict:
    """Ready when every model is."""
    missing = [model for model in models if not server.is_ready(model)]
    return not missing, f"not ready: {', '.join(missing)}" if missing else "every model is ready"


def alive(server: Server, timeout_s: float) -> Verdict:
    """Alive when a token comes out, or when others get theirs meanwhile.

    A full queue lets a new request wait for longer than any probe may, or refuses it: then the number of
    rounds tells a busy server from a dead one. One whose gate is shut says so: a restart would cut the
    streams that the gate waits for, and open it.
    """
    before = server.total(PROGRESS)
    attempt = _Attempt(server, timeout_s)
    # A daemon: it must not keep the probe when the verdict is known.
    threading.Thread(target=attempt.run, daemon=True).start()
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if attempt.ended.wait(_POLL_S) and attempt.refusal is None:
            return True, "a token was generated"
        if DRAINING in (attempt.refusal or ""):
            return True, "the gate is shut"
        if server.total(PROGRESS) != before:
            return True, "rounds go on"
        if attempt.ended.is_set():
            time.sleep(_POLL_S)
    return False, f"no token within {timeout_s:g} s and no round meanwhile: {attempt.refusal or 'no answer'}"


class _Attempt:
    """One request for one token, and how it ended."""

    def __init__(self, server: Server, timeout_s: float) -> None:
        self.ended = threading.Event()
        self.refusal: str | None = None
        self._server = server
        self._timeout_s = timeout_s

    def run(self) -> None:
        """Send it and note the end."""
        try:
            self._server.generate(self._timeout_s)
        except urllib.error.HTTPError as error:
            self.refusal = f"{error.code} {error.read(500).decode(errors='replace')}"
        except OSError as error:
            self.refusal = str(error) or type(error).__name__
        self.ended.set()


def main(arguments: Sequence[str]) -> int:
    """Run one probe; says why on stderr, which the kubelet puts into the pod's events."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http", default="http://127.0.0.1:8000", help="base URL of the server's HTTP port")
    parser.add_argument("--metrics", default="http://127.0.0.1:8002", help="base URL of its metrics port")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("ready").add_argument("models", nargs="+")
    commands.add_parser("alive").add_argument("--timeout-seconds", type=float, default=30.0)
    options = parser.parse_args(arguments)
    server = Server(options.http, options.metrics)
    try:
        if options.command == "ready":
            is_well, why = ready(server, options.models)
        else:
            is_well, why = alive(server, options.timeout_seconds)
    except OSError as error:
        is_well, why = False, f"the server does not answer: {error}"
    sys.stderr.write(f"{why}\n")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
