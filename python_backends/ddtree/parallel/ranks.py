"""Joining and leaving torch.distributed: one rank per device, everything on this machine's loopback.

The store of rank 0 listens on a socket that was bound to loopback before: torch's own would listen on every
interface. Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # where its types are
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

LOOPBACK = "127.0.0.1"


def device_of(first: torch.device, rank: int) -> torch.device:
    """The device of a rank: GPUs follow each other from the first one on; a CPU is shared."""
    return torch.device(first.type, (first.index or 0) + rank) if first.type == "cuda" else first


def open_store(world: int, timeout_s: float) -> TCPStore:
    """Rank 0's store, on a free port of loopback."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK,
        port,
        world,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def reach_store(port: int, world: int, timeout_s: float) -> TCPStore:
    """A worker's connection to the store of rank 0."""
    return TCPStore(LOOPBACK, port, world, is_master=False, timeout=timedelta(seconds=timeout_s))


def join(store: TCPStore, *, rank: int, world: int, device: torch.device, timeout_s: float) -> DeviceMesh:
    """Join the group of all ranks; every rank calls this at the same time.

    Args:
        store: where the ranks find each other.
        rank: this process, 0 to `world - 1`.
        world: ranks.
        device: this rank's.
        timeout_s: after which a collective that somebody does not take part in fails.

    Returns:
        the mesh of all ranks.
    """
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(device)
    with environment(local_rank(device), GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo"):
        dist.init_process_group(
            "nccl" if is_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if is_gpu else None,
        )
        return init_device_mesh(device.type, (world,))


def leave(*, is_broken: bool = False) -> None:
    """Leave the group; of a broken one nobody is waited for."""
    if not dist.is_initialized():
        return
    if is_broken and dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()  # noqa: SLF001 - torch's only way to end hanging kernels
    else:
        dist.destroy_process_group()


def local_rank(device: torch.device) -> dict[str, str]:
    """The variable from which torch and transformers take the device's number."""
    return {"LOCAL_RANK": str(device.index or 0)}


@contextlib.contextmanager
def environment(forced: dict[str, str], **defaults: str) -> Iterator[None]:
    """Set variables for a while: `forced` in any case, the others where they are not set."""
    changed = {**{name: text for name, text in defaults.items() if name not in os.environ}, **forced}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                del os.environ[name]
            else:
                os.environ[name] = text
