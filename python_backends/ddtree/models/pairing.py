"""Whether a draft fits a target: each rule with what was found and what to do.

Only configurations are compared here: no weights are read. Most of what can be wrong with a pair does not
crash anything, it only makes drafts be rejected, so nothing is assumed and nothing is let through silently.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ddtree.errors import CheckpointError
from ddtree.models import target_config
from ddtree.models.draft_config import DraftConfig

_WHOSE = "is this the drafter of that target?"


class Verdict(Enum):
    """What became of a check."""

    OK = "ok"
    WARNING = "warning"  # unusual, not wrong: reported and loaded
    BROKEN = "broken"  # refused at load


@dataclass(frozen=True)
class Check:
    """One rule and whether it holds."""

    rule: str  # completes "expected …"
    found: str
    verdict: Verdict
    way_out: str

    def message(self, path: Path) -> str:
        """The one line of a broken rule."""
        return f"{path}: expected {self.rule}, found {self.found}; {self.way_out}"


def pair_checks(draft: DraftConfig, target: Any) -> tuple[Check, ...]:
    """Compare a draft's configuration with its target's.

    Args:
        draft: the draft's configuration.
        target: the target's transformers configuration.
    """
    text = target.get_text_config()
    layers, vocabulary = int(text.num_hidden_layers), int(text.vocab_size)
    special = _special_tokens(target)
    checks = [
        _check(
            f"the target's hidden_size {text.hidden_size}",
            draft.hidden_size,
            holds=draft.hidden_size == text.hidden_size,
        ),
        _check(
            f"target_layer_ids between 0 and {layers - 1}, the target's last layer",
            list(draft.target_layer_ids),
            holds=all(0 <= tap < layers for tap in draft.target_layer_ids),
        ),
        _check(
            f"a mask_token_id below the target's vocabulary of {vocabulary}",
            draft.mask_token_id,
            holds=draft.mask_token_id < vocabulary,
        ),
        _check(
            f"a mask_token_id other than the target's padding and end tokens {sorted(special)}",
            draft.mask_token_id,
            holds=draft.mask_token_id not in special,
        ),
        _check_vocabulary(draft, vocabulary),
        _check_rope(draft, target),
    ]
    if draft.num_target_layers is not None:
        rule = f"num_target_layers {layers}, the target's layer count"
        holds = draft.num_target_layers == layers
        checks.insert(1, _check(rule, draft.num_target_layers, holds=holds))
    return tuple(checks)


def refuse_failures(checks: tuple[Check, ...], path: Path) -> tuple[Check, ...]:
    """Raise for the first broken rule; give the warnings.

    Args:
        checks: of `pair_checks`.
        path: the draft's configuration file, for the message.

    Raises:
        CheckpointError: a rule is broken.
    """
    for check in checks:
        if check.verdict is Verdict.BROKEN:
            raise CheckpointError(check.message(path))
    return tuple(check for check in checks if check.verdict is Verdict.WARNING)


def _check(rule: str, found: object, *, holds: bool) -> Check:
    return Check(rule, str(found), Verdict.OK if holds else Verdict.BROKEN, _WHOSE)


def _special_tokens(target: Any) -> set[int]:
    """Ids that end or pad a sequence: a draft that masks with one of them would draft from nonsense."""
    found: set[int] = set()
    for config in (target, target.get_text_config()):
        for name in ("eos_token_id", "pad_token_id"):
            value = getattr(config, name, None)
            listed = value if isinstance(value, list) else [value]
            found |= {int(token) for token in listed if token is not None}
    return found


def _check_vocabulary(draft: DraftConfig, vocabulary: int) -> Check:
    """The draft's tables are indexed by the target's ids; a plain v1 draft has none."""
    if draft.dflash2 is None and draft.draft_vocab_size == draft.vocab_size:
        # Such a file only copies the number from its target, and some copies are padded otherwise.
        verdict = Verdict.OK if draft.vocab_size == vocabulary else Verdict.WARNING
    else:
        verdict = Verdict.OK if draft.vocab_size == vocabulary else Verdict.BROKEN
    return Check(f"the target's vocab_size {vocabulary}", str(draft.vocab_size), verdict, _WHOSE)


def _check_rope(draft: DraftConfig, target: Any) -> Check:
    """A draft turns its own keys, so it may differ; but most differences are a lost `rope_theta`."""
    thetas, own = target_config.rope_thetas(target), float(draft.rope["rope_theta"])
    agrees = not thetas or own in thetas
    said = " or ".join(f"{theta:g}" for theta in thetas) or "not given"
    return Check(
        f"the target's rope_theta {said}",
        f"{own:g}",
        Verdict.OK if agrees else Verdict.WARNING,
        "if the draft was not trained with that, acceptance falls with the length of the context: correct "
        "rope_theta in the draft's config.json",
    )
