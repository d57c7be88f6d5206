"""The pair that the device's way is compared on: the demo's, or in a tiny run one of noise.

Knows folders of checkpoints; neither stages nor what is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.gpu.checkpoints import save_pair
from benchmarks.gpu.demo import demo_folders
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.shapes import tiny_qwen3

_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@contextmanager
def exact_pair(setting: Setting) -> Iterator[tuple[Path, Path]]:
    """Folders of target and drafter; a tiny run that is given none makes them of noise.

    Raises:
        Skipped: there is none.
    """
    if not setting.is_tiny or setting.demo_target is not None:
        yield demo_folders(setting)
        return
    with TemporaryDirectory() as folder:
        tokenizer, pair = Path(folder, "tokenizer"), Path(folder, "pair")
        _save_tokenizer(tokenizer)
        pair.mkdir()
        saved = save_pair(tiny_qwen3(), pair, tokenizer=tokenizer, device=setting.device, dtype=torch.float32)
        yield saved.target, saved.draft


def _save_tokenizer(folder: Path) -> None:
    """A token for every byte, and one that ends text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(("<s>", "</s>", *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")  # noqa: S106 - no secret
    wrapped.chat_template = _TEMPLATE
    wrapped.save_pretrained(folder)
