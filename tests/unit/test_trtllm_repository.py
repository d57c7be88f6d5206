"""The baseline's model.yaml: what the recorded llmapi model and DFlash configuration read of it."""

from __future__ import annotations

from pathlib import Path

import yaml

from ddtree.trtllm.contract import load_contracts


def test_the_baseline_asks_for_dflash_chains_in_recorded_words(project_root: Path) -> None:
    path = project_root / "model_repository_trtllm" / "tensorrt_llm" / "1" / "model.yaml"
    values = yaml.safe_load(path.read_text())
    triton = values.pop("triton_config")
    assert triton == {"max_batch_size": 0, "decoupled": True}
    speculative = values["speculative_config"]
    assert speculative.pop("decoding_type") == "DFlash"
    for contract in load_contracts():
        signature = contract.symbols["DFlashDecodingConfig"].signature()
        signature.bind(**speculative)
        default = signature.parameters["decoding_type"].default
        assert default == "DFlash"
    assert {"model", "backend", "max_seq_len", "max_batch_size"} <= values.keys()
    assert [item.name for item in path.parent.iterdir()] == ["model.yaml"], (
        "NVIDIA's code stays in their image"
    )
