"""The server of a soak: the product's own models over the small pair, and what it holds at any moment."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc

from ddtree_client import Client
from ddtree_client.control import ServerControl
from ddtree_client.watchdog import Watchdog
from ddtree_local.server import LocalTriton
from tests.triton.oracle_server import TinyPair

MODELS = ("tree_builder", "drafter", "target_verifier", "ddtree")
STAGES = ("target_verifier", "drafter")
_REST_S = 30.0


@dataclass(frozen=True)
class Memory:
    """What a server takes, bytes."""

    resident: int  # of tritonserver and all stubs together
    shared: int  # its files in /dev/shm


@dataclass(frozen=True)
class World:
    """A running server."""

    triton: LocalTriton

    def client(self) -> Client:
        return Client(self.triton.grpc_url, timeout_s=120.0)

    def watchdog(self, end_server: Callable[[], None] | None = None) -> Watchdog:
        """One that has seen everybody alive."""
        dog = Watchdog(self.control(), MODELS, end_server=end_server)
        assert list(dog.look()) == []
        return dog

    def control(self) -> ServerControl:
        return ServerControl(self.triton.http_url, self.triton.metrics_url)

    def stub_of(self, model: str) -> int:
        """Process id of a model's stub; the newest one, where a dead copy is not gone yet."""
        found = [pid for pid, command in self._processes() if f"/{model}/" in command]
        assert found, f"no stub of {model}"
        return max(found)

    def memory(self) -> Memory:
        """What the server takes now."""
        resident = sum(_resident(pid) for pid, _ in self._processes())
        files = Path("/dev/shm").glob(f"{self.triton.shm_prefix}*")
        return Memory(resident, sum(file.stat().st_blocks * 512 for file in files))

    def held(self) -> Mapping[str, int]:
        """Sessions and pages of both stages together."""
        usages = [self._describe(stage)["usage"] for stage in STAGES]
        return {name: sum(usage[name] for usage in usages) for name in ("sessions", "pages_used")}

    def held_at_rest(self) -> Mapping[str, int]:
        """The same once it is nothing, or after half a minute."""
        deadline = time.monotonic() + _REST_S
        while any((held := self.held()).values()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return held

    def _describe(self, stage: str) -> dict[str, Any]:
        op = grpc.InferInput("op", [1], "BYTES")
        op.set_data_from_numpy(np.array([b"describe"], dtype=np.object_))
        with grpc.InferenceServerClient(self.triton.grpc_url) as client:
            answer = client.infer(stage, [op], outputs=[grpc.InferRequestedOutput("info")])
            described: dict[str, Any] = json.loads(bytes(answer.as_numpy("info")[0]))
            return described

    def _processes(self) -> Iterator[tuple[int, str]]:
        """The server's own and its stubs' process ids and command lines."""
        prefix = self.triton.shm_prefix
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                command = (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue  # ended meanwhile
            if prefix in command:
                yield int(folder.name), command


@contextmanager
def soaked(
    folder: Path, project: Path, *, exit_timeout_s: float = 30.0, **environment: str
) -> Iterator[World]:
    """Run a server over a new small pair; what it logs is in the folder's triton.log.

    With a short `exit_timeout_s` where a process is killed: on 2.51 such a server waits it out.
    """
    pair = TinyPair.make(folder)
    triton = LocalTriton(
        project / "model_repository",
        load_models=MODELS,
        env={
            **pair.environment("bls"), "DDTREE_STAGE_RECOVERY_S": "60", "DDTREE_SESSION_TTL_S": "20",
            "DDTREE_LOG_LEVEL": "warning", **environment,
        },
        log_path=folder / "triton.log",
        exit_timeout_s=exit_timeout_s,
    )  # fmt: skip
    with triton:
        yield World(triton)


def _resident(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    # Without what is shared with others: the libraries' pages count once anyway.
    return (int(status[1]) - int(status[2])) * 4096
