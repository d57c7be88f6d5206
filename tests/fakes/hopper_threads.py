"""Runs the kernels of `attention_hopper` on a CPU, where neither Triton's interpreter nor a compiler can.

Their own Python code runs, each partition of a program's warps as a thread. One thread runs at a time: until
it has to wait, or lets others go on, who then do at once what they were let do. Products that are started
are carried out as late as the kernel allows, and what is brought overwrites memory at once but is there only
when somebody waits for it. So what is read too early or kept too short shows in the numbers, and a wait for
ever is reported. Every run is the same. Layouts mean nothing here: the compiler checks them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

_LONGEST = 60.0  # seconds that a thread waits for its turn: for a test that fails, not for one that passes


class Number(int):
    """A scalar of a kernel, which knows how to change its type."""

    def to(self, _: object) -> Number:
        return self

    def __floordiv__(self, other: int) -> Number:
        return Number(int(self) // int(other))


class Pointer:
    """A tensor's memory from some element on."""

    def __init__(self, memory: torch.Tensor, at: Any) -> None:
        self.memory, self.at = memory, at

    @classmethod
    def to_tensor(cls, tensor: torch.Tensor) -> Pointer:
        whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        return cls(whole, tensor.storage_offset())

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + offset)


class Shared:
    """Memory of a program."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    def index(self, at: int) -> Shared:
        return Shared(self.memory[int(at)])

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.memory[start : start + length])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.memory.permute(*order))

    def store(self, value: torch.Tensor) -> None:
        self.memory.copy_(value)


class Barrier:
    """A barrier in memory: its phase ends when all have arrived and all bytes have."""

    def __init__(self) -> None:
        self.count = self.missing = self.bytes = self.phase = 0
        self.coming: list[tuple[torch.Tensor, torch.Tensor]] = []  # memory, and what is brought there

    def has_ended(self, parity: int) -> bool:
        """Whether the phase of this parity is over; what is coming comes now that somebody waits."""
        while self.coming:
            to, brought = self.coming.pop()
            to.copy_(brought)
            self.bytes -= 2 * to.numel()
            self.advance()
        return self.phase % 2 != parity

    def advance(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count


class Barriers:
    """Several of them."""

    def __init__(self, size: int) -> None:
        self._barriers = [Barrier() for _ in range(size)]

    def index(self, at: int) -> Barrier:
        return self._barriers[int(at)]


class Product:
    """A product that was started."""

    def __init__(self, find: Callable[[], torch.Tensor]) -> None:
        self._find = find
        self._found: torch.Tensor | None = None

    def value(self) -> torch.Tensor:
        if self._found is None:
            self._found = self._find()
        return self._found


class Partitions:
    """Threads of which one runs at a time."""

    def __init__(self) -> None:
        self._turn, self._local = threading.Condition(), threading.local()
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._running = 0
        self._failure: BaseException | None = None

    def run(self, works: Sequence[tuple[Callable[..., None], Sequence[object]]]) -> None:
        """All of them, to their ends."""
        self._waiting, self._running, self._failure = dict.fromkeys(range(len(works)), lambda: True), 0, None
        threads = [threading.Thread(target=self._one, args=(at, *work)) for at, work in enumerate(works)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def let_others(self, until: Callable[[], bool] = lambda: True) -> None:
        """Others go on, this one once `until` holds and it is its turn."""
        own = self._local.own
        with self._turn:
            self._waiting[own] = until
            self._hand_on(own)
            self._wait(own)

    @property
    def started(self) -> list[Product]:
        """Products that this partition has under way."""
        started: list[Product] = self._local.started
        return started

    def _one(self, own: int, work: Callable[..., None], arguments: Sequence[object]) -> None:
        self._local.own, self._local.started = own, []
        try:
            with self._turn:
                self._wait(own)
            work(*arguments)
        except BaseException as error:  # noqa: BLE001 - raised again by who runs them
            self._failure = self._failure or error
        with self._turn:
            del self._waiting[own]
            self._hand_on(own)

    def _hand_on(self, own: int) -> None:
        order = sorted(self._waiting, key=lambda at: (at <= own, at))
        ready: list[int] = []
        try:
            ready = [at for at in order if self._waiting[at]()]
            assert ready or not order, "every partition waits for another"
        except Exception as error:  # noqa: BLE001 - what was to be brought may be nowhere
            self._failure = self._failure or error
        self._running = ready[0] if ready else -1
        self._turn.notify_all()

    def _wait(self, own: int) -> None:
        self._turn.wait_for(lambda: self._running == own or self._failure is not None, _LONGEST)
        if self._failure is not None or self._running != own:
            raise self._failure or AssertionError("no turn came")


class HopperThreads:
    """Stands in for a kernel of Gluon's: `kernel[grid](*arguments, **constants)`."""

    def __init__(self, kernel: str, modules: Sequence[ModuleType]) -> None:
        self._partitions, self._ids = Partitions(), (0, 0)
        names: dict[str, Any] = {}
        for module in modules:
            names |= {name: getattr(value, "value", value) for name, value in vars(module).items()}
        own = {
            name: value.fn
            for name, value in names.items()
            if isinstance(getattr(value, "fn", None), FunctionType)
        }
        names |= {"gl": self._language(), "tma": SimpleNamespace(async_copy_global_to_shared=self._bring)}
        names |= {"mbarrier": self._barriers(), "together": lambda: None, "fence_async_shared": lambda: None}
        names |= {"warpgroup_mma": self._multiply, "warpgroup_mma_wait": self._finish}
        names |= {name: FunctionType(function.__code__, names, name) for name, function in own.items()}
        self._kernel = names[kernel]

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, **constants: Any) -> None:  # noqa: ARG001
            given = [
                Pointer.to_tensor(value) if isinstance(value, torch.Tensor) else value for value in arguments
            ]
            for self._ids in ((x, y) for y in range(grid[1]) for x in range(grid[0])):
                self._kernel(*given, **constants)

        return launch

    def _language(self) -> SimpleNamespace:
        def where(condition: Any, yes: Any, no: Any) -> Any:
            if not isinstance(condition, torch.Tensor):
                return yes if condition else no
            return torch.where(condition, *(torch.as_tensor(value) for value in (yes, no)))

        def least(one: Any, other: Any) -> Any:
            return Number(min(one, other))

        def greatest(one: Any, other: Any) -> Any:
            return torch.maximum(one, other) if isinstance(one, torch.Tensor) else Number(max(one, other))

        def allocate(_: object, shape: Sequence[int], layout: object) -> Shared | Barriers:
            if layout is Barrier:
                return Barriers(shape[0])
            return Shared(torch.full(shape, torch.nan))

        return SimpleNamespace(
            constexpr=None, bfloat16=torch.float32, float32=torch.float32, int64=torch.int64,
            NVMMADistributedLayout=_layout, NVMMASharedLayout=_layout, DotOperandLayout=_layout,
            BlockedLayout=_layout, SliceLayout=_layout, static_range=range, exp2=torch.exp2, log2=torch.log2,
            arange=lambda start, end, _: torch.arange(start, end),
            full=lambda shape, value, *_: torch.full(shape, value),
            zeros=lambda shape, *_: torch.zeros(shape),
            expand_dims=torch.unsqueeze, convert_layout=lambda value, _: value,
            max=lambda value, axis: value.amax(axis), sum=lambda value, axis: value.sum(axis),
            where=where, minimum=least, maximum=greatest, allocate_shared_memory=allocate,
            program_id=lambda axis: Number(self._ids[axis]), load=_load, store=_store,
            warp_specialize=lambda works, *_: self._partitions.run(works),
        )  # fmt: skip

    def _barriers(self) -> SimpleNamespace:
        def init(barrier: Barrier, count: int) -> None:
            barrier.count = barrier.missing = count

        def expect(barrier: Barrier, size: int) -> None:
            barrier.bytes += size
            barrier.missing -= 1

        def arrive(barrier: Barrier) -> None:
            assert barrier.missing > 0, "more arrive than are waited for"
            barrier.missing -= 1
            barrier.advance()
            self._partitions.let_others()

        def wait(barrier: Barrier, parity: int) -> None:
            if not barrier.has_ended(parity):
                self._partitions.let_others(lambda: barrier.has_ended(parity))

        return SimpleNamespace(
            MBarrierLayout=lambda: Barrier, init=init, expect=expect, arrive=arrive, wait=wait
        )

    def _bring(self, descriptor: Any, at: Sequence[int], barrier: Barrier, to: Shared) -> None:
        rows, columns = descriptor.block_shape
        assert list(to.memory.shape) == [rows, columns], "a copy is as large as its descriptor's block"
        to.memory.fill_(torch.nan)
        barrier.coming.append((to.memory, descriptor.base[at[0] : at[0] + rows, at[1] : at[1] + columns]))

    def _multiply(
        self, one: Any, other: Shared, added: Any, use_acc: bool = True, is_async: bool = False
    ) -> Any:
        product = Product(lambda: _value(one) @ other.memory + (_value(added) if use_acc else 0))
        if not is_async:
            return product.value()
        self._partitions.started.append(product)
        return product

    def _finish(self, under_way: int, deps: Sequence[Any]) -> Any:
        started = self._partitions.started
        while len(started) > under_way:
            started.pop(0).value()
        found = tuple(_value(dependency) for dependency in deps)
        assert not any(product in deps for product in started), "what is under way has no value yet"
        return found[0] if len(found) == 1 else found


def _layout(*_: object) -> None:
    """A layout of Gluon's."""


def _value(operand: Any) -> torch.Tensor:
    return operand.value() if isinstance(operand, Product) else getattr(operand, "memory", operand)


def _load(pointer: Pointer, mask: torch.Tensor | None = None, other: float = 0.0) -> Any:
    if mask is None:
        return Number(pointer.memory[pointer.at])
    at, mask = torch.broadcast_tensors(pointer.at, mask)
    found = torch.full(at.shape, other, dtype=pointer.memory.dtype)
    found[mask] = pointer.memory[at[mask]]
    return found


def _store(pointer: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
    at, value, mask = torch.broadcast_tensors(pointer.at, value, mask)
    pointer.memory[at[mask]] = value[mask]
