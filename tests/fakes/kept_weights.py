"""What fusing a model's layers must leave alone: names, values and classes."""

from __future__ import annotations

import torch
from torch import nn

from ddtree.device.fused_layers import fuse


def assert_fused_in_place(model: nn.Module, layers: int) -> None:
    """Fuse so many layers, and find the model's weights and modules as they were."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    assert fuse(model) == layers
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert [type(module) for module in model.modules()] == classes
