"""Makes loaded models fast on a GPU: fused decoder layers, and for every product what is fastest there.

Model classes and the names in their state dicts stay as they are. This module knows no stages.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from ddtree.device.centred_norms import fuse_norms
from ddtree.device.fused_layers import fuse
from ddtree.device.matmul_choice import MatmulChooser
from ddtree.models.target import TargetModel


def chooser_for(device: torch.device) -> MatmulChooser:
    """Chooses products for a device, and remembers across starts in the user's cache folder."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddtree"
    except RuntimeError:  # a user without a home
        return MatmulChooser(device, None)
    return MatmulChooser(device, cache)


def accelerate_target(target: TargetModel, chooser: MatmulChooser) -> int:
    """Fuse the layers that can be, and let the head choose its product; gives how many were fused."""
    fused = fuse(target.model, chooser.linear)
    fuse_norms(target.model)  # of layers that are not fused
    head = target.model.get_output_embeddings()
    if type(head) is nn.Linear:
        target.model.set_output_embeddings(chooser.linear(head.weight, head.bias))
    return fused


def accelerate_linears(module: nn.Module, chooser: MatmulChooser) -> None:
    """Let every linear layer of a module choose its product."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, chooser.linear(child.weight, child.bias))
