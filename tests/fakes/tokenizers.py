"""Small real tokenizers of the two families that cut characters over tokens, made on the spot."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role ' + m.role) }}"
    "{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_CORPUS = (
    "The quick brown fox jumps over the lazy dog. ",
    "Grüße aus Köln, 你好世界 😀👩‍🚀! ",
    "stop STOP \n\n",
)
_SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level BPE, like GPT-2's and SmolLM2's: rare characters are several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=list(_SPECIAL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(_CORPUS * 5, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return _wrap(tokenizer)


@cache
def metaspace() -> PreTrainedTokenizerFast:
    """Like Llama 2's: `▁` for spaces, the first one stripped, and byte tokens for unknown characters."""
    words = ("▁", "▁The", "▁quick", "fox", "a", "b", "c", ".", "\ufffd", "▁b")
    vocab = {
        token: index for index, token in enumerate((*_SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *words))
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    return _wrap(tokenizer)


def without_chat_template() -> PreTrainedTokenizerFast:
    """The byte-level one as a base model has it."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level().backend_tokenizer, eos_token=_SPECIAL[1]
    )
    assert not tokenizer.chat_template, "a fresh tokenizer has no template"
    return tokenizer


def save_target(
    folder: Path, tokenizer: Any, eos: int | list[int] | None, generation_eos: Any = None
) -> Path:
    """Write a target's folder as far as a tokenizer and its stop ids need it."""
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": eos}))
    if generation_eos is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    return folder


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_SPECIAL[0],
        eos_token=_SPECIAL[1],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
