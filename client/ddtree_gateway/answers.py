"""Answers as the API writes them: whole ones and the chunks of streams. Builds plain data, sends nothing."""

from __future__ import annotations

import codecs
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from ddtree_client import Chunk, Result
from ddtree_client.types import TokenLogProbs

# The API has no word for a deadline: the answer was cut off by a limit all the same.
_REASONS: Final[Mapping[str, str | None]] = {"": None, "deadline": "length"}


class Writer(Protocol):
    """How one endpoint words its answers."""

    def opening(self, sequences: int) -> list[dict[str, Any]]:
        """What a stream begins with, before there is any text."""
        ...

    def pieces(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        """The bodies that show one chunk of the sequence `index`."""
        ...

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """The body of an answer that is not streamed, without its usage."""
        ...

    def closing(self) -> dict[str, Any]:
        """The last body of a stream, which carries the usage."""
        ...


@dataclass
class ChatWriter:
    """Chat completions."""

    model: str
    request_id: str
    log_probs: int | None
    with_usage: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def opening(self, sequences: int) -> list[dict[str, Any]]:
        """See `Writer`."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [self._chunk([self._choice(index, delta, None, None)]) for index in range(sequences)]

    def pieces(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        """See `Writer`."""
        bodies = []
        if chunk.text or chunk.log_probs:
            delta = {"content": chunk.text}
            bodies.append(self._chunk([self._choice(index, delta, self._shown(chunk.log_probs), None)]))
        if chunk.final:
            bodies.append(self._chunk([self._choice(index, {}, None, reason_of(chunk.finish_reason))]))
        return bodies

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """See `Writer`."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": result.text, "refusal": None},
                "logprobs": self._shown(result.log_probs),
                "finish_reason": reason_of(result.finish_reason),
            }
            for index, result in enumerate(results)
        ]
        return self._body("chat.completion", choices)

    def closing(self) -> dict[str, Any]:
        """See `Writer`."""
        return self._body("chat.completion.chunk", [])

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body("chat.completion.chunk", choices)
        return {**body, "usage": None} if self.with_usage else body

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(
        self, index: int, delta: dict[str, Any], shown: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": shown, "finish_reason": reason}

    def _shown(self, entries: Iterable[TokenLogProbs]) -> dict[str, Any] | None:
        if self.log_probs is None:
            return None
        content = []
        for entry in entries:
            tops = zip(entry.top_tokens, entry.top, strict=False)
            top = [token_entry(token, value) for token, (_, value) in tops]
            content.append({**token_entry(entry.token, entry.model), "top_logprobs": top})
        return {"content": content, "refusal": None}


@dataclass
class CompletionWriter:
    """Completions of a text."""

    model: str
    request_id: str
    log_probs: int | None
    with_usage: bool
    created: int = field(default_factory=lambda: int(time.time()))
    _readers: defaultdict[int, _Reader] = field(default_factory=lambda: defaultdict(_Reader))

    def opening(self, sequences: int) -> list[dict[str, Any]]:
        """See `Writer`."""
        del sequences
        return []

    def pieces(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        """See `Writer`."""
        if not (chunk.text or chunk.log_probs or chunk.final):
            return []
        shown = self._shown(index, chunk.log_probs)
        body = self._body([self._choice(index, chunk.text, shown, reason_of(chunk.finish_reason))])
        return [{**body, "usage": None} if self.with_usage else body]

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """See `Writer`."""
        return self._body(
            [
                self._choice(
                    index,
                    result.text,
                    self._shown(index, result.log_probs),
                    reason_of(result.finish_reason),
                )
                for index, result in enumerate(results)
            ]
        )

    def closing(self) -> dict[str, Any]:
        """See `Writer`."""
        return self._body([])

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self.request_id}",
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(
        self, index: int, text: str, shown: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": shown, "finish_reason": reason}

    def _shown(self, index: int, entries: Sequence[TokenLogProbs]) -> dict[str, Any] | None:
        if self.log_probs is None:
            return None
        return {
            "tokens": [token_name(entry.token) for entry in entries],
            "token_logprobs": [finite(entry.model) for entry in entries],
            "top_logprobs": [
                {
                    token_name(token): finite(value)
                    for token, (_, value) in zip(entry.top_tokens, entry.top, strict=False)
                }
                for entry in entries
            ],
            "text_offset": [self._readers[index].offset_of(entry.token) for entry in entries],
        }


class _Reader:
    """Where the next token of a sequence begins, in characters of its text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._read = 0

    def offset_of(self, token: bytes) -> int:
        """Take the next token and give where it begins."""
        begin = self._read
        self._read += len(self._decoder.decode(token))
        return begin


def token_name(token: bytes) -> str:
    """A token as a key: pieces of characters must stay apart, so they are spelled as the API spells them."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def reason_of(finish_reason: str) -> str | None:
    """The API's word for why an answer ended."""
    return _REASONS.get(finish_reason, finish_reason)


def token_entry(token: bytes, value: float) -> dict[str, Any]:
    """One token with its bytes, which need not be whole characters."""
    return {"token": token.decode(errors="replace"), "logprob": finite(value), "bytes": list(token)}


def finite(value: float) -> float:
    """JSON has no infinity; the API writes the least number it knows."""
    return max(value, -9999.0)
