"""A traced answer as one HTML file that needs nothing else: no network, no other file.

Text of prompts and tokens goes into the page as JSON and becomes text nodes there, never markup. The page's
content security policy names its one script and one style sheet by hash and forbids everything else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from string import Template
from typing import Any

from ddtree_client.rounds import summarise
from ddtree_client.types import Result

_FORMAT = 1
# What could end the script element or, in old parsers, a line of it.
_ESCAPES = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


@dataclass(frozen=True)
class TracedAnswer:
    """One answer with its rounds, and how it came about."""

    address: str
    model: str
    prompt: str
    options: Mapping[str, Any]
    result: Result

    def to_object(self) -> dict[str, Any]:
        """For programs, and for the page: what a JSON file of it holds."""
        result, summary = self.result, summarise(self.result.trace)
        return {
            "format": _FORMAT,
            "address": self.address,
            "model": self.model,
            "prompt": self.prompt,
            "options": dict(self.options),
            "text": result.text,
            "finish_reason": result.finish_reason,
            "tokens_per_second": result.stats.tokens_per_second,
            "total_s": result.stats.total_s,
            "summary": {
                "rounds": summary.rounds,
                "emitted_tokens": summary.emitted_tokens,
                "accepted_tokens": summary.accepted_tokens,
                "verified_nodes": summary.verified_nodes,
                "acceptance_length": summary.acceptance_length,
                "by_depth": [
                    {
                        "depth": each.depth,
                        "rounds": each.rounds,
                        "accepted": each.accepted,
                        "expected": round(each.expected, 3),
                    }
                    for each in summary.by_depth
                ],
                "tokens_per_round": [list(pair) for pair in summary.tokens_per_round.items()],
                "stage_ms": {name: round(ms, 3) for name, ms in summary.stage_ms.items()},
                "drafting": dict(summary.drafting),
                "most_sequences": summary.most_sequences,
            },
            "rounds": list(result.trace),
        }


def render(answer: TracedAnswer) -> str:
    """The page."""
    style, script = _asset("trace.css"), _asset("trace_tree.js") + _asset("trace.js")
    data = json.dumps(answer.to_object(), ensure_ascii=False, separators=(",", ":"))
    return Template(_asset("trace.html")).substitute(
        policy=f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'",
        title=html.escape(f"DDTree trace: {answer.prompt[:60]}"),
        style=style,
        script=script,
        data=data.translate(_ESCAPES),
    )


def _asset(name: str) -> str:
    return (files("ddtree_client") / "page" / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
