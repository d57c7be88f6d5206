"""One row of a request as it came: plain values under the names of the wire, None where nothing was sent.

Knows no transport and no rule but one: two names of the same thing must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ddtree.errors import InvalidArgument


@dataclass(frozen=True)
class RawRequest:
    """One row of a request, unchecked. Names that only other engines give a meaning are not read."""

    text_input: bytes | None = None
    input_ids: Sequence[int] | None = None
    input_lengths: int | None = None  # how many of input_ids count; the rest pads the row
    messages: bytes | None = None  # JSON
    chat_template_kwargs: bytes | None = None  # JSON, variables of the chat template
    max_tokens: int | None = None
    deadline_ms: int | None = None  # from arrival
    timeout_us: int | None = None  # no input: the timeout that the transport knows of, 0 for none
    stream: bool | None = None
    exclude_input_in_output: bool | None = None
    draft_mode: bytes | None = None
    tree_budget: int | None = None
    cache_salt: bytes | None = None
    end_id: int | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    stop_words: Sequence[bytes] | None = None
    bad_words: Sequence[bytes] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None  # ranks beams: without beams it changes nothing
    logit_bias: bytes | None = None
    num_return_sequences: int | None = None
    beam_width: int | None = None
    return_log_probs: bool | None = None
    num_top_log_probs: int | None = None
    guided_json: bytes | None = None  # a JSON schema
    guided_regex: bytes | None = None
    guided_grammar: bytes | None = None
    guided_choice: Sequence[bytes] | None = None
    guided_decoding_guide_type: bytes | None = None  # TensorRT-LLM's names of the same
    guided_decoding_guide: bytes | None = None
    return_context_logits: bool | None = None
    return_generation_logits: bool | None = None
    return_perf_metrics: bool | None = None
    # Other dialects' names for the same things; see _ALIASES.
    request_output_len: int | None = None
    streaming: bool | None = None
    runtime_top_k: int | None = None
    runtime_top_p: float | None = None
    min_length: int | None = None
    random_seed: int | None = None
    return_kv_cache_reuse_stats: bool | None = None

    @property
    def is_guided(self) -> bool:
        """Whether a grammar comes with it, which takes its time to compile."""
        return any(
            (
                self.guided_json,
                self.guided_regex,
                self.guided_grammar,
                self.guided_choice,
                self.guided_decoding_guide_type,
            )
        )


_ALIASES: Final = {
    "request_output_len": "max_tokens",
    "streaming": "stream",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "min_length": "min_tokens",
    "random_seed": "seed",
    "return_kv_cache_reuse_stats": "return_perf_metrics",
}


def merge_aliases(raw: RawRequest) -> RawRequest:
    """Move every value to its first name; afterwards only those names are read.

    Raises:
        InvalidArgument: two names of one thing carry different values.
    """
    changes: dict[str, Any] = {}
    for alias, name in _ALIASES.items():
        other, value = getattr(raw, alias), getattr(raw, name)
        if other is None:
            continue
        if value is not None and value != other:
            raise InvalidArgument.of(
                alias, f"is another name of {name}, which is {value!r}", other, "send one of them"
            )
        changes[name] = other
    return replace(raw, **changes)
