"""The faster modules give what the model's own give; what is not the same is left alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM

from ddtree.models.packed import FusedRmsNorm, PackedLinear, ProjectionShare, can_pack, pack, packed_linear
from tests.fakes.tiny_models import make_target

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
IDS = torch.arange(12)[None] * 5 % 60


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def kinds(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    return [name for name, module in model.named_modules() if type(module) is kind]


def randomised(model: Any) -> Any:
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.2 + (0.8 if "norm" in name else 0))
    return model.eval()


@pytest.fixture(params=[False, True], ids=["plain", "biased"])
def llama(request: pytest.FixtureRequest) -> Any:
    return randomised(LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=request.param)))


def test_a_packed_model_equals_the_unpacked_one(llama: Any) -> None:
    before = llama(IDS).logits
    packed = copy.deepcopy(llama)
    pack(packed)
    torch.testing.assert_close(packed(IDS).logits, before, rtol=1e-4, atol=1e-4)
    assert not kinds(packed, nn.Linear)
    assert kinds(packed, PackedLinear) == [
        *(
            f"model.layers.{layer}.{name}"
            for layer in (0, 1)
            for name in ("self_attn.o_proj", "mlp.down_proj")
        ),
        "lm_head",
    ]
    assert len(kinds(packed, ProjectionShare)) == 2 * 5
    assert len(kinds(packed, FusedRmsNorm)) == 2 * 2 + 1


def test_in_bfloat16_to_its_tolerance_where_the_machine_has_the_kernels(tmp_path: Path) -> None:
    folder = make_target(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    before = model(IDS).logits.float()
    can = can_pack(torch.device("cpu"), torch.bfloat16)
    if can:
        pack(model)
    after = model(IDS).logits.float()
    assert (kinds(model, nn.Linear) == []) == can
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits
    assert (after - exact).abs().mean() < 1.25 * (before - exact).abs().mean() + 1e-3


def test_a_merged_projection_gives_each_sibling_its_own_columns(llama: Any) -> None:
    packed = copy.deepcopy(llama)
    pack(packed)
    rows = torch.randn(1, 5, 32)
    own, merged = llama.model.layers[0].self_attn, packed.model.layers[0].self_attn
    for names in (("q_proj", "k_proj", "v_proj"), ("v_proj", "q_proj", "k_proj", "q_proj")):
        for name in names:
            torch.testing.assert_close(
                getattr(merged, name)(rows), getattr(own, name)(rows), rtol=1e-4, atol=1e-5
            )
    # Other rows between the siblings must not meet the first one's output.
    other = torch.randn(1, 5, 32)
    merged.q_proj(rows)
    torch.testing.assert_close(merged.k_proj(other), own.k_proj(other), rtol=1e-4, atol=1e-5)


def test_one_matmul_for_siblings_and_nothing_held_afterwards(llama: Any) -> None:
    pack(llama)
    attention = llama.model.layers[0].self_attn
    shared = attention.q_proj._shared
    assert attention.k_proj._shared is shared is attention.v_proj._shared
    rows = torch.randn(1, 5, 32)
    first, second = attention.q_proj(rows), attention.k_proj(rows)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    attention.v_proj(rows)
    assert (shared._input, shared._output) == (None, None)


def test_a_norm_with_one_plus_weight_is_not_replaced() -> None:
    gemma = randomised(GemmaForCausalLM(GemmaConfig(**SIZES)))
    before = gemma(IDS).logits
    norms = [name for name, module in gemma.named_modules() if type(module).__name__ == "GemmaRMSNorm"]
    pack(gemma)
    assert not kinds(gemma, FusedRmsNorm)
    assert [
        name for name, module in gemma.named_modules() if type(module).__name__ == "GemmaRMSNorm"
    ] == norms
    assert norms
    torch.testing.assert_close(gemma(IDS).logits, before, rtol=1e-4, atol=1e-4)


def test_siblings_that_do_not_match_are_packed_one_by_one(llama: Any) -> None:
    attention = llama.model.layers[0].self_attn
    attention.q_proj = nn.Linear(32, 32, bias=attention.q_proj.bias is None)
    before = llama(IDS).logits
    pack(llama)
    assert type(attention.q_proj) is type(attention.k_proj) is PackedLinear
    torch.testing.assert_close(llama(IDS).logits, before, rtol=1e-4, atol=1e-4)


def test_float32_and_other_devices_are_left_alone() -> None:
    assert not can_pack(torch.device("cpu"), torch.float32)
    assert not can_pack(torch.device("cuda"), torch.bfloat16)
    weight = torch.randn(7, 5)
    linear = packed_linear(weight)
    assert type(linear) is nn.Linear
    assert linear.weight.data_ptr() == weight.data_ptr(), "a table that is borrowed is not copied"
    rows = torch.randn(3, 5)
    torch.testing.assert_close(linear(rows), rows @ weight.T)
