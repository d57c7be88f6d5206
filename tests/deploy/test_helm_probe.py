"""The probe script against a scripted server: what only load or failure would show on a real one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ddtree.drain_gate import DrainGate
from ddtree.errors import Unavailable
from deploy.helm.ddtree.files import probe


@dataclass
class Script:
    """What the server answers."""

    metrics: list[str]  # one text a scrape; the last one stays
    generate_status: int = 200
    generate_s: float = 0.0
    refusal: str = "too many requests wait"
    scrapes: int = 0
    generated: threading.Event = field(default_factory=threading.Event)

    def scrape(self) -> str:
        text = self.metrics[min(self.scrapes, len(self.metrics) - 1)]
        self.scrapes += 1
        return text


@contextmanager
def scripted(script: Script) -> Iterator[probe.Server]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

        def do_GET(self) -> None:
            self._answer(200, script.scrape())

        def do_POST(self) -> None:
            script.generated.set()
            time.sleep(script.generate_s)
            self._answer(script.generate_status, json.dumps({"error": script.refusal}))

        def _answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield probe.Server(address, address)
    finally:
        server.shutdown()
        server.server_close()


def rounds(count: int) -> str:
    return f'# HELP x\nddtree_rounds_total{{model="ddtree"}} {count}\nddtree_rounds_total_x 7\n'


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_POLL_S", 0.02)


def test_a_busy_server_is_alive_although_the_request_waits() -> None:
    script = Script([rounds(5), rounds(5), rounds(6)], generate_s=6.0)
    with scripted(script) as server:
        started = time.monotonic()
        assert probe.alive(server, 5.0) == (True, "rounds go on")
        assert time.monotonic() - started < 4.0
        assert script.generated.wait(10)


def test_a_busy_server_is_alive_although_the_request_is_refused() -> None:
    with scripted(Script([rounds(5), rounds(5), rounds(5), rounds(6)], generate_status=503)) as server:
        assert probe.alive(server, 10.0) == (True, "rounds go on")


def test_a_server_that_answers_nothing_and_decodes_nothing_is_dead() -> None:
    with scripted(Script([rounds(5)], generate_s=2.0)) as server:
        is_alive, why = probe.alive(server, 0.2)
    assert not is_alive
    assert why.startswith("no token within 0.2 s and no round meanwhile")


def test_a_refusal_without_rounds_is_dead_and_says_why() -> None:
    with scripted(Script([rounds(5)], generate_status=500)) as server:
        is_alive, why = probe.alive(server, 1.0)
    assert not is_alive
    assert "500" in why
    assert "too many requests wait" in why


def test_a_server_whose_gate_is_shut_is_alive(tmp_path: Path) -> None:
    (tmp_path / "drain").touch()
    with pytest.raises(Unavailable) as refused:
        DrainGate(tmp_path / "drain").check()
    script = Script([rounds(5)], generate_status=503, refusal=str(refused.value))
    with scripted(script) as server:
        assert probe.alive(server, 10.0) == (True, "the gate is shut")


def test_a_closed_port_is_neither_ready_nor_alive(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(Script([rounds(1)])) as server:
        address = server._http
    for command in (["ready", "ddtree"], ["alive"]):
        assert probe.main(["--http", address, "--metrics", address, *command]) == 1
        # The last line: the scripted server of an earlier test may still say that its caller went away.
        assert capsys.readouterr().err.splitlines()[-1].startswith("the server does not answer: ")
