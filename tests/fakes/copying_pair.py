"""A target that repeats its last token for ever, and a draft for it whose every weight is known.

The target's layers do nothing but one thing: layer 1 writes the token's class into features that the
embedding leaves empty, and layer 2 takes it out again. So the class can be tapped behind layer 1 and nowhere
else. The draft reads it from the context and drafts that token at every position; of wrong taps it learns
nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.fakes.random_draft import config_values, random_tensors, write_folder
from tests.fakes.tiny_models import CONTEXT_LENGTH, EOS_ID, MASK_ID, VOCAB_SIZE, make_tokenizer

CLASSES = 16  # a token's class is its id modulo this; features 0..15 are the class, 16..31 the tapped copy
HIDDEN, LAYERS, TAP = 2 * CLASSES, 4, 1
_SILU_OF_4 = 4 / (1 + 2.718281828**-4)


def make_copying_target(folder: Path) -> Path:
    """Save it; greedy decoding repeats the smallest id of the last token's class."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=HIDDEN, intermediate_size=CLASSES, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, max_position_embeddings=CONTEXT_LENGTH,
        rope_theta=5000.0, bos_token_id=256, eos_token_id=EOS_ID, pad_token_id=EOS_ID,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids = torch.arange(VOCAB_SIZE)
    one_hot = torch.nn.functional.one_hot(ids % CLASSES, HIDDEN).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 else parameter.zero_()
        model.model.embed_tokens.weight.copy_(one_hot)
        # Ids below 16 win their class; the others would tie with each other.
        model.lm_head.weight.copy_(one_hot * torch.where(ids < CLASSES, 1.0, 0.5).unsqueeze(1))
        for layer, sign in ((TAP, 1.0), (TAP + 1, -1.0)):
            mlp = model.model.layers[layer].mlp
            # A row of norm √32 with all of it in its class (behind the tap: half of it in the copy as well).
            size = (HIDDEN**0.5) if layer == TAP else (HIDDEN / 2) ** 0.5
            mlp.gate_proj.weight[:, :CLASSES] = torch.eye(CLASSES) * 4 / size
            mlp.up_proj.weight[:, :CLASSES] = torch.eye(CLASSES) / size
            mlp.down_proj.weight[CLASSES:] = torch.eye(CLASSES) * sign / _SILU_OF_4
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = EOS_ID
    model.save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None  # a template's words would have to be outnumbered first
    tokenizer.save_pretrained(folder)
    return folder


def make_copying_draft(folder: Path, *, is_damaged: bool = False, **drafting: Any) -> Path:
    """Save the draft; `drafting` replaces values of its `dflash_config`."""
    values = config_values(
        num_hidden_layers=1, layer_types=["full_attention"], num_target_layers=LAYERS, vocab_size=VOCAB_SIZE,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, hidden_size=HIDDEN,
        dflash_config={"mask_token_id": MASK_ID, "target_layer_ids": [TAP], **drafting},
    )  # fmt: skip
    tensors = {
        name: torch.ones_like(tensor) if tensor.dim() == 1 else torch.zeros_like(tensor)
        for name, tensor in random_tensors(values).items()
    }
    if not is_damaged:
        tensors["fc.weight"][CLASSES:, CLASSES:] = torch.eye(CLASSES)
    # Queries and keys are zero: every row looks at everything alike. Values are the tapped copy of the class,
    # which no embedding has, so what is seen comes from the context alone; the output puts it where the head
    # looks, large enough to hide the mask's own class.
    tensors["layers.0.self_attn.v_proj.weight"][:CLASSES, CLASSES:] = torch.eye(CLASSES)
    tensors["layers.0.self_attn.o_proj.weight"][:CLASSES, :CLASSES] = torch.eye(CLASSES) * 100
    return write_folder(folder, values, tensors)
