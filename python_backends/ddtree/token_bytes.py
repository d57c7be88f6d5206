"""The bytes of single tokens, which need not be whole characters, for callers who want to see each token.

Knows the two ways in which tokenizers write bytes into their vocabulary, and no models. The text of an answer
is made elsewhere (`ddtree.detokenize`).
"""

from __future__ import annotations

import json
import re
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # how sentencepiece writes a space


class TokenBytes:
    """Called with an id, gives its bytes; special tokens give their names, unknown ids nothing."""

    def __init__(self, tokenizer: Any) -> None:
        """Look at how the tokenizer decodes.

        Args:
            tokenizer: a fast tokenizer of transformers.
        """
        self._tokenizer = tokenizer
        self._added = {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items()}
        decoder = json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder")
        self._letters = _byte_letters() if '"ByteLevel"' in json.dumps(decoder) else None

    def __call__(self, token_id: int) -> bytes:
        """Give the bytes of one token."""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:  # padding of the model's vocabulary
            return b""
        if self._letters is not None and all(letter in self._letters for letter in token):
            return bytes(self._letters[letter] for letter in token)
        single = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(single[1], 16)]) if single else token.replace(_SPACE, " ").encode()


def _byte_letters() -> dict[str, int]:
    """Map the letters of byte-level tokenizers to bytes.

    GPT-2's table: printable bytes stand for themselves, the others follow from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}
