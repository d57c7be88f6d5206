"""GPU memory of one process, opened in another: CUDA's inter-process handles, through the driver's library.

PyTorch can do the same for tensors that travel once, and counts who holds them; here one allocation is
opened by whoever comes, as often as a stage is loaded. Both processes must use the same device. Nothing here
keeps the owner from freeing its memory or from writing to it. Knows no features.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

_LIBRARY: Final = "libcuda.so.1"
_LAZY_PEER_ACCESS: Final = 1


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


@dataclass(frozen=True)
class Handle:
    """Where a tensor lies: `offset` bytes into the allocation that `text`, hexadecimal, opens."""

    text: str
    offset: int


def handle_of(tensor: torch.Tensor) -> Handle:
    """The handle of a contiguous GPU tensor, valid while its memory is not freed.

    Raises:
        OSError: the driver refuses, as it does for memory of expandable segments; or there is none.
    """
    assert tensor.is_cuda, "only a GPU's memory has a handle"
    assert tensor.is_contiguous(), "a handle opens memory from one byte to another"
    library = ctypes.CDLL(_LIBRARY)
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _IpcHandle()
    with torch.cuda.device(tensor.device):
        address = ctypes.c_uint64(tensor.data_ptr())
        _check(library.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address))
        _check(library.cuIpcGetMemHandle(ctypes.byref(handle), base))
    return Handle(bytes(handle).hex(), tensor.data_ptr() - base.value)


def opened(handle: Handle, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Another process's memory as bytes of some shape, closed when nobody holds the tensor.

    Args:
        handle: what `handle_of` gave there.
        shape: of the tensor.
        device: the one it lies on.

    Raises:
        OSError: the driver refuses, as it does in the process that owns the memory, or PyTorch does.
    """
    library, base = ctypes.CDLL(_LIBRARY), ctypes.c_uint64()
    raw = _IpcHandle.from_buffer_copy(bytes.fromhex(handle.text))
    with torch.cuda.device(device):
        _check(library.cuIpcOpenMemHandle_v2(ctypes.byref(base), raw, ctypes.c_uint(_LAZY_PEER_ACCESS)))
        mapped = _Mapped(base.value + handle.offset, shape)
        weakref.finalize(mapped, library.cuIpcCloseMemHandle, ctypes.c_uint64(base.value))
        try:
            return torch.as_tensor(mapped, device=device)
        except RuntimeError as error:
            raise OSError(f"PyTorch does not take the opened memory: {error}") from error


class _Mapped:
    """Bytes at an address of the GPU; a tensor made of it holds it."""

    def __init__(self, address: int, shape: Sequence[int]) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(shape),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _check(code: int) -> None:
    if code:
        raise OSError(f"the CUDA driver refuses to share memory between processes, error {code}")
