"""Qwen3.6-27B's sizes: a tree through Gated DeltaNet layers, next to a plain step.

As many of its 64 layers as the device's memory holds, and the result says how many.
"""

from __future__ import annotations

import torch

from benchmarks.gpu.setting import Facts, Setting, found
from benchmarks.gpu.shapes import PairShape, qwen36_27b, tiny_hybrid
from benchmarks.gpu.stages import SHORT, Rows, measure_stages

_LAYERS = 64
_GROUP = 4  # layers of one kind pattern
# Sizes in bfloat16: of the tables, the drafter and the cache together, and of one layer.
_FIXED_BYTES = 16 << 30
_LAYER_BYTES = 800 << 20


def measure_hybrid(setting: Setting) -> Facts:
    """Plain step and a verify of 65 rows, and what a session holds."""
    shape = tiny_hybrid() if setting.is_tiny else _fitting(setting.device)
    rows = Rows(contexts={SHORT: 96 if setting.is_tiny else 1024}, verified=(65,), has_rounds=False)
    facts = measure_stages(shape, rows, setting)
    facts["layers"] = int(shape.target.num_hidden_layers)
    for way in facts["contexts"][SHORT]["ways"].values():
        plain, verified = found(way, "plain", "ms"), found(way, "verify", "65", "ms")
        if plain and verified:
            way["verify65_over_plain"] = verified / plain
    return facts


def _fitting(device: torch.device) -> PairShape:
    if device.type != "cuda":
        return qwen36_27b(_GROUP)
    room = torch.cuda.mem_get_info(device)[0] - _FIXED_BYTES
    return qwen36_27b(max(_GROUP, min(_LAYERS, room // _LAYER_BYTES // _GROUP * _GROUP)))
