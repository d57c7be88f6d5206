"""The target's tokenizer, its chat template and the ids that end its text.

Knows the target's folder, not its weights. The vocabulary's size is not asked here: models pad it.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ddtree.errors import CheckpointError, InvalidArgument
from ddtree.grammar import GrammarCompiler
from ddtree.token_bytes import TokenBytes

_MESSAGES_FORM = 'send [{"role": "user", "content": "…"}]'
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TextCodec:
    """Text to ids and back, as the target's folder says; safe to use from several threads."""

    def __init__(self, tokenizer: Any, stop_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.stop_ids = stop_ids  # by the model's own configuration
        added = tokenizer.added_tokens_decoder
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self._ids = frozenset(vocabulary.values())
        self._byte_ids = frozenset(i for token, i in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))
        self.token_bytes = TokenBytes(tokenizer)
        self.chat_template = str(tokenizer.chat_template or "")
        self._decode = _decoder_of(tokenizer)

    @classmethod
    def from_folder(cls, folder: Path) -> TextCodec:
        """Load the tokenizer of a target's folder.

        Raises:
            CheckpointError: a file is missing or unreadable.
        """
        from transformers import AutoTokenizer

        stop_ids = read_stop_ids(folder)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, clean_up_tokenization_spaces=False)
        except Exception as error:
            cause = " ".join(str(error).split())[:200]
            raise CheckpointError(
                f"{folder}: its tokenizer cannot be loaded; "
                f"expected tokenizer.json and tokenizer_config.json ({cause})"
            ) from error
        return cls(tokenizer, stop_ids)

    def encode(self, text: str) -> list[int]:
        """Give the ids of a prompt used as it is, with the special tokens this tokenizer adds by default."""
        ids: list[int] = self._tokenizer.encode(text, verbose=False)
        return ids

    def encode_fragment(self, text: str) -> list[int]:
        """Give the ids of a piece of text, with no special tokens around it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def render_messages(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Give the ids of a conversation in the target's chat template, up to where the answer begins.

        Args:
            messages: the conversation.
            variables: what else the template may read, such as `enable_thinking`.

        Raises:
            InvalidArgument: the target has no chat template, its template refuses the messages, or a
                variable has a name that steers the rendering itself.
        """
        import jinja2

        if not self._tokenizer.chat_template:
            raise InvalidArgument(
                "messages needs a target with a chat template, and this one has none; "
                "send the whole prompt as text_input"
            )
        taken = set(inspect.signature(self._tokenizer.apply_chat_template).parameters)
        for name in sorted(taken.intersection(variables or ())):
            raise InvalidArgument(
                f"chat_template_kwargs may not hold {name!r}, which is no variable; remove it"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
                **(variables or {}),
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
            # A template is a program: it trips in its own ways over conversations it does not expect.
            raise InvalidArgument(
                f"messages cannot be rendered with the target's chat template ({error}); "
                "check the roles and their order, or send the whole prompt as text_input"
            ) from error
        if not _is_unicode(text):
            raise InvalidArgument(
                "chat_template_kwargs must be Unicode text, and have half of a surrogate pair; send it whole"
            )
        # The template writes the beginning-of-text token itself.
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def grammars(self, vocab_size: int) -> GrammarCompiler:
        """Give a compiler of grammars over this tokenizer, for a model of `vocab_size` ids."""
        return GrammarCompiler(self._tokenizer, vocab_size=vocab_size, stop_ids=self.stop_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Give the text of all ids, special tokens left out."""
        return self._decode(list(token_ids))

    def is_silent(self, token_id: int) -> bool:
        """Tell whether the id never has text: a special token, or padding of the model's vocabulary."""
        return token_id in self._special_ids or token_id not in self._ids

    def is_byte(self, token_id: int) -> bool:
        """Tell whether the id is a byte-fallback token, one byte of a character the vocabulary lacks."""
        return token_id in self._byte_ids


def _decoder_of(tokenizer: Any) -> Callable[[list[int]], str]:
    """How a tokenizer of transformers gives the text of ids.

    What transformers does around the backend takes several times as long as decoding the few tokens of a
    round. It is left out where it changes nothing: tokenizers with a way of their own keep that.
    """
    from transformers import PreTrainedTokenizerFast

    own, plain = type(tokenizer), PreTrainedTokenizerFast
    if all(getattr(own, name, None) is getattr(plain, name) for name in ("decode", "_decode")):
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    return partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def decode_utf8(field: str, value: bytes) -> str:
    """Give the text of a bytes input.

    Raises:
        InvalidArgument: it is no UTF-8.
    """
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        start = error.start
        raise InvalidArgument.of(
            field,
            f"must be UTF-8 (byte {start} is not)",
            value[start : start + 4],
            "send it encoded as UTF-8",
        ) from error


def parse_messages(text: str) -> list[dict[str, Any]]:
    """Read a conversation, `[{"role": …, "content": …}, …]`; content is text or a list of text parts.

    Other keys of a message are left for the chat template to read.

    Raises:
        InvalidArgument: says which message breaks the form, and how.
    """
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"messages must be JSON, and is none ({error}); {_MESSAGES_FORM}") from error
    if not isinstance(messages, list) or not messages:
        raise InvalidArgument.of(
            "messages", "must be a list of one message or more", _kind(messages), _MESSAGES_FORM
        )
    return [_parse_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def parse_template_variables(text: str) -> dict[str, Any]:
    """Read the variables of a chat template, a JSON object.

    Raises:
        InvalidArgument: it is none.
    """
    form = 'send {"enable_thinking": false}'
    try:
        variables = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"chat_template_kwargs must be JSON, and is none ({error}); {form}") from error
    if not isinstance(variables, dict):
        raise InvalidArgument.of("chat_template_kwargs", "must be an object", _kind(variables), form)
    return variables


def _parse_message(field: str, message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidArgument.of(field, "must be an object", _kind(message), _MESSAGES_FORM)
    for key in ("role", "content"):
        if key not in message:
            raise InvalidArgument.of(field, f"must have {key!r}", list(message), _MESSAGES_FORM)
    role, content = message["role"], message["content"]
    if not isinstance(role, str) or not role:
        raise InvalidArgument.of(f"{field}.role", "must be a non-empty string", _kind(role), _MESSAGES_FORM)
    if isinstance(content, list):
        parts = [_parse_part(f"{field}.content[{index}]", part) for index, part in enumerate(content)]
        content = "".join(parts)
    elif not isinstance(content, str):
        raise InvalidArgument.of(
            f"{field}.content", "must be text or a list of parts", _kind(content), _MESSAGES_FORM
        )
    if not _is_unicode(role) or not _is_unicode(content):
        raise InvalidArgument(
            f"{field} must be Unicode text, and has half of a surrogate pair; send it whole"
        )
    return {**message, "role": role, "content": content}


def _parse_part(field: str, part: object) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    got = part.get("type") if isinstance(part, dict) else _kind(part)
    raise InvalidArgument.of(
        field, "must be a part of type 'text'", got, 'send {"type": "text", "text": "…"}'
    )


def _kind(value: object) -> str:
    """Describe a JSON value in a word or two; it may be far too long to repeat."""
    return f"an empty {type(value).__name__}" if value in ("", [], {}) else type(value).__name__


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def read_stop_ids(folder: Path) -> frozenset[int]:
    """Give the ids that end the target's text: config.json and generation_config.json together.

    Not the tokenizer's opinion: converted tokenizers often name another token.

    Raises:
        CheckpointError: config.json is missing, or one of the two is no JSON object.
    """
    config = _read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    found: set[int] = set()
    for source in (config, config.get("text_config") or {}, generation):
        ids = source.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(found)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; expected a Hugging Face model folder") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
