"""The command line and the environment of a tritonserver, as data. Starts nothing and reads nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddtree_local.ports import Ports
from ddtree_local.triton_wheel import TritonRuntime

OWNER_VARIABLE = "DDTREE_LOCAL_SERVER"
"""Set in the server's and its stubs' environment to the server's shared-memory prefix, to tell them apart."""

# A step reads all weights once, so large pages save a tenth of it on a CPU. Memory of a step's logits is kept
# for the next one: a drafter with a process of its own gave it back and met 894 page faults a round.
_MALLOC = ("hugetlb=1", "mmap_threshold=33554432", "trim_threshold=134217728")
_ENVIRONMENT = {
    # Threads of a stub that wait in turn for one another otherwise burn the few cores the other stub needs:
    # a synthetic step took 50 ms instead of 38 on two cores.
    "GOMP_SPINCOUNT": "10000",
    "GLIBC_TUNABLES": ":".join(f"glibc.malloc.{setting}" for setting in _MALLOC),
    "PYTHONNOUSERSITE": "1",
    "HF_HUB_OFFLINE": "1",
}
# The stub runs the first python3 on PATH as it is installed; these would lead it elsewhere.
_UNWANTED = ("PYTHONPATH", "PYTHONHOME")


@dataclass(frozen=True)
class ServerOptions:
    """What a server is to do; see `server.LocalTriton` for the meaning."""

    model_repository: Path  # absolute: the server runs in a folder of its own
    load_models: tuple[str, ...] | None
    host: str
    shm_prefix: str
    exit_timeout_s: float
    extra_args: tuple[str, ...]


def server_command(runtime: TritonRuntime, options: ServerOptions, ports: Ports) -> list[str]:
    """The arguments of tritonserver, the binary first."""
    loading: Sequence[str] = ()
    if options.load_models is not None:
        loading = ("--model-control-mode=explicit", *(f"--load-model={name}" for name in options.load_models))
    return [
        str(runtime.server),
        f"--model-repository={options.model_repository}",
        *loading,
        f"--backend-directory={runtime.backends}",
        f"--backend-config=python,shm-region-prefix-name={options.shm_prefix}",
        # The configurations are complete; asking the models to complete them would start every stub twice.
        "--disable-auto-complete-config",
        # Calls through Triton in flight: each holds one of these until its answer was taken.
        "--backend-config=python,thread-pool-size=64",
        # A stub answers only after it has imported its model, torch included: 30 s is short on a cold disk.
        "--backend-config=python,stub-timeout-seconds=120",
        f"--http-address={options.host}",
        f"--http-port={ports.http}",
        f"--grpc-address={options.host}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-address={options.host}",
        f"--metrics-port={ports.metrics}",
        f"--exit-timeout-secs={max(1, round(options.exit_timeout_s))}",
        *options.extra_args,
    ]


def server_environment(
    runtime: TritonRuntime, base: Mapping[str, str], extra: Mapping[str, str], prefix: Path, shm_prefix: str
) -> dict[str, str]:
    """The environment of tritonserver and, inherited, of its stubs.

    Args:
        runtime: whose libraries are to be found.
        base: the environment to build on.
        extra: what the models are told; wins over `base` and over our own settings.
        prefix: the Python environment (`sys.prefix`) that the stubs are to run in.
        shm_prefix: recorded under `OWNER_VARIABLE`.
    """
    env = {name: value for name, value in base.items() if name not in _UNWANTED}
    env.update(_ENVIRONMENT)
    env.update(extra)
    env[OWNER_VARIABLE] = shm_prefix
    env["PATH"] = os.pathsep.join([str(prefix / "bin"), env.get("PATH", os.defpath)])
    libraries = [*map(str, runtime.library_path), env.get("LD_LIBRARY_PATH", "")]
    env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
    return env
