"""Finds the one line of a Triton log that says why the server did not start.

Knows the phrases of Triton 2.51; knows nothing of processes.
"""

from __future__ import annotations

import json
import re

# In this order: a model's own exception says more than the server's summary of it.
_CAUSES = (
    re.compile(
        r'"failed to load \'(?P<model>[^\']+)\' version \d+: [A-Z][A-Za-z ]+: (?P<text>(?:[^"\\]|\\.)*)"'
    ),
    re.compile(r'"Poll failed for model directory \'(?P<model>[^\']+)\': (?P<text>(?:[^"\\]|\\.)*)"'),
    re.compile(r'"failed to load \'(?P<model>[^\']+)\'[,:] (?P<text>(?:[^"\\]|\\.)*)"'),
    re.compile(r"(?P<text>[^\n]*error while loading shared libraries:[^\n]*)"),
    re.compile(r"(?P<text>[^\n]*(?:Address|Socket '[^']*') already in use[^\n]*)"),
    re.compile(r"(?P<text>Signal \((?:6|7|8|11)\) received[^\n]*)"),
    re.compile(r"^error: (?P<text>[^\n]+)", re.MULTILINE),
)
_PYTHON_TRACE = "\n\nAt:\n"


def _plain(quoted: str) -> str:
    """Undo the log's escapes, drop the Python stack, and make it one line."""
    try:
        text = str(json.loads(f'"{quoted}"'))
    except ValueError:
        text = quoted
    return " ".join(text.split(_PYTHON_TRACE)[0].split())


def decisive_line(log: str) -> str:
    """The cause of a failed start in one line; the log's last line when no known phrase is found."""
    for cause in _CAUSES:
        found = cause.search(log)
        if found is None:
            continue
        text = _plain(found["text"])
        model = found.groupdict().get("model")
        return f"model '{model}' did not load: {text}" if model else text
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else "the server ended without a word"
