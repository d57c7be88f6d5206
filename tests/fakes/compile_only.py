"""A driver for Triton that has no device: kernels are compiled for an H200 as on one, and launched nowhere.

Wrappers are called as they are, with tensors of PyTorch's `meta` device, which have shapes and no memory: so
real sizes cost nothing, and a wrapper that looks at a value fails here as it would in a capture. What a real
driver would refuse at a launch is refused too. This module knows no kernels of ours.

Only for processes without TRITON_INTERPRET: the interpreter compiles nothing.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

SHARED_BYTES = 227 * 1024  # what a program may have on sm_90
_MOST_THREADS = 1024
_MOST_GRID = (2**31 - 1, 65535, 65535)
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Instructions that say how a kernel works, by what their line in PTX holds.
_INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "mma": r"\bmma\.sync",
    "fma": r"fma\.rn\.(?:ftz\.)?f32",  # in a product: thousands, where tensor cores are not used
    "async_16": r"cp\.async\.cg\.shared\.global",  # 16 bytes a thread
    "async_less": r"cp\.async\.ca\.shared\.global",  # 4 or 8
    "tma": r"cp\.async\.bulk\.tensor",
    "load_16": r"ld\.global\S*\.(?:v4\.b32|v2\.b64)",
    "loads": r"ld\.global",
}


class Refused(Exception):
    """What CUDA would refuse at a launch."""


@dataclass(frozen=True)
class Variant:
    """One kernel as it was compiled for one set of constants and specialised arguments."""

    kernel: str  # module and name
    case: str  # what was called when it was first needed
    constants: dict[str, Any]
    warps: int
    stages: int
    shared: int  # bytes
    registers: int
    stack: int  # bytes of a thread in local memory: what did not fit into registers, or is indexed
    instructions: dict[str, int]  # counts in PTX, by the names above
    ptx: str  # path of the text


@dataclass
class CompileOnly:
    """The driver. `case` is set by whoever calls wrappers; `variants` grows."""

    case: str = ""
    variants: list[Variant] = field(default_factory=list)
    _source: Any = None  # of the kernel that is being loaded
    _metadata: Any = None

    def install(self) -> None:
        """Make this the driver that launches go to."""
        triton.runtime.driver.set_active(self)
        triton.knobs.runtime.kernel_load_end_hook.add(self._loaded)

    @property
    def utils(self) -> CompileOnly:
        return self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002 - Triton's interface
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:  # noqa: ARG002
        return {"max_shared_mem": SHARED_BYTES}

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Triton makes a launcher just before it loads a kernel."""
        self._source, self._metadata = source, metadata
        return _launch

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[Any, ...]:  # noqa: ARG002
        """Module, function, registers, spills and most threads."""
        return cubin, name, 0, 0, _MOST_THREADS

    def _loaded(self, cubin: bytes, function: str, name: str, files: dict[str, str], digest: str) -> None:
        del function, digest
        source, metadata = self._source, self._metadata
        ptx = Path(files[f"{name}.ptx"])
        text = ptx.read_text(encoding="utf-8")
        registers, stack = _resources(cubin, ptx.with_suffix(".loaded.cubin"))
        names = source.fn.arg_names
        self.variants.append(
            Variant(
                kernel=f"{source.fn.__module__}.{source.fn.__name__}",
                case=self.case,
                constants={names[path[0]]: _plain(value) for path, value in source.constants.items()},
                warps=metadata.num_warps,
                stages=metadata.num_stages,
                shared=metadata.shared,
                registers=registers,
                stack=stack,
                instructions={name: len(re.findall(form, text)) for name, form in _INSTRUCTIONS.items()},
                ptx=str(ptx),
            )
        )


def _launch(x: int, y: int, z: int, *arguments: object) -> None:
    del arguments
    for size, most in zip((x, y, z), _MOST_GRID, strict=True):
        if not 1 <= size <= most:
            raise Refused(f"a grid of {(x, y, z)} programs: CUDA takes 1 to {_MOST_GRID}")


def _resources(cubin: bytes, path: Path) -> tuple[int, int]:
    """Registers and bytes of stack of each thread."""
    path.write_bytes(cubin)
    command = [str(_TOOLS / "cuobjdump"), "-res-usage", str(path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])


def _plain(value: Any) -> Any:
    value = getattr(value, "value", value)
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)
