"""What an answer cost, as the API and as measuring tools read it. Plain arithmetic over results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ddtree_client import Chunk, Result


def usage_of(results: Sequence[Result], sequences: int) -> dict[str, Any]:
    """The API's `usage`; a prompt counts once however many of its `sequences` were asked for."""
    prompt = sum(result.stats.input_tokens for result in results[::sequences])
    output = sum(result.stats.output_tokens for result in results)
    drafted = sum(result.stats.draft_tokens for result in results)
    accepted = sum(result.stats.accepted_draft_tokens for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


class Rounds:
    """How many tokens each round gave, counted from the chunks: one chunk is one round."""

    def __init__(self) -> None:
        self._tokens: defaultdict[int, list[int]] = defaultdict(list)

    def add(self, sequence: int, chunk: Chunk) -> None:
        """Take a chunk."""
        if chunk.token_ids:
            self._tokens[sequence].append(len(chunk.token_ids))

    def speculative_decoding(self, results: Sequence[Result]) -> dict[str, Any]:
        """The numbers of the whole answer, under vLLM's names, which aiperf reads.

        `acceptance_histogram[j]` counts rounds that accepted j draft tokens; the first token, which the
        prefill gives, is of no round. Every round emits the accepted tokens and one more.
        """
        accepted = [count - 1 for tokens in self._tokens.values() for count in tokens[1:]]
        deepest = max(accepted, default=0)
        drafted = sum(result.stats.draft_tokens for result in results)
        total = sum(accepted)
        return {
            "acceptance_histogram": [accepted.count(depth) for depth in range(deepest + 1)],
            "num_spec_steps": len(accepted),
            "mean_acceptance_length": 1 + total / len(accepted) if accepted else 0.0,
            "draft_acceptance_rate": total / drafted if drafted else 0.0,
            "num_accepted_draft_tokens": total,
            "num_draft_tokens": drafted,
        }
