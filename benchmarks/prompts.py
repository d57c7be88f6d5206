"""Reads prompt files: one JSON object a line, the prompt is the first of its `turns`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.errors import BenchmarkError

_FORM = 'a line looks like {"turns": ["…"], "category": "math"}'


@dataclass(frozen=True)
class Prompt:
    """One user message."""

    text: str
    category: str  # "" when the file names none


def read_prompts(path: Path, limit: int | None = None) -> tuple[Prompt, ...]:
    """The first `limit` prompts of a file; blank lines are passed over.

    Raises:
        BenchmarkError: the file cannot be read, has no prompt, or a line is not of the form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"--prompts: {path} cannot be read ({error}); give a JSON Lines file") from None
    prompts = tuple(parse_line(line, number) for number, line in enumerate(lines, 1) if line.strip())
    if not prompts:
        raise BenchmarkError(f"--prompts: {path} has no prompt; {_FORM}")
    return prompts[:limit]


def parse_line(line: str, number: int) -> Prompt:
    """The prompt of line `number`.

    Raises:
        BenchmarkError: it is not of the form.
    """
    try:
        value = json.loads(line)
    except ValueError as error:
        raise BenchmarkError(f"--prompts: line {number} is no JSON ({error}); {_FORM}") from None
    turns = value.get("turns") if isinstance(value, dict) else None
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
        raise BenchmarkError(f"--prompts: line {number} has no text in turns[0]; {_FORM}")
    return Prompt(turns[0], str(value.get("category") or ""))
