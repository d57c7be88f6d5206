"""Kernels are compiled for an H200 through their wrappers: Triton's interpreter takes more than its compiler.

A process of its own compiles (see `tests.fakes.compile_kernels`), since this one has the interpreter. What is
looked at is what would show on a GPU as a kernel that fails, or that is slow for a reason one can read.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_SHARED_BYTES = 227 * 1024  # what a program may have on sm_90
_FEW_BYTES = 32  # of local memory a thread: a few values set aside outside of loops, or sine's table


@dataclass(frozen=True)
class Variant:
    """One kernel as it was compiled, see `compile_only.Variant`."""

    kernel: str
    case: str
    constants: dict[str, Any]
    warps: int
    stages: int
    shared: int
    registers: int
    stack: int
    instructions: dict[str, int]
    ptx: str

    @property
    def is_wide_dot(self) -> bool:
        """Whether its matrix products have the 64 rows that Hopper's own instruction takes."""
        rows = self.constants.get("BLOCK_N" if self.kernel.endswith("_dot_kernel") else "ROWS", 0)
        return self.kernel.endswith(("._dot_kernel", "._attend_kernel")) and int(rows) >= 64

    def __str__(self) -> str:
        return f"{self.kernel} of {self.case!r}"


@dataclass(frozen=True)
class Report:
    """What became of all calls."""

    variants: tuple[Variant, ...]
    problems: tuple[str, ...]

    def of(self, *names: str) -> list[Variant]:
        """Variants of the kernels with these names; there is one at least for each."""
        found = [variant for variant in self.variants if variant.kernel.rpartition(".")[2] in names]
        assert {variant.kernel.rpartition(".")[2] for variant in found} == set(names)
        return found


@pytest.fixture(scope="module")
def report(project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("compiled")
    path = folder / "report.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.fakes.compile_kernels", str(path)]
    ended = subprocess.run(
        command, check=False, cwd=project_root, env=environment, capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    read = json.loads(path.read_text(encoding="utf-8"))
    problems = tuple(f"{problem['case']}: {problem['message']}" for problem in read["problems"])
    return Report(tuple(Variant(**variant) for variant in read["variants"]), problems)


def kernels_launched(root: Path) -> set[str]:
    """Module and name of every function of Triton's that Python code launches."""
    found = set()
    for path in sorted((root / "python_backends" / "ddtree").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        kernels = {function.name for function in functions if any(map(_is_jit, function.decorator_list))}
        used = {
            node.value.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)
        }
        module = ".".join(path.relative_to(root / "python_backends").with_suffix("").parts)
        found |= {f"{module}.{name}" for name in kernels & used}
    return found


def _is_jit(decorator: ast.expr) -> bool:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(target, ast.Attribute) and target.attr == "jit"


def test_the_compiler_takes_every_call(report: Report) -> None:
    assert not report.problems, "\n\n".join(report.problems)


def test_every_kernel_that_is_launched_is_among_the_compiled(report: Report, project_root: Path) -> None:
    launched = kernels_launched(project_root)
    assert len(launched) > 20
    assert launched - {variant.kernel for variant in report.variants} == set()


def test_no_program_asks_for_more_shared_memory_than_there_is(report: Report) -> None:
    for variant in report.variants:
        assert variant.shared <= _SHARED_BYTES, variant


def test_loops_keep_their_values_in_registers(report: Report) -> None:
    for variant in report.variants:
        assert variant.stack <= _FEW_BYTES, f"{variant}: {variant.stack} bytes of a thread in local memory"


def test_as_many_programs_of_tree_attention_fit_as_the_choice_of_splits_counts_on(report: Report) -> None:
    for variant in report.of("_attend_kernel"):
        at_a_time = 2 if variant.warps == 4 else 1
        assert at_a_time * (variant.shared + 1024) <= 228 * 1024, variant
        assert at_a_time * 32 * variant.warps * -(-variant.registers // 8) * 8 <= 65536, variant


def test_products_of_64_rows_and_more_use_hoppers_own_instruction(report: Report) -> None:
    wide = [variant for variant in report.variants if variant.is_wide_dot]
    assert {variant.kernel.rpartition(".")[2] for variant in wide} == {"_dot_kernel", "_attend_kernel"}
    for variant in wide:
        assert variant.instructions["wgmma"] > 0, variant
        assert variant.instructions["mma"] == 0, variant


def test_products_of_fewer_rows_still_use_tensor_cores(report: Report) -> None:
    narrow = [variant for variant in report.of("_attend_kernel", "_decode") if not variant.is_wide_dot]
    for variant in (*narrow, *report.of("_stage_kernel")):
        assert variant.instructions["mma"] > 0, variant


def test_no_product_is_left_to_ordinary_arithmetic(report: Report) -> None:
    for variant in report.of("_dot_kernel", "_attend_kernel", "_decode", "_stage_kernel"):
        assert variant.instructions["fma"] < 400, variant


def test_weights_and_keys_come_16_bytes_at_a_time_while_others_are_worked_on(report: Report) -> None:
    for variant in report.of("_dot_kernel", "_attend_kernel", "_row_kernel"):
        counts = variant.instructions
        others = counts["async_less"] + counts["loads"] - counts["load_16"]
        assert counts["async_16"] > others, f"{variant}: {counts}"


@pytest.mark.parametrize("name", ["_add_norm_kernel", "_gate_kernel", "_gather_kernel", "_scan_kernel"])
def test_rows_are_read_16_bytes_at_a_time(report: Report, name: str) -> None:
    for variant in report.of(name):
        assert variant.instructions["load_16"] > 0, variant
