"""Chooses and checks the three ports of a server. Does not know what listens on them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ddtree_local.errors import PortInUseError
from ddtree_local.prerequisites import port_is_free

# Below every system's range for outgoing connections: the server binds only after its models are loaded, and
# a port that the kernel hands out could be somebody's outgoing connection by then.
_FIRST, _LAST = 12_000, 32_000
_TRIES = 200


@dataclass(frozen=True)
class Ports:
    """Where one server listens."""

    http: int
    grpc: int
    metrics: int


def choose_ports(host: str, http: int | None, grpc: int | None, metrics: int | None) -> Ports:
    """Check the ports that were asked for and fill in free ones for None or 0.

    Raises:
        PortInUseError: a port that was asked for is taken, or is asked for twice.
    """
    asked = {"http": http or 0, "grpc": grpc or 0, "metrics": metrics or 0}
    fixed = [port for port in asked.values() if port]
    if len(set(fixed)) != len(fixed):
        raise PortInUseError(f"ports: {fixed} must differ; give each of http, grpc and metrics its own")
    for name, port in asked.items():
        if port and not port_is_free(host, port):
            raise PortInUseError(
                f"{name} port: {host}:{port} is taken; stop what listens there or give another {name} port"
            )
    chosen: dict[str, int] = {}
    for name, port in asked.items():
        chosen[name] = port or _free_port(host, {*fixed, *chosen.values()})
    return Ports(**chosen)


def _free_port(host: str, avoid: set[int]) -> int:
    for _ in range(_TRIES):
        port = random.randrange(_FIRST, _LAST)
        if port not in avoid and port_is_free(host, port):
            return port
    raise PortInUseError(f"ports: none of {_TRIES} tried between {_FIRST} and {_LAST} on {host} is free")
