"""Looks at a target's and a draft's folder and says what they are, whether they fit, and what they will need.

The same rules are checked as at load, but all of them: a first broken one hides no other. Reads
configurations and the headers of weight files, no weights; `doctor` runs the pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ddtree.config import ServingConfig
from ddtree.errors import CheckpointError
from ddtree.models import loading, target_config, weight_files
from ddtree.models.draft_checkpoint import DraftCheckpoint, open_checkpoint
from ddtree.models.draft_config import DraftConfig, LayerAttention
from ddtree.models.pairing import Verdict, pair_checks

_Found = TypeVar("_Found")
_MIB = 1 << 20
Facts = dict[str, str]


@dataclass(frozen=True)
class Line:
    """One check of the report."""

    verdict: Verdict
    what: str
    detail: str  # what was found; for a check that did not hold, the whole message with what to do


@dataclass(frozen=True)
class Report:
    """What was found of a pair; facts of a side that cannot be read are missing."""

    target: Facts
    draft: Facts
    memory: Facts
    lines: tuple[Line, ...]

    @property
    def is_usable(self) -> bool:
        """Whether loading the pair would not be refused for anything seen here."""
        return all(line.verdict is not Verdict.BROKEN for line in self.lines)


def inspect_pair(target: Path, draft: Path, *, dtype: str = "auto") -> Report:
    """Look at both folders.

    Args:
        target: folder of a transformers checkpoint.
        draft: folder of a draft checkpoint.
        dtype: as in the deployment's settings; what memory is worked out for.
    """
    lines: list[Line] = []
    config = _attempt(lines, "target configuration", lambda: loading.read_target_config(target))
    weights = _attempt(lines, "target weights", lambda: _target_headers(target, config))
    _check_tokenizer(lines, target)
    checkpoint = _attempt(lines, "draft configuration and tensors", lambda: open_checkpoint(draft))
    if config is not None and checkpoint is not None:
        for check in pair_checks(checkpoint.config, config):
            message = check.message(draft / "config.json")
            detail = check.found if check.verdict is Verdict.OK else message
            lines.append(Line(check.verdict, check.rule, detail))
        lines.append(_check_mask_token(target, checkpoint.config.mask_token_id))
        _attempt(lines, "draft ids lead to target ids", lambda: _check_map(checkpoint))
    return Report(
        target={} if config is None else _target_facts(config, weights),
        draft={} if checkpoint is None else _draft_facts(checkpoint),
        memory={} if config is None or checkpoint is None else _memory(config, checkpoint, weights, dtype),
        lines=tuple(lines),
    )


def _attempt(lines: list[Line], what: str, look: Callable[[], _Found]) -> _Found | None:
    """Do a step that ends with an error where the folder is not as it should be, and note how it went."""
    try:
        found = look()
    except CheckpointError as error:
        lines.append(Line(Verdict.BROKEN, what, str(error.args[0])))
        return None
    lines.append(Line(Verdict.OK, what, "as it should be"))
    return found


def _target_headers(target: Path, config: Any) -> dict[str, weight_files.Header]:
    files = loading.check_files(target, is_quantised=config is not None and loading.has_quantisation(config))
    headers: dict[str, weight_files.Header] = {}
    for path in files:
        headers |= weight_files.read_headers(path)
    return headers


def _check_tokenizer(lines: list[Line], target: Path) -> None:
    path = target / "tokenizer.json"
    if path.is_file():
        lines.append(Line(Verdict.OK, "target tokenizer", path.name))
    else:
        detail = f"{path}: expected the tokenizer's file, found none; copy it beside the weights"
        lines.append(Line(Verdict.BROKEN, "target tokenizer", detail))


def _check_mask_token(target: Path, mask_token_id: int) -> Line:
    """The mask's row of the embedding is trained with the draft; a word's row would not be."""
    from tokenizers import Tokenizer

    what = f"mask_token_id {mask_token_id} is no word of the target's tokenizer"
    path = target / "tokenizer.json"
    if not path.is_file():
        return Line(Verdict.WARNING, what, f"{path}: not there to be asked")
    tokenizer = Tokenizer.from_file(str(path))
    token = tokenizer.id_to_token(mask_token_id)
    added = tokenizer.get_added_tokens_decoder()
    if token is None:
        return Line(Verdict.OK, what, "a row past the tokenizer's last id")
    if mask_token_id in added and added[mask_token_id].special:
        return Line(Verdict.OK, what, f"the special token {token!r}")
    way_out = "fine if the draft was trained with it; otherwise correct mask_token_id, or drafts are rejected"
    return Line(Verdict.WARNING, what, f"it is {token!r}: {way_out}")


def _check_map(checkpoint: DraftCheckpoint) -> None:
    import torch

    checkpoint.load_head(torch.float32, torch.device("cpu"))


def _target_facts(config: Any, weights: Mapping[str, weight_files.Header] | None) -> Facts:
    text, sizes = config.get_text_config(), target_config.attention_sizes(config)
    window = target_config.sliding_window(config)
    kinds = Counter(getattr(text, "layer_types", None) or ["full_attention"] * sizes.layers)
    sliding = kinds["sliding_attention"] or (sizes.layers if window else 0)
    recurrent = target_config.recurrent_layers(config)
    attention = f"{sizes.layers - sliding} full" + (
        f", {sliding} with a window of {window}" if window else ""
    )
    attention += f"; {len(recurrent)} recurrent (Gated DeltaNet)" if recurrent else ""
    thetas = ", ".join(f"{theta:g}" for theta in target_config.rope_thetas(config))
    return {
        "architecture": ", ".join(config.architectures or ["not said"]),
        "layers": str(text.num_hidden_layers),
        "hidden size": str(text.hidden_size),
        "attention": attention,
        "heads": f"{text.num_attention_heads} query, {sizes.kv_heads} KV of {sizes.head_dim}",
        "vocabulary": str(text.vocab_size),
        "rope base": thetas or "not said",
        "context": str(target_config.context_length(config)),
        **_weight_facts(weights),
    }


def _draft_facts(checkpoint: DraftCheckpoint) -> Facts:
    config = checkpoint.config
    headers = checkpoint.headers()
    own_head = "lm_head.weight" in headers
    return {
        "format": _format_name(config),
        "layers": str(len(config.layers)),
        "hidden size": str(config.hidden_size),
        "attention": _attention_name(config.layers),
        "heads": f"{config.num_heads} query, {config.num_kv_heads} KV of {config.head_dim}",
        "block": f"{config.block_size}, drafts {config.draft_positions} positions",
        "taps": ", ".join(map(str, config.target_layer_ids)),
        "mask token": str(config.mask_token_id),
        "output head": f"its own, {config.draft_vocab_size} tokens" if own_head else "the target's",
        "rope base": f"{config.rope['rope_theta']:g} ({config.rope['rope_type']})",
        **_weight_facts(headers),
    }


def _format_name(config: DraftConfig) -> str:
    if config.dflash2 is not None:
        return f"DFlash 2, {config.dflash2.selector_top_k} candidates scored given their parent"
    return "DFlash v1, speculators" if config.is_from_speculators else "DFlash v1"


def _attention_name(layers: tuple[LayerAttention, ...]) -> str:
    """Layers of one kind together: `4 causal with a window of 2048, 1 full in both directions`."""
    parts = []
    for kind, count in Counter(layers).items():
        reach = "full" if kind.window is None else f"with a window of {kind.window}"
        parts.append(f"{count} {'causal' if kind.is_causal else 'in both directions'}, {reach}")
    return "; ".join(parts)


def _weight_facts(headers: Mapping[str, weight_files.Header] | None) -> Facts:
    if headers is None:
        return {}
    types = Counter(header.dtype for header in headers.values())
    return {
        "tensors": f"{len(headers)} ({', '.join(f'{count} {name}' for name, count in types.most_common())})",
        "size": _bytes(weight_files.total_bytes(headers)),
    }


def _memory(
    config: Any, checkpoint: DraftCheckpoint, weights: Mapping[str, weight_files.Header] | None, dtype: str
) -> Facts:
    """What serving the pair needs, in the dtype it is served in."""
    served, draft = loading.resolve_dtype(dtype, config), checkpoint.config
    target_slot = replace(
        target_config.attention_sizes(config), feature_size=draft.hidden_size, dtype=served
    ).bytes_per_slot
    draft_slot = 2 * len(draft.layers) * draft.num_kv_heads * draft.head_dim * served.itemsize
    facts = {
        "served in": str(served).removeprefix("torch."),
        "a token in the verifier": f"{_bytes(target_slot)} (keys, values and the draft's feature)",
        "a token in the drafter": _bytes(draft_slot),
        "a thousand tokens": _bytes(1000 * (target_slot + draft_slot)),
    }
    if (state := target_config.state_shape(config, served)) is not None:
        facts["a sequence's recurrent state"] = f"{_bytes(state.bytes_per_state)} (however long it is)"
        facts["a staged node's stash"] = f"{_bytes(state.bytes_per_row)} (of one step)"
        nodes = ServingConfig.max_nodes
        least = state.bytes_per_state + (nodes + 1) * state.bytes_per_row
        facts["state_cache_mib, at least"] = f"{-(-least // _MIB)} (one sequence, {nodes} nodes)"
    if weights is not None:
        parts = [header for part in (weights, checkpoint.headers()) for header in part.values()]
        values = sum(header.num_values for header in parts)
        facts["weights of both"] = _bytes(values * served.itemsize)
    return facts


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
