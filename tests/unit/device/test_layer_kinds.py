"""Decoder layers that are not quite what their class says are left as they are."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from ddtree.device.fused_layers import PlainLinear, fuse
from ddtree.models.target import TargetModel
from tests.fakes.device_step import config_of, fused_of, load, prefill_logits, random_place

LEFT_ALONE = ("qwen3 moe", "gemma2", "gpt-oss")


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def llama(tmp_path: Path) -> TargetModel:
    return load(tmp_path, config_of("llama, tied and biased"))


@pytest.mark.parametrize("family", LEFT_ALONE)
def test_layers_of_other_kinds_are_left_alone(family: str) -> None:
    model = AutoModelForCausalLM.from_config(config_of(family))
    weights = [parameter.data_ptr() for parameter in model.parameters()]
    assert fuse(model) == 0
    assert [parameter.data_ptr() for parameter in model.parameters()] == weights
    assert not any("forward" in vars(module) for module in model.modules())


class OwnLayer(LlamaDecoderLayer):  # type: ignore[misc]
    """A subclass: whatever it changes, nobody here knows."""


def other_class(layer: Any) -> None:
    layer.__class__ = OwnLayer


def other_activation(layer: Any) -> None:
    layer.mlp.act_fn = nn.GELU()


def hooked_part(layer: Any) -> None:
    layer.self_attn.o_proj.register_forward_hook(lambda *_: None)


def wrapped_forward(layer: Any) -> None:
    layer.mlp.forward = layer.mlp.forward


def other_linear(layer: Any) -> None:
    layer.mlp.down_proj = PlainLinear(layer.mlp.down_proj.weight, None)


def exact_norm(layer: Any) -> None:
    layer.input_layernorm.double()


def lone_bias(layer: Any) -> None:
    layer.self_attn.k_proj.bias = None


@pytest.mark.parametrize(
    "change",
    [other_class, other_activation, hooked_part, wrapped_forward, other_linear, exact_norm, lone_bias],
)
def test_a_layer_that_is_not_quite_its_class_is_left_alone(
    llama: TargetModel, change: Callable[[Any], None]
) -> None:
    change(llama.model.model.layers[0])
    place = random_place(random.Random(6), 3, 1)
    expected = prefill_logits(llama, place) if change is not exact_norm else None
    assert fuse(llama.model) == 1
    assert fused_of(llama.model) == ["model.layers.1"]
    if expected is not None:
        assert torch.equal(prefill_logits(llama, place), expected)
