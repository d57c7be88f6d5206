"""Writes ddtree/README.md from values.schema.json and values.yaml: `python deploy/helm/chart_docs.py`.

The schema says what a value means, values.yaml what it is by default; nothing is said twice. It checks that
the two have the same values, and that every file in ci/ says what it shows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "ddtree"
_INTRO = """# DDTree on Kubernetes

Tree speculative decoding on Triton Inference Server. Written by `python deploy/helm/chart_docs.py`; change
`values.schema.json` instead of this file.

What must be set: `image.repository` (build `deploy/docker/Dockerfile` and push it), `checkpoints.target` and
`checkpoints.draft`. Installing, upgrading, sizing and what to do when it burns: `docs/OPERATIONS.md`.

Works with Helm 3 and Helm 4 and with Kubernetes 1.27 and newer (1.31 for checkpoints as image volumes).
"""


class DocsError(Exception):
    """Schema and values disagree."""


@dataclass(frozen=True)
class Row:
    """One value."""

    path: str
    kind: str
    default: str
    text: str


def rows(schema: Mapping[str, Any], values: Mapping[str, Any], path: str = "") -> Iterator[Row]:
    """Every value, in the schema's order.

    Raises:
        DocsError: a value has no description or no default, or the schema does not know it.
    """
    properties = schema["properties"]
    unknown = sorted(set(values) - set(properties))
    if unknown:
        raise DocsError(f"values.yaml has {path}{unknown[0]}, which values.schema.json does not describe")
    for name, node in properties.items():
        here = f"{path}{name}"
        if not node.get("description"):
            raise DocsError(f"values.schema.json: {here} has no description")
        if here == "global":
            continue
        if name not in values:
            raise DocsError(f"values.schema.json describes {here}, which values.yaml does not have")
        if "properties" in node and not _is_free(node):
            yield Row(here, "", "", node["description"])
            yield from rows(node, values[name], f"{here}.")
        else:
            yield Row(here, _kind(node), _code(values[name]), node["description"])


def _is_free(node: Mapping[str, Any]) -> bool:
    """Requests and limits are Kubernetes' own words: one row for both."""
    return set(node["properties"]) == {"requests", "limits"}


def _kind(node: Mapping[str, Any]) -> str:
    if "enum" in node:
        return " or ".join(f"`{value}`" for value in node["enum"])
    kind = node["type"]
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _code(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return f"`{text if len(text) <= 60 else 'see values.yaml'}`"


def examples() -> Iterator[str]:
    """One line per file in ci/: its name, and its first line, which says what it shows."""
    for path in sorted((CHART / "ci").glob("*-values.yaml")):
        first = path.read_text().splitlines()[0]
        if not first.startswith("# "):
            raise DocsError(f"ci/{path.name} must begin with a comment that says what it shows")
        yield f"- [{path.name}](ci/{path.name}): {first[2:]}"


def render() -> str:
    """The whole file. Raises DocsError."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    lines = [_INTRO, "## Values\n", "| value | type | default | meaning |", "|---|---|---|---|"]
    for row in rows(schema, values):
        path = f"`{row.path}`" if row.kind else f"**`{row.path}`**"
        lines.append(f"| {path} | {row.kind} | {row.default} | {row.text} |")
    lines += ["", "## Examples", "", "Each is linted, rendered with both Helms and checked.", "", *examples()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (CHART / "README.md").write_text(render())
