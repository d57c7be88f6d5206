"""Single tokens as bytes, for the two ways tokenizers write bytes into their vocabulary."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from ddtree.token_bytes import TokenBytes
from tests.fakes.tiny_models import EOS_ID, VOCAB_SIZE, make_tokenizer


@pytest.mark.parametrize("text", ["plain", "Grüße 世界 😀", "\x00\x7f\xad\xff"])
def test_byte_level_tokens_join_to_the_text(text: str) -> None:
    tokenizer = make_tokenizer()
    token_bytes = TokenBytes(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(token_bytes, ids)) == text.encode()
    assert all(len(token_bytes(each)) == 1 for each in ids)


def test_special_tokens_have_names_and_padding_has_nothing() -> None:
    token_bytes = TokenBytes(make_tokenizer())
    assert token_bytes(EOS_ID) == b"</s>"
    assert token_bytes(VOCAB_SIZE - 1) == b""


def test_sentencepiece_spells_spaces_and_bytes_in_its_own_way() -> None:
    pieces = {"<unk>": 0, "▁the": 1, "ü": 2, "<0xF0>": 3, "▁": 4}
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    token_bytes = TokenBytes(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>"))
    assert [token_bytes(each) for each in range(1, 5)] == [b" the", "ü".encode(), b"\xf0", b" "]
