"""Lets the norms of Qwen3-Next, Qwen3.5 and Qwen3.6 be one launch each instead of eight.

They are known by their classes' names, as `gated_delta_net` knows the layers; module, weight and its name in
the state dict stay. Each is tried on its device before it is used.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from ddtree.device.kernels.centred_norm import centred_norm

_LOG = logging.getLogger(__name__)
_CENTRED = ("Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm")
_TRIED_ROWS = 3
_ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class CentredNorm:
    """The forward of one norm."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Normalise `[..., d]`."""
        return centred_norm(values, self._module.weight, self._module.eps)


@torch.inference_mode()
def fuse_norms(model: nn.Module) -> int:
    """Replace the forward of every such norm of a loaded model; gives how many.

    Where one is off on this device, or cannot be compiled, all stay as they are.
    """
    found = [module for module in model.modules() if type(module).__name__ in _CENTRED]
    norms = [module for module in found if "forward" not in vars(module)]
    try:
        wrong = sum(not _is_right(module) for module in norms)
    except Exception as error:  # noqa: BLE001 - whatever a compiler says, there is another way
        _LOG.warning("norms stay launch by launch: %s", " ".join(str(error).split())[:400])
        return 0
    if wrong:
        _LOG.warning("norms stay launch by launch: %d of %d are off on this device", wrong, len(norms))
        return 0
    for module in norms:
        module.forward = CentredNorm(module)
    return len(norms)


def _is_right(module: Any) -> bool:
    weight = module.weight
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((_TRIED_ROWS, *weight.shape), generator=generator).to(weight.device, weight.dtype)
    found, expected = CentredNorm(module)(values).float(), module(values).float()
    return bool((found - expected).abs().max() <= _ROUNDING[weight.dtype] * expected.abs().max())
