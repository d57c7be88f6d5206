"""What a request may ask for at most, in numbers.

Knows neither requests nor models: whoever asks the loaded target fills it in.
"""

from __future__ import annotations

from dataclasses import dataclass

# Over a whole prompt no tokenizer averages more bytes per token, so a longer text cannot fit the context.
_BYTES_PER_TOKEN = 16


@dataclass(frozen=True)
class Limits:
    """The bounds that requests are checked against before anything expensive happens."""

    vocab_size: int  # ids run over [0, vocab_size)
    context_length: int  # most tokens a sequence may hold, prompt and output
    max_nodes: int  # most draft nodes one sequence may verify in a step
    max_prompt_bytes: int  # refused by count above this, untokenised
    max_stop_strings: int = 16
    max_stop_bytes: int = 256  # of one stop string, in UTF-8

    def __post_init__(self) -> None:
        assert self.vocab_size > 0, f"vocab_size {self.vocab_size}"
        assert self.context_length > 1, f"context_length {self.context_length}"
        assert self.max_nodes >= 0, f"max_nodes {self.max_nodes}"

    @classmethod
    def for_target(cls, vocab_size: int, context_length: int, max_nodes: int) -> Limits:
        """Derive the byte bound from the context length."""
        return cls(vocab_size, context_length, max_nodes, max_prompt_bytes=_BYTES_PER_TOKEN * context_length)
