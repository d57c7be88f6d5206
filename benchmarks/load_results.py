"""The file that the load run and the soak share: each replaces its own part and lines of the summary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SUMMARY = ("worst_tree_over_plain", "cancel_p95_ms", "recovery_p95_s", "requests", "unaccounted")


def merge(path: Path, part: str, details: Mapping[str, Any], summary: Mapping[str, float | None]) -> None:
    """Write a part of the file and its lines of the flat summary; the other part stays as it is.

    Args:
        path: the file; made if it is not there.
        part: `load` or `soak`.
        details: everything of this part.
        summary: some of `SUMMARY`, all of them numbers.
    """
    assert set(summary) <= set(SUMMARY), f"not in the summary: {set(summary) - set(SUMMARY)}"
    whole: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    known = {**dict.fromkeys(SUMMARY), **whole.get("summary", {}), **summary}
    parts = {name: whole[name] for name in ("load", "soak") if name in whole} | {part: details}
    path.write_text(json.dumps({"summary": known, **parts}, indent=1) + "\n")
