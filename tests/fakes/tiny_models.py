"""Small random checkpoints on disk: a Llama target with a byte-level tokenizer, and a DFlash draft for it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 272
EOS_ID = 257
MASK_ID = 258
HIDDEN = 32
LAYERS = 3
TAPS = (0, 1)
BLOCK_SIZE = 8
CONTEXT_LENGTH = 512


def make_target(folder: Path, *, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Path:
    """Save a float32 Llama whose greedy output wanders enough to accept and reject drafts."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.35,
        bos_token_id=256,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = EOS_ID
    model.generation_config.pad_token_id = EOS_ID
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, three special ones, no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )
    fast.add_special_tokens({"additional_special_tokens": ["<mask>"]})
    fast.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
        "{% if enable_thinking is false %}{% endif %}"
        "{% if add_generation_prompt %}{{ note }}assistant:{% endif %}"
    )
    return fast


def make_draft(folder: Path, *, seed: int = 1, hidden: int = HIDDEN, num_target_layers: int = LAYERS) -> Path:
    """Save a random DFlash v1 draft in z-lab's format."""
    generator = torch.Generator().manual_seed(seed)
    layers, heads, kv_heads, head_dim, inner = 2, 4, 2, 8, 48
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {
        "fc.weight": (hidden, len(TAPS) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(layers):
        at = f"layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}self_attn.q_proj.weight": (heads * head_dim, hidden),
            f"{at}self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            f"{at}self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, heads * head_dim),
            f"{at}self_attn.q_norm.weight": (head_dim,),
            f"{at}self_attn.k_norm.weight": (head_dim,),
            f"{at}mlp.gate_proj.weight": (inner, hidden),
            f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
        }
    tensors = {
        name: torch.ones(shape)
        if name.endswith("norm.weight")
        else torch.randn(shape, generator=generator) * 0.2
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_LENGTH,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "vocab_size": VOCAB_SIZE,
        "layer_types": ["full_attention"] * layers,
        "num_target_layers": num_target_layers,
        "block_size": BLOCK_SIZE,
        "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": list(TAPS)},
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder
