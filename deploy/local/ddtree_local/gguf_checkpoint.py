"""Converts a GGUF file of the Llama family into a transformers checkpoint folder.

Reads tensors and metadata with the `gguf` library, one tensor at a time with a progress bar. Why not
transformers' own reading: it takes the begin token for the end token, cleans up spaces when decoding, and
does not split digits as this tokenizer's rule asks. Knows nothing of where the file comes from.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tqdm import tqdm

from ddtree_local.errors import DemoTargetError

_OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_CONTROL_TOKEN = 3  # llama.cpp's token type


@dataclass(frozen=True)
class _Metadata:
    """Typed access to a GGUF file's key-value part."""

    reader: Any

    def get(self, key: str) -> Any:
        field = self.reader.fields.get(key)
        if field is None:
            raise DemoTargetError(
                f"GGUF file: {key} is missing; expected a Llama model with a gpt2 tokenizer"
            )
        return field.contents()

    def expect(self, key: str, wanted: str) -> None:
        if self.get(key) != wanted:
            raise DemoTargetError(f"GGUF file: {key} is {self.get(key)!r}, expected {wanted!r}")


def convert(gguf_file: Path, folder: Path, *, progress: bool) -> None:
    """Write configuration, generation configuration, tokenizer and bf16 weights into `folder`.

    Raises:
        DemoTargetError: the file is not a Llama model with a gpt2 tokenizer and the `smollm` splitting rule.
    """
    reader = gguf.GGUFReader(gguf_file)
    metadata = _Metadata(reader)
    metadata.expect("general.architecture", "llama")
    metadata.expect("tokenizer.ggml.model", "gpt2")
    metadata.expect("tokenizer.ggml.pre", "smollm")
    config = _config(metadata)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {name: config[name] for name in _SPECIAL_IDS})
    _write_tokenizer(metadata, config, folder)
    bar = tqdm(reader.tensors, desc="Converting the demo target", unit=" tensors", disable=not progress)
    tensors = dict(_weight(tensor, config) for tensor in bar)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def _config(metadata: _Metadata) -> dict[str, Any]:
    heads = metadata.get("llama.attention.head_count")
    hidden = metadata.get("llama.embedding_length")
    theta = metadata.get("llama.rope.freq_base")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": metadata.get("llama.vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": metadata.get("llama.feed_forward_length"),
        "num_hidden_layers": metadata.get("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.get("llama.context_length"),
        # Stored as float32: 9.999999747378752e-06 stands for 1e-05.
        "rms_norm_eps": float(f"{metadata.get('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }


def _weight(tensor: Any, config: dict[str, Any]) -> tuple[str, torch.Tensor]:
    """The tensor's name in transformers and its values, `[rows, columns]` or `[rows]` bf16."""
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    if tensor.name in _OUTSIDE:
        return _OUTSIDE[tensor.name], _bf16(values)
    parts = tensor.name.split(".")  # blk.<layer>.<kind>.weight
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _IN_LAYER:
        raise DemoTargetError(f"GGUF file: tensor {tensor.name} is unknown in a tied Llama model")
    if parts[2] == "attn_q":
        values = _unpermute(values, config["num_attention_heads"])
    if parts[2] == "attn_k":
        values = _unpermute(values, config["num_key_value_heads"])
    return f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.weight", _bf16(values)


def _unpermute(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undo llama.cpp's row order within a head.

    Its RoPE turns neighbouring rows (0, 1), (2, 3) …; transformers' turns rows half a head apart. With a head
    of four rows a b c d (in transformers' order), the file has a c b d.
    """
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _bf16(values: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, order="C")).to(torch.bfloat16)


def _write_tokenizer(metadata: _Metadata, config: dict[str, Any], folder: Path) -> None:
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens")
    types: list[int] = metadata.get("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, merges))
    # The rule named `smollm`: every digit by itself, then GPT-2's splitting.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "unk_token": tokens[metadata.get("tokenizer.ggml.unknown_token_id")],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "chat_template": metadata.get("tokenizer.chat_template"),
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
