"""Lets a draft guess text that its target has already written: how many tokens in a row does it know?

The same answer as decoding with it, without decoding: the target reads the text once, and every reading of
the draft's configuration is tried on that. Knows the known ways of reading a configuration wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ddtree import assembly
from ddtree.attention.plan import Segment, StepPlan
from ddtree.config import ServingConfig
from ddtree.draft import Drafter
from ddtree.models import target_config
from ddtree.models.dflash import FeatureProjection
from ddtree.models.draft_checkpoint import DraftCheckpoint
from ddtree.models.draft_config import DraftConfig, LayerAttention
from ddtree.models.target import TargetModel
from ddtree.tree import build_trees
from ddtree.types import DraftRequest, SessionBatch, TreeRequest

_ANCHORS = 12  # places of one text that the draft guesses from
_CACHE_MIB = 64


@dataclass(frozen=True)
class Decoded:
    """One text."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # what the target wrote
    rounds: int


@dataclass(frozen=True)
class Misreading:
    """Another configuration for the same weights."""

    change: str
    advice: str
    draft: DraftConfig


def possible_misreadings(draft: DraftConfig, target: Any, folder: Path) -> list[Misreading]:
    """List the known ways in which this draft's configuration could be wrong.

    Args:
        draft: its configuration.
        target: the target's transformers configuration.
        folder: the target's, for its tokenizer.
    """
    found = []

    def add(change: str, advice: str, **values: Any) -> None:
        changed = replace(draft, **values)
        if changed != draft:
            found.append(Misreading(change, advice, changed))

    layers = int(target.get_text_config().num_hidden_layers)
    for step, where in ((1, "later"), (-1, "earlier")):
        taps = tuple(tap + step for tap in draft.target_layer_ids)
        if all(0 <= tap < layers for tap in taps):
            advice = f"target_layer_ids must be {list(taps)}: they were counted from another layer"
            add(f"taps one layer {where}", advice, target_layer_ids=taps)
    for token in _mask_tokens(folder, int(target.get_text_config().vocab_size)):
        add(f"mask token {token}", f"mask_token_id must be {token}", mask_token_id=token)
    for theta in target_config.rope_thetas(target):
        advice = f"rope_theta must be {theta:g}, the target's"
        add(f"rope_theta {theta:g}", advice, rope={**draft.rope, "rope_theta": theta})
    for is_causal in (True, False):
        attention = tuple(LayerAttention(is_causal, layer.window) for layer in draft.layers)
        said = str(is_causal).lower()
        add(f"is_causal {said}", f"is_causal must be {said} for all layers", layers=attention)
    unlimited = tuple(LayerAttention(layer.is_causal, None) for layer in draft.layers)
    add("no sliding window", "layer_types must be full_attention for all layers", layers=unlimited)
    for scale in (1.0, draft.hidden_size**0.5):
        advice = f"input_embedding_scale must be {scale:.6g}"
        add(f"embeddings times {scale:.4g}", advice, input_embedding_scale=scale)
    return found


def _mask_tokens(folder: Path, vocab_size: int) -> list[int]:
    """Ids that are masks by their name, and the first row past the tokenizer, where some put theirs."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    added = tokenizer.get_added_tokens_decoder()
    named = [token_id for token_id, token in added.items() if "mask" in token.content.lower()]
    past = max(tokenizer.get_vocab().values()) + 1
    return [*named, *([past] if past < vocab_size else [])]


class Rehearsal:
    """Texts with the target's hidden states at every layer that some reading taps."""

    def __init__(
        self,
        config: ServingConfig,
        target: TargetModel,
        texts: Sequence[Decoded],
        readings: Sequence[DraftConfig],
    ) -> None:
        """Let the target read the texts.

        Args:
            config: settings.
            target: loaded; it is tapped at more layers here.
            texts: what it wrote.
            readings: configurations that will be tried.
        """
        self._config = replace(config, draft_kv_cache_mib=_CACHE_MIB)
        self._target = target
        self._texts = texts
        taps = sorted({tap for reading in readings for tap in reading.target_layer_ids})
        tapped = TargetModel(target.model, taps)
        self._hidden = [dict(zip(taps, self._read(tapped, text), strict=True)) for text in texts]

    @staticmethod
    def _read(target: TargetModel, text: Decoded) -> tuple[torch.Tensor, ...]:
        ids = torch.tensor([*text.prompt_ids, *text.token_ids], device=target.device)
        pool = target.make_scratch_pool(len(ids))
        pages = pool.reserve(len(ids))
        assert pages is not None, "the pool was made for this text"
        depths = torch.arange(len(ids), device=target.device)
        plan = StepPlan.build(pool, (Segment(0, len(ids), pages, 0, depths, None),), keeps=True)
        return target.forward(ids, plan, depths[-1:]).taps

    def acceptance_length(self, draft: DraftCheckpoint) -> float:
        """Mean of accepted tokens and the bonus token over places spread along the texts."""
        drafter = assembly.build_drafter(self._config, draft, self._target.embedding, self._target.head)
        projection = FeatureProjection.load(draft, self._target.dtype, self._target.device)
        lengths: list[int] = []
        for index, (text, hidden) in enumerate(zip(self._texts, self._hidden, strict=True)):
            taps = torch.cat([hidden[tap] for tap in draft.config.target_layer_ids], dim=-1)
            lengths += _guess(drafter, index, text, projection(taps), draft.config.draft_positions)
        return sum(lengths) / len(lengths) if lengths else 0.0


def _guess(
    drafter: Drafter,
    session: int,
    text: Decoded,
    features: torch.Tensor,  # [prompt + written, H]
    depth: int,
) -> list[int]:
    """Draft from places along the text; gives each place's tokens known in a row, plus one."""
    ids = [*text.prompt_ids, *text.token_ids]
    last = len(ids) - depth  # a place needs as many true tokens behind it as can be drafted
    first = len(text.prompt_ids)
    places = range(first, last, max(1, (last - first) // _ANCHORS))
    known, lengths = 0, []
    for place in places:
        request = DraftRequest(
            sessions=SessionBatch(_ints([session]).long(), _ints([0]), _ints([known])),
            context_ids=_ints(ids[known:place]),
            context_features=features[known:place],
            counts=_ints([place - known]),
            root_tokens=_ints([ids[place]]),
            reserve=_ints([len(ids)]),
            depth=depth,
            width=1,
        )
        result = drafter.draft(request)
        chain = build_trees(
            TreeRequest(
                result.top_ids, result.top_log_probs, _ints([depth]), torch.tensor([True]), torch.zeros(0),
                result.edge_log_probs,
            )
        )  # fmt: skip
        known = place
        lengths.append(1 + known_in_a_row(chain.tokens[0].tolist(), ids[place + 1 :]))
    return lengths


def known_in_a_row(guessed: Sequence[int], true: Sequence[int]) -> int:
    """How many of the guesses are right before the first wrong one."""
    for count, (guess, token) in enumerate(zip(guessed, true, strict=False)):
        if guess != token:
            return count
    return min(len(guessed), len(true))


def _ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
