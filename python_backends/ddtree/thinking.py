"""Says so when a request lets the target think and its drafter was trained on answers without thinking.

Such a drafter is right less often: the answer is the same, and slower (public cards of drafters for Qwen3 say
that they were trained with thinking off). Knows cards, configurations and templates by their words.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ddtree.raw_request import RawRequest

_LOG = logging.getLogger(__name__)
_VARIABLE: Final = "enable_thinking"
_CARD: Final = re.compile(
    r"enable_thinking\W{1,4}false|non-?thinking|without thinking"
    r"|thinking (?:mode )?(?:is |was )?(?:off|disabled)",
    re.IGNORECASE,
)
_MOST_BYTES: Final = 1 << 20  # of a card
_ADVICE: Final = (
    "this drafter was trained without thinking and the request lets the target think: the answer is right, "
    'but drafts are accepted less often; send chat_template_kwargs {"enable_thinking": false} to do without'
)


class ThinkingAdvice:
    """Advice about requests to one target and its drafter."""

    def __init__(self, draft: Path, template: str) -> None:
        """Read what the drafter's folder says of itself.

        Args:
            draft: the drafter's folder, whose README.md and config.json are read if they are there.
            template: the target's chat template; empty when it has none.
        """
        self._is_needed = _VARIABLE in template and trained_without_thinking(draft)
        if self._is_needed:
            _LOG.warning(
                "the drafter says that it was trained without thinking, and the target's template can think"
            )

    def about(self, rows: Sequence[RawRequest]) -> str:
        """What the caller should know; empty for nothing."""
        return _ADVICE if self._is_needed and any(_thinks(row) for row in rows) else ""


def trained_without_thinking(draft: Path) -> bool:
    """Whether the drafter's card, or `enable_thinking` in its configuration, says so."""
    try:
        config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    for part in (config, config.get("dflash_config")) if isinstance(config, dict) else ():
        if isinstance(part, dict) and isinstance(part.get(_VARIABLE), bool):
            return not part[_VARIABLE]
    try:
        with (draft / "README.md").open("rb") as card:
            return _CARD.search(card.read(_MOST_BYTES).decode("utf-8", errors="replace")) is not None
    except OSError:
        return False


def _thinks(row: RawRequest) -> bool:
    """Templates with the variable think unless it is false."""
    if row.messages is None:
        return False
    try:
        variables = json.loads(row.chat_template_kwargs or b"{}")
    except (ValueError, RecursionError):
        return False
    return isinstance(variables, dict) and variables.get(_VARIABLE) is not False
