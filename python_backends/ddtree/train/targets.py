"""The frozen target in training: loading, context features at the taps, and the tables it lends the drafter.

Only the layers up to the last tap run. This module knows the target's folder; it does not know the drafter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ddtree.errors import CheckpointError, InvalidArgument
from ddtree.models.loading import load_target, read_target_config
from ddtree.models.target_config import recurrent_layers
from ddtree.train import decode_attention


def load_frozen(folder: Path, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load a target with the attention that generation and tapping use.

    Raises:
        CheckpointError: the folder is no usable target, or one with recurrent layers: the decoding here keeps
            keys and values only.
    """
    if layers := recurrent_layers(read_target_config(folder)):
        raise CheckpointError(
            f"target: expected attention in every layer to train a drafter for it, {len(layers)} layers of "
            f"{folder} are recurrent; drafts for such targets are served, not trained here"
        )
    return load_target(folder, dtype=dtype, device=device, attention=decode_attention.register())


class TapReader:
    """Gives the hidden states at the drafter's taps for whole sequences."""

    def __init__(self, model: PreTrainedModel, taps: Sequence[int], *, compiled: bool = False) -> None:
        self._taps = tuple(taps)
        self._captured: dict[int, torch.Tensor] = {}
        self._decoder = model.get_decoder()
        layers = getattr(self._decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise CheckpointError(f"target: {type(model).__name__} has no list of decoder layers to tap")
        if not self._taps or not all(0 <= tap < len(layers) for tap in self._taps):
            raise InvalidArgument.of(
                "taps", f"must be layers 0..{len(layers) - 1}", list(self._taps), "choose other layers"
            )
        # Nothing after the last tap is wanted, and the head is most of a small target.
        self._wanted, self._whole = layers[: max(self._taps) + 1], layers
        # All layers share one compiled function; hooks stay outside of it.
        self._compiled = [torch.compile(layer.forward) for layer in self._wanted] if compiled else []

    @torch.no_grad()
    def read(
        self,
        ids: torch.Tensor,  # [S, n], padding after the sequences' ends
        *,
        plainly: bool = False,  # without what is compiled, for shapes that come once
    ) -> torch.Tensor:
        """Run the target's layers; gives `[S, n, taps * H]`."""
        positions = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
        self._decoder.layers = self._wanted
        hooks = [self._whole[tap].register_forward_hook(self._capture(tap)) for tap in self._taps]
        fast = [] if plainly else self._compiled
        try:
            # Compiled for this call alone: the target also answers prompts, a token a step inside a captured
            # graph, where compiled layers would be compiled again for every layer's cache.
            with _running(self._wanted[: len(fast)], fast):
                self._decoder(input_ids=ids, position_ids=positions, use_cache=False)
            return torch.cat([self._captured[tap] for tap in self._taps], -1)
        finally:
            for hook in hooks:
                hook.remove()
            self._decoder.layers = self._whole
            self._captured.clear()

    def _capture(self, tap: int) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            self._captured[tap] = output[0] if isinstance(output, tuple) else output

        return hook


@contextmanager
def _running(layers: nn.ModuleList, forwards: Sequence[Any]) -> Iterator[None]:
    """Run layers by other functions for a while; then each has again what it had, its own or its class's."""
    before = [vars(layer).get("forward") for layer in layers]
    for layer, forward in zip(layers, forwards, strict=True):
        layer.forward = forward
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            del layer.forward
            if own is not None:
                layer.forward = own
