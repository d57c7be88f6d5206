"""What `serve` and `demo` share: a checked pair of checkpoints, and a server that is told of it.

The choice travels by environment variables, which the models' configurations read. Nothing is printed here.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn

from ddtree_client.control import KEY_HEADER
from ddtree_local.errors import LocalTritonError, PrerequisiteError
from ddtree_local.ports import Ports
from ddtree_local.prerequisites import missing
from ddtree_local.project import Project
from ddtree_local.server import LocalTriton

Topology = Literal["bls", "in_process"]

ORCHESTRATOR = "ddtree"
"""The model that clients call."""

STAGES = ("tree_builder", "drafter", "target_verifier")
"""The models that it calls in topology `bls`."""

_RECOVERY_S = "60"


@dataclass(frozen=True)
class ServedPair:
    """Which checkpoints are served, and how.

    Raises:
        LocalTritonError: a folder is missing or is no checkpoint.
    """

    target: Path
    draft: Path
    topology: Topology = "bls"
    dtype: str | None = None  # None: the models' own default
    prefix_cache: bool = True  # off where the same prompt is asked again to be measured again

    def __post_init__(self) -> None:
        _check_checkpoint("target (MODEL, --model)", self.target)
        _check_checkpoint("drafter (DRAFT, --draft)", self.draft)

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that tell the models."""
        variables = {
            "DDTREE_TARGET": str(self.target.resolve()),
            "DDTREE_DRAFT": str(self.draft.resolve()),
            "DDTREE_TOPOLOGY": self.topology,
        }
        if self.dtype is not None:
            variables["DDTREE_DTYPE"] = self.dtype
        if not self.prefix_cache:
            variables["DDTREE_PREFIX_CACHE"] = "false"
        return variables

    @property
    def load_models(self) -> tuple[str, ...] | None:
        """In one process the orchestrator holds every stage: loading the others would load weights twice."""
        return (ORCHESTRATOR,) if self.topology == "in_process" else None


def _check_checkpoint(what: str, folder: Path) -> None:
    if not folder.is_dir():
        raise LocalTritonError(
            f"{what}: {folder} is not a folder; give a checkpoint folder in transformers' layout"
        )
    if not (folder / "config.json").is_file():
        raise LocalTritonError(f"{what}: {folder} has no config.json; give a folder in transformers' layout")
    if not any(folder.glob("*.safetensors")):
        raise LocalTritonError(f"{what}: {folder} has no *.safetensors; convert the weights to that format")


def check_prerequisites() -> None:
    """Refuse a machine that cannot run the server.

    Raises:
        PrerequisiteError: one line per gap.
    """
    gaps = missing()
    if gaps:
        raise PrerequisiteError("\n".join(f"missing prerequisite: {gap}" for gap in gaps))


def local_server(
    project: Project,
    pair: ServedPair,
    *,
    host: str = "127.0.0.1",
    ports: Ports | None = None,
    log_path: Path | None = None,
    ready_timeout_s: float = 600.0,
    unary: bool = False,
    watch_key: str = "",
    drain_file: Path | None = None,
) -> LocalTriton:
    """A server, not started yet, for the project's models and this pair; `ports` None picks free ones.

    With `unary` it also has the model `ddtree_unary`. With `watch_key` a watchdog that knows the key can have
    models loaded again, and sequences wait for that. `drain_file` is what `ddtree drain` makes.
    """
    load_models, arguments, env = pair.load_models, [], dict(pair.environment)
    if watch_key:
        load_models = load_models or (*STAGES, ORCHESTRATOR)
        closed = f"model-repository:{KEY_HEADER}={watch_key}"
        arguments = [f"--http-restricted-api={closed}", f"--grpc-restricted-protocol={closed}"]
        env["DDTREE_STAGE_RECOVERY_S"] = _RECOVERY_S
    if drain_file is not None:
        env["DDTREE_DRAIN_FILE"] = str(drain_file)
    if unary and load_models is not None:
        load_models = (*load_models, f"{ORCHESTRATOR}_unary")
    return LocalTriton(
        project.model_repository,
        load_models=load_models,
        extra_args=[*arguments, *([f"--model-repository={project.unary_repository}"] if unary else [])],
        env=env,
        host=host,
        http_port=ports.http if ports else None,
        grpc_port=ports.grpc if ports else None,
        metrics_port=ports.metrics if ports else None,
        ready_timeout_s=ready_timeout_s,
        log_path=log_path,
    )


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Inside, SIGTERM and a closed terminal stop things as Ctrl-C does."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
