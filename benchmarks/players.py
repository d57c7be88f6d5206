"""The benchmark's end: worker processes driven over pipes, and the served models driven over gRPC.

All stay loaded during the whole run, so that they can take turns; only the one that was asked computes.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from benchmarks.contenders import PlayerName
from benchmarks.dflash_environment import ensure_dflash
from benchmarks.errors import BenchmarkError
from benchmarks.measurement import Answer, Job, Setup
from ddtree_client import Client
from ddtree_local.project import Project
from ddtree_local.server import LocalTriton
from ddtree_local.serving import ServedPair

_TIMEOUT_S = 600.0  # for loading, and for one answer
_MODULES: Mapping[PlayerName, str] = {
    "in-process": "benchmarks.workers.ours",
    "transformers": "benchmarks.workers.transformers_peer",
    "dflash": "benchmarks.workers.dflash_peer",
}


class Player(Protocol):
    """A loaded model that decodes when asked."""

    def decode(self, job: Job) -> Answer:
        """Decode one prompt."""

    def close(self) -> None:
        """End it; a second call does nothing."""


class Worker:
    """A worker process, ready to be asked.

    Args:
        name: what errors call it.
        module: the program, run with this interpreter in the project's folder.
        setup: what it loads.
        root: the project's folder.
        env: variables on top of this process's own.

    Raises:
        BenchmarkError: it ended, failed or said nothing in time; so does every `decode`.
    """

    def __init__(
        self, name: str, module: str, setup: Setup, *, root: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self._name = name
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed by close
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": str(setup.threads), "HF_HUB_OFFLINE": "1", **(env or {})},
        )
        try:
            self._ask(asdict(setup))
        except BaseException:
            self.close()
            raise

    def decode(self, job: Job) -> Answer:
        """Decode one prompt in the worker."""
        return Answer.from_json(self._ask(job.to_json())["answer"])

    def close(self) -> None:
        """End the worker: its input ends."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _ask(self, value: Mapping[str, Any]) -> dict[str, Any]:
        pipe = self._process
        assert pipe.stdin is not None
        assert pipe.stdout is not None
        try:
            pipe.stdin.write(json.dumps(value) + "\n")
            pipe.stdin.flush()
        except OSError:
            raise self._ended() from None
        if not select.select([pipe.stdout], [], [], _TIMEOUT_S)[0]:
            raise BenchmarkError(f"{self._name}: no answer within {_TIMEOUT_S:g} s")
        line = pipe.stdout.readline()
        if not line:
            raise self._ended()
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise BenchmarkError(f"{self._name}: {said['error']}")
        return said

    def _ended(self) -> BenchmarkError:
        self._log.seek(0)
        lines = self._log.read().splitlines()
        return BenchmarkError(f"{self._name}: the worker ended ({lines[-1] if lines else 'it said nothing'})")


class ServedModel:
    """A real Triton server with its own weights, asked over gRPC on loopback.

    Args:
        project: whose models are served.
        pair: what they load.
        threads: CPU threads of each process.
        env: more variables for the server.

    Raises:
        LocalTritonError: the server does not start.
        DDTreeClientError: a request fails.
    """

    def __init__(
        self, project: Project, pair: ServedPair, threads: int, env: Mapping[str, str] | None = None
    ) -> None:
        self._server = LocalTriton(
            project.model_repository,
            load_models=pair.load_models,
            env={
                **pair.environment,
                "DDTREE_THREADS": str(threads),
                "OMP_NUM_THREADS": str(threads),
                **(env or {}),
            },
            ready_timeout_s=_TIMEOUT_S,
        )
        self._server.start()
        self._client = Client(self._server.grpc_url, timeout_s=_TIMEOUT_S)

    @property
    def version(self) -> str:
        """Triton's version."""
        return self._client.health().server_version

    def decode(self, job: Job) -> Answer:
        """Decode one prompt on the server, whose stop ids are the target's own."""
        stream = self._client.stream(
            input_ids=job.input_ids,
            max_tokens=job.max_tokens,
            draft_mode=job.draft_mode,
            tree_budget=job.tree_budget,
        )
        for _ in stream:
            pass
        result, stats = stream.result, stream.result.stats
        return Answer(
            token_ids=result.token_ids,
            first_tokens=stats.first_chunk_tokens,
            first_s=stats.time_to_first_token_s,
            total_s=stats.total_s,
            rounds=stats.rounds,
            nodes=stats.draft_tokens / stats.rounds if stats.rounds else None,
        )

    def close(self) -> None:
        """Stop the server."""
        self._client.close()
        self._server.stop()


def start_player(name: PlayerName, setup: Setup, project: Project) -> Player:
    """Load a player and wait until it can be asked.

    Raises:
        BenchmarkError: a worker does not load.
        LocalTritonError: the server does not start.
    """
    if name in _MODULES:
        # In front of the import path of this one worker, and of nobody else.
        env = {"PYTHONPATH": str(ensure_dflash(project.root / ".cache"))} if name == "dflash" else None
        return Worker(name, _MODULES[name], setup, root=project.root, env=env)
    pair = ServedPair(
        target=Path(setup.target),
        draft=Path(setup.draft),
        topology="bls" if name == "grpc" else "in_process",
        dtype=setup.dtype,
        prefix_cache=False,
    )
    return ServedModel(project, pair, setup.threads)
