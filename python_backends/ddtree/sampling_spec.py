"""How the target's tokens are chosen for one sequence: the settings a verifier session is opened with.

Plain data that has been checked already (`ddtree.params`), and its form on the wire. Knows no logits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal

GrammarKind = Literal["json", "regex", "grammar", "choice"]
NO_LOG_PROBS: Final = -1


@dataclass(frozen=True)
class Grammar:
    """What the output must match from its first token to its end."""

    kind: GrammarKind
    source: str  # a JSON schema, a regular expression, a grammar, or a JSON list of choices


@dataclass(frozen=True)
class SamplingSpec:
    """Settings of one sequence; the defaults choose the target's most probable token."""

    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    min_p: float = 0.0  # 0 = off
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0  # over the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    min_tokens: int = 0  # stop ids cannot be chosen before
    stop_ids: tuple[int, ...] = ()
    seed: int = 0  # unsigned, 64 bits
    sequence_index: int = 0  # among the sequences of one request
    top_log_probs: int = NO_LOG_PROBS  # alternatives to report per token; NO_LOG_PROBS: no log-probs at all
    grammar: Grammar | None = None
    prompt_length: int = 0
    max_nodes: int = 0  # draft nodes kept of a tree once the grammar has pruned it

    @property
    def is_plain(self) -> bool:
        """Whether the largest logit alone decides and nothing is reported about it."""
        return not (
            self.temperature or self.has_penalty or self.logit_bias or self.bad_words or self.min_tokens
        ) and (self.grammar is None and self.top_log_probs == NO_LOG_PROBS)

    @property
    def has_penalty(self) -> bool:
        """Whether tokens that occurred before count."""
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)

    def to_json(self) -> str:
        """Give the form that crosses a hop: what differs from the defaults, or nothing when it is plain."""
        if self.is_plain:
            return ""
        default = asdict(SamplingSpec())
        return json.dumps({name: value for name, value in asdict(self).items() if value != default[name]})

    @classmethod
    def from_json(cls, text: str) -> SamplingSpec:
        """Read what `to_json` wrote."""
        values: Mapping[str, Any] = json.loads(text) if text else {}
        known = {field.name for field in fields(cls)}
        assert values.keys() <= known, f"unknown sampling settings {sorted(values.keys() - known)}"
        spec: dict[str, Any] = dict(values)
        if spec.get("grammar") is not None:
            spec["grammar"] = Grammar(**spec["grammar"])
        for name in ("logit_bias", "bad_words"):
            spec[name] = tuple(tuple(entry) for entry in spec.get(name, ()))
        spec["stop_ids"] = tuple(spec.get("stop_ids", ()))
        return cls(**spec)
