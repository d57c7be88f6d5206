"""What is asked of the CUDA driver, by a small one of ours; only a GPU opens another process's memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from typing import Any

import pytest
import torch

from ddtree.device.memory_handle import Handle, handle_of, opened
from ddtree.kv_cache import CacheShape, KvPool
from ddtree.shared_features import FeatureReader, NotShared, SharedFeatures, Span

GPU = torch.device("cuda", 0)
BASE, ADDRESS, MAPPED = 0x7F1234560000, 0x7F1234561200, 0x7E0000000000


class Driver:
    """One allocation of another process; `code` is what every call answers."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.closed: list[int] = []

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: ctypes.c_uint64) -> int:  # noqa: N802
        assert address.value == ADDRESS
        base._obj.value, size._obj.value = BASE, 1 << 20
        return self.code

    def cuIpcGetMemHandle(self, handle: Any, base: ctypes.c_uint64) -> int:  # noqa: N802
        assert base.value == BASE
        ctypes.memmove(ctypes.addressof(handle._obj), bytes(range(64)), 64)
        return self.code

    def cuIpcOpenMemHandle_v2(self, base: Any, handle: Any, flags: ctypes.c_uint) -> int:  # noqa: N802
        assert bytes(handle) == bytes(range(64))
        assert flags.value == 1
        base._obj.value = MAPPED
        return self.code

    def cuIpcCloseMemHandle(self, base: ctypes.c_uint64) -> int:  # noqa: N802
        self.closed.append(base.value)
        return self.code


class Elsewhere(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    is_cuda = True
    device = GPU

    def data_ptr(self) -> int:
        return ADDRESS


def small_pool() -> KvPool:
    shape = CacheShape(1, 1, 1, feature_size=10, dtype=torch.float32)
    return KvPool(shape, budget_bytes=shape.bytes_per_slot * 16, page_size=4, device=torch.device("cpu"))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: made)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch, "as_tensor", lambda data, device: (data, device))
    return made


def test_a_handle_opens_the_allocation_and_the_tensor_lies_in_it(driver: Driver) -> None:
    handle = handle_of(torch.zeros(4, 8).as_subclass(Elsewhere))
    assert handle == Handle(bytes(range(64)).hex(), ADDRESS - BASE)
    made: Any = opened(handle, (4, 32), GPU)
    data, device = made
    assert device == GPU
    interface = data.__cuda_array_interface__
    assert (interface["data"], interface["shape"]) == ((MAPPED + ADDRESS - BASE, False), (4, 32))
    assert driver.closed == []
    del made, data
    gc.collect()
    assert driver.closed == [MAPPED], "nobody holds the tensor any more"


def test_features_on_a_gpu_stay_where_they_are_and_are_read_there(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []
    kept = torch.zeros(16, 10)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    monkeypatch.setattr("ddtree.shared_features.place_of", lambda _: "cuda 0")
    monkeypatch.setattr("ddtree.shared_features.handle_of", lambda _: Handle("ab", 12))
    monkeypatch.setattr(
        "ddtree.shared_features.opened",
        lambda handle, shape, _: kept.view(torch.uint8) if (handle.offset, shape) == (12, (16, 40)) else None,
    )
    pool = small_pool()
    pool.features = kept.as_subclass(Elsewhere)
    shared = SharedFeatures(pool)
    assert isinstance(pool.features, Elsewhere), "nothing else is put in its place"
    pool.features = kept  # pages are tensors of the same device
    pages = pool.reserve(7)
    assert pages is not None
    kept[pages.slots] = torch.randn(pages.capacity, 10)
    references = shared.refer([Span(pages.indices, 2, 7)])
    assert waits == [GPU], "another process may read as soon as it has references"
    reader = FeatureReader(GPU, torch.float32)
    rows, is_fresh = reader.read(references)
    assert is_fresh.all()
    assert torch.equal(rows, kept[pages.slots[2:7]])
    pool.release(pages)
    assert pool.reserve(1) is not None
    assert reader.read(references)[1].tolist() == [False, False, True, True, True]


def test_a_driver_that_refuses_is_told_as_what_it_is(driver: Driver) -> None:
    driver.code = 801
    features = torch.zeros(16, 10).as_subclass(Elsewhere)
    with pytest.raises(OSError, match="error 801"):
        handle_of(features)
    with pytest.raises(OSError, match="error 801"):
        opened(Handle(bytes(range(64)).hex(), 0), (4, 32), GPU)
    pool = small_pool()
    table, pool.features = pool.table, features
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddtree.shared_features.place_of", lambda _: "cuda 0")
        with pytest.raises(NotShared, match="error 801"):
            SharedFeatures(pool)
    assert pool.table is table, "the pool is as it was"
    assert pool.features is features
