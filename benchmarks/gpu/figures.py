"""The numbers that are asked for, beside what must be reached and what is aimed at. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.setting import found
from benchmarks.gpu.stages import LONG, ROUND_NODES, SHORT

_Sections = Mapping[str, Any]
_VERIFIED = str(ROUND_NODES + 1)


@dataclass(frozen=True)
class Figure:
    """One number of the summary."""

    key: str
    title: str
    must: float
    aim: float
    read: Callable[[_Sections], float | None]
    is_least: bool = False  # whether more is better

    @property
    def unit(self) -> str:
        """`ms` or `×`."""
        return "ms" if self.key.endswith("_ms") else "×"

    def verdict(self, value: float | None) -> str:
        """`aim`, `must`, `missed`, or nothing without a value."""
        if value is None:
            return ""
        for word, bound in (("aim", self.aim), ("must", self.must)):
            if value >= bound if self.is_least else value <= bound:
                return word
        return "missed"


def best_way(context: Any) -> str | None:
    """The last of the ways of running a round that ran: the product's."""
    ways = [name for name, facts in (found(context, "ways") or {}).items() if "error" not in facts]
    return ways[-1] if ways else None


def _stage(*path: str) -> Callable[[_Sections], float | None]:
    def read(sections: _Sections) -> float | None:
        context = found(sections, "stages", "contexts", SHORT)
        value: float | None = found(context, "ways", best_way(context) or "", *path, "ms")
        return value

    return read


def _verified_over_plain(section: str, label: str) -> Callable[[_Sections], float | None]:
    def read(sections: _Sections) -> float | None:
        context = found(sections, section, "contexts", label)
        way = found(context, "ways", best_way(context) or "")
        plain, verified = found(way, "plain", "ms"), found(way, "verify", _VERIFIED, "ms")
        return verified / plain if plain and verified else None

    return read


def _plainly(*path: str) -> Callable[[_Sections], float | None]:
    def read(sections: _Sections) -> float | None:
        value: float | None = found(sections, *path)
        return value

    return read


FIGURES = (
    Figure("qwen3_8b_plain_ms", "Qwen3-8B shape: plain step", 5.2, 4.4, _stage("plain")),
    Figure("qwen3_8b_verify65_ms", "Qwen3-8B shape: verify 65 rows", 6.5, 5.0, _stage("verify", _VERIFIED)),
    Figure("qwen3_8b_draft_ms", "Qwen3-8B shape: draft 16 + top 64", 1.2, 0.8, _stage("draft")),
    Figure("qwen3_8b_round64_ms", "Qwen3-8B shape: whole round, 64 nodes", 8.5, 6.5, _stage("round")),
    Figure("demo_tree_over_plain", "demo pair: tree over plain", 2.2, 3.0,
           _plainly("demo", "tree_over_plain"), is_least=True),
    Figure("demo_tree_over_dflash", "demo pair: tree over the dflash package", 4.0, 8.0,
           _plainly("demo", "tree_over_dflash"), is_least=True),
    Figure("context16k_verify65_over_plain", "Qwen3-8B shape, context 16K: verify 65 over plain", 1.35, 1.15,
           _verified_over_plain("stages", LONG)),
    # The aim is for the largest batch; the must is for every one.
    Figure("worst_batch_tree_over_plain", "demo pair, batch 1 to 32: worst tree over plain", 1.0, 1.3,
           _plainly("demo", "worst_batch_tree_over_plain"), is_least=True),
    Figure("bls_minus_in_process_ms", "bls round minus in_process round", 2.2, 1.0,
           _plainly("topologies", "bls_minus_in_process_ms")),
)  # fmt: skip
# Asked for elsewhere, so in the table and not in the summary.
BESIDES = (
    Figure("qwen36_27b_verify65_over_plain", "Qwen3.6-27B shape: verify 65 over plain", 1.3, 1.3,
           _verified_over_plain("hybrid", SHORT)),
)  # fmt: skip


def summarise(sections: _Sections) -> dict[str, float | None]:
    """The flat summary: None where a section did not run."""
    return {figure.key: figure.read(sections) for figure in FIGURES}


def table(sections: _Sections) -> list[dict[str, Any]]:
    """Every figure with what was asked."""
    rows = []
    for figure in (*FIGURES, *BESIDES):
        value = figure.read(sections)
        rows.append(
            {"key": figure.key, "title": figure.title, "unit": figure.unit, "value": value,
             "must": figure.must, "aim": figure.aim, "more_is_better": figure.is_least,
             "reached": figure.verdict(value)}
        )  # fmt: skip
    return rows
