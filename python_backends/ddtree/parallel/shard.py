"""One rank's share of a target, loaded by transformers' own tensor-parallel plan.

Attention heads, KV heads, the MLP and the output head are divided; taps and logits come out whole on every
rank. Knows neither the other ranks' processes nor who is rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from ddtree.attention import sdpa
from ddtree.errors import CheckpointError
from ddtree.kv_cache import CacheShape
from ddtree.models import loading
from ddtree.models.probe import check_trees_work
from ddtree.models.target import TargetModel
from ddtree.parallel import ranks


class ShardTarget(TargetModel):
    """A target of which this rank computes a share. Every forward is one of all ranks at the same time."""

    def __init__(self, model: PreTrainedModel, taps: Sequence[int], world: int) -> None:
        """Take a model whose layers are divided among `world` ranks."""
        super().__init__(model, taps)
        self._world = world

    @classmethod
    def load_shard(
        cls, folder: Path, *, dtype: str, device: torch.device, taps: Sequence[int], mesh: DeviceMesh
    ) -> ShardTarget:
        """Load this rank's share from a checkpoint folder.

        Raises:
            CheckpointError: the folder is no usable target.
        """
        resolved = loading.resolve_dtype(dtype, loading.read_target_config(folder))
        plan = DistributedConfig(tp_size=mesh.size(), tp_plan="auto")
        with ranks.environment(ranks.local_rank(device)):
            model = loading.load_target(
                folder,
                dtype=resolved,
                device=device,
                attention=sdpa.register(),
                options={"distributed_config": plan, "device_mesh": mesh},
            )
        _take_out_of_dtensors(model)
        return cls(model, taps, mesh.size())

    @torch.inference_mode()
    def check_works(self) -> None:
        """Try whether trees can be verified and logits come out whole, together with all ranks.

        Raises:
            CheckpointError: they cannot, or do not.
        """
        check_trees_work(self)
        row = torch.zeros((1, self.config.hidden_size), dtype=self.dtype, device=self.device)
        if (width := self.head(row).shape[-1]) != self.vocab_size:
            raise CheckpointError(
                f"target: the tensor-parallel plan of transformers for {type(self.model).__name__} gives "
                f"{width} of {self.vocab_size} logits on each rank; set tensor_parallel to 1"
            )

    def cache_shape(self, feature_size: int) -> CacheShape:
        """What one rank stores per KV slot: its own KV heads, and a feature of `feature_size` beside them."""
        whole = super().cache_shape(feature_size)
        return replace(whole, kv_heads=whole.kv_heads // self._world)


def _take_out_of_dtensors(model: nn.Module) -> None:
    """Let linear layers hold plain tensors: transformers unwraps them in every call otherwise.

    The collectives are calls of the layer around it and stay. Embeddings keep theirs: how their output is
    put together follows from it.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            for name, parameter in list(module.named_parameters(recurse=False)):
                if isinstance(parameter, DTensor):
                    setattr(module, name, nn.Parameter(parameter.to_local(), requires_grad=False))
