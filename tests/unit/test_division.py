"""Targets that several processes cannot share are refused by their configuration, with the way out."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, Phi3Config, PretrainedConfig

from ddtree.errors import ConfigError
from ddtree.parallel.division import check_division
from tests.fakes.hybrid_families import HYBRIDS
from tests.fakes.target_families import COMMON, FAMILIES


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3 moe", "gemma2", "gemma3"])
def test_two_share_what_has_two_kv_heads(name: str) -> None:
    check_division(FAMILIES[name](), 2)


def quantised() -> LlamaConfig:
    return LlamaConfig(**COMMON, quantization_config={"quant_method": "gptq", "bits": 4})


@pytest.mark.parametrize(
    ("config", "world", "message"),
    [
        (FAMILIES["llama"](), 3, "must divide the target's 2 KV heads, got 3; set it to 1 or 2"),
        (FAMILIES["qwen3"](), 4, "must divide the target's 2 KV heads, got 4; set it to 1 or 2"),
        (LlamaConfig(**{**COMMON, "vocab_size": 271}), 2, "271 vocabulary entries, got 2; set it to 1$"),
        (LlamaConfig(**{**COMMON, "intermediate_size": 49}), 2, "49 MLP columns, got 2; set it to 1$"),
        (quantised(), 2, "not quantised, got 2 where config.json has a quantization_config; set it to 1"),
        (HYBRIDS["qwen3.5"](), 2, "every layer is attention, got 2 where qwen3_5_text has others"),
        (FAMILIES["gpt-oss"](), 2, "its plan for gpt_oss has none; set it to 1"),
        (Phi3Config(**COMMON), 2, "its plan for phi3 does not divide q_proj by heads; set it to 1"),
    ],
)
def test_what_cannot_be_divided_is_refused(config: PretrainedConfig, world: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel .*{message}") as caught:
        check_division(config, world)
    assert "\n" not in str(caught.value)
