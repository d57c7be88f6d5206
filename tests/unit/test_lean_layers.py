"""Lean layers give the bits of their classes, for trees, prompts and windows; others stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ddtree.attention import sdpa
from ddtree.attention.plan import Segment, StepPlan
from ddtree.models import lean_layers
from ddtree.models.packed import pack
from ddtree.models.target import TargetModel, TargetStep
from ddtree.tree_mask import ancestor_bits, expand

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama with biases": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)),
    "mistral with a window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6)),
    "qwen2, biased inputs": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3, normed heads": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def packed_target(make: Any, change: Any = None) -> tuple[TargetModel, int]:
    """A target whose layers were made lean where that is possible, and how many were."""
    torch.manual_seed(3)
    model = make()
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.2 + (0.8 if "norm" in name else 0))
    model.eval().set_attn_implementation(sdpa.register())
    layers = model.model.layers
    if change is not None:
        change(layers)
    target = TargetModel(model, taps=(0, 2))
    known = lean_layers.find(layers)
    pack(model)
    return target, lean_layers.install(layers, known)


def read(target: TargetModel) -> list[TargetStep]:
    """A prompt of two sequences, then a tree behind the one and a single row behind the other."""
    pool = target.make_pool(0, budget_bytes=1 << 20, page_size=8)
    pages = [pool.reserve(32), pool.reserve(32)]
    assert pages[0] is not None
    assert pages[1] is not None
    lengths, parents = (9, 4), torch.tensor([[0, 0, 1, 3, 1]])
    sees = expand(ancestor_bits(parents, torch.tensor([5])))[0]
    chunks = [
        Segment(0, 9, pages[0], 0, torch.arange(9), None),
        Segment(9, 4, pages[1], 0, torch.arange(4), None),
    ]
    trees = [
        Segment(0, 6, pages[0], lengths[0], torch.tensor([0, 1, 1, 2, 3, 2]), sees),
        Segment(6, 1, pages[1], lengths[1], torch.zeros(1, dtype=torch.int64), None),
    ]
    steps = []
    for segments in (chunks, trees):
        rows = segments[-1].stop
        ids = torch.arange(rows) * 7 % 60
        steps.append(target.forward(ids, StepPlan.build(pool, tuple(segments)), torch.arange(rows)))
    return steps


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_as_the_layers_own_forward(name: str) -> None:
    target, made = packed_target(MODELS[name])
    assert made == 3
    lean = read(target)
    layers: Any = target.model.model.layers
    for layer in layers:
        assert isinstance(layer.forward, lean_layers.LeanLayer)
        del layer.forward
    for ours, own in zip(lean, read(target), strict=True):
        assert torch.equal(ours.logits, own.logits)
        assert all(map(torch.equal, ours.taps, own.taps))


def test_without_a_step_plan_the_layer_is_its_class() -> None:
    target, _ = packed_target(MODELS["llama"])
    layer: Any = target.model.model.layers[1]
    hidden, angles = torch.randn(1, 4, 32), (torch.randn(1, 4, 8), torch.randn(1, 4, 8))
    with pytest.raises(TypeError, match="ddtree_plan"):  # our attention, which asks for one
        layer(hidden, position_embeddings=angles)


def test_a_layer_that_somebody_changed_is_left_alone() -> None:
    def hook_an_mlp(layers: nn.ModuleList) -> None:
        layers[1].mlp.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]

    target, made = packed_target(MODELS["llama"], hook_an_mlp)
    layers: Any = target.model.model.layers
    assert made == 2
    assert ["forward" in vars(layer) for layer in layers] == [True, False, True]


def test_a_layer_that_does_something_else_than_it_says_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = LlamaForCausalLM(LlamaConfig(**SIZES)).model.layers[0]
    monkeypatch.setattr(type(own), "forward", partial_scale(type(own).forward))
    target, made = packed_target(MODELS["llama"])
    layers: Any = target.model.model.layers
    assert made == 0
    assert not any("forward" in vars(layer) for layer in layers)


def partial_scale(forward: Any) -> Any:
    """A forward of another version, which gives a little more."""

    def scaled(layer: Any, *args: Any, **options: Any) -> Any:
        return partial(forward, layer)(*args, **options) * 1.001

    return scaled
