"""The target: a transformers causal LM driven one packed step at a time.

No model code of ours: the model's own forward runs with our attention (registered with transformers) and
without its cache. Context features are read by hooks from the decoder layers at the drafter's taps. This
module knows nothing of sessions, trees or acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from ddtree.attention import sdpa
from ddtree.attention.plan import StepPlan
from ddtree.device.plan import DevicePlan
from ddtree.errors import CheckpointError
from ddtree.hybrid_cache import HybridPool
from ddtree.kv_cache import CacheShape, KvPool
from ddtree.models import gated_delta_net, lean_layers, loading, packed, target_config
from ddtree.recurrent.kernel_choice import kernels_for
from ddtree.recurrent.state_pool import PoolSize, StateBudget, StatePool, StateShape


@dataclass(frozen=True)
class TargetStep:
    """What one packed forward gives."""

    logits: torch.Tensor  # [kept rows, V]
    taps: tuple[torch.Tensor, ...]  # per tap layer [rows, H]


class Target(Protocol):
    """What the verifier asks of a target, whoever runs its layers."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, V."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations and cache."""
        ...

    @property
    def device(self) -> torch.device:
        """Where logits and taps are."""
        ...

    def make_pool(self, feature_size: int, *, budget_bytes: int, page_size: int) -> KvPool:
        """The cache's pages, `budget_bytes` in all, a projected feature beside each slot included."""
        ...

    def forward(self, token_ids: torch.Tensor, plan: StepPlan, keep: torch.Tensor) -> TargetStep:
        """Run one packed step, see `TargetModel.forward`."""
        ...


class TargetModel:
    """A loaded target with taps. One forward at a time: the hooks write into this object."""

    def __init__(
        self, model: PreTrainedModel, taps: Sequence[int], state_budget: StateBudget | None = None
    ) -> None:
        """Take a model that was loaded with our attention.

        Args:
            model: the causal LM.
            taps: decoder layers whose outputs the drafter reads, in the drafter's order.
            state_budget: of the states of recurrent layers, where the model has such.
        """
        self.model = model
        self._state_budget = state_budget or StateBudget()
        self.config = model.config.get_text_config()
        self.taps = tuple(taps)
        self.vocab_size = int(self.config.vocab_size)
        self.context_length = target_config.context_length(model.config)
        self._captured: dict[int, torch.Tensor] = {}
        layers = _decoder_layers(model)
        for layer in self.taps:
            if not 0 <= layer < len(layers):
                raise CheckpointError(
                    f"draft: tap layer {layer} is outside the target's 0..{len(layers) - 1}"
                )
            layers[layer].register_forward_hook(self._capture(layer))

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: str,
        device: torch.device,
        taps: Sequence[int],
        state_budget: StateBudget | None = None,
    ) -> TargetModel:
        """Load from a checkpoint folder; on a CPU its modules are replaced by faster ones where possible.

        Raises:
            CheckpointError: the folder is no usable target.
        """
        resolved = loading.resolve_dtype(dtype, loading.read_target_config(folder))
        model = loading.load_target(folder, dtype=resolved, device=device, attention=sdpa.register())
        gated_delta_net.install(model)
        target = cls(model, taps, state_budget)
        if packed.can_pack(device, resolved):
            layers = _decoder_layers(model)
            known = lean_layers.find(layers)
            packed.pack(model)
            lean_layers.install(layers, known)
        return target

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations and cache."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        device: torch.device = self.model.device
        return device

    @property
    def embedding(self) -> torch.Tensor:
        """Token embedding `[V, H]`, shared with a drafter in the same process."""
        weight: torch.Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def head(self) -> nn.Module:
        """The output head as a module: `[..., H]` to `[..., V]`."""
        head: nn.Module = self.model.get_output_embeddings()
        return head

    def cache_shape(self, feature_size: int) -> CacheShape:
        """What the target stores per KV slot, with a projected feature of `feature_size` beside it."""
        sizes = target_config.attention_sizes(self.config)
        return replace(sizes, feature_size=feature_size, dtype=self.dtype)

    def state_shape(self) -> StateShape | None:
        """What the target's recurrent layers keep of a session; None when every layer is attention."""
        return target_config.state_shape(self.config, self.dtype)

    def make_pool(self, feature_size: int, *, budget_bytes: int, page_size: int) -> KvPool:
        """The cache's pages, `budget_bytes` in all, a projected feature beside each slot included.

        States of recurrent layers come beside them, out of their own budget.

        Raises:
            ConfigError: the states' budget does not hold one sequence.
        """
        shape = self.state_shape()
        size = None if shape is None else PoolSize.of(shape, self._state_budget)
        return self._make_pool(feature_size, budget_bytes, page_size, size)

    def make_scratch_pool(self, slots: int) -> KvPool:
        """Pages for one sequence of `slots` tokens that is only read, and a state if it needs one."""
        size = None if self.state_shape() is None else PoolSize(states=1, rows=1)
        return self._make_pool(0, slots * self.cache_shape(0).bytes_per_slot, slots, size)

    def _make_pool(
        self, feature_size: int, budget_bytes: int, page_size: int, size: PoolSize | None
    ) -> KvPool:
        pages, shape, device = self.cache_shape(feature_size), self.state_shape(), self.device
        if shape is None or size is None:
            return KvPool(pages, budget_bytes=budget_bytes, page_size=page_size, device=device)
        states = StatePool(shape, size, device, kernels_for(device))
        return HybridPool(pages, states, budget_bytes=budget_bytes, page_size=page_size, device=device)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,  # [rows] int64
        plan: StepPlan,
        keep: torch.Tensor,  # [kept] int64, rows whose logits are wanted
    ) -> TargetStep:
        """Run one packed step; keys and values are staged in the plan's slots as a side effect."""
        return self._run(token_ids, plan.positions, plan, keep)

    @torch.inference_mode()
    def device_forward(
        self,
        token_ids: torch.Tensor,  # [S, T] int64
        plan: DevicePlan,
    ) -> TargetStep:
        """Run one packed step by values on the device, without a look at the host; gives all rows' logits."""
        return self._run(token_ids.view(-1), plan.rows.positions.view(-1).long(), plan, 0)

    def _run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any, keep: torch.Tensor | int
    ) -> TargetStep:
        output = self.model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=keep,
            ddtree_plan=plan,
        )
        taps = tuple(self._captured[layer][0] for layer in self.taps)
        self._captured.clear()
        return TargetStep(output.logits[0], taps)

    def _capture(self, layer: int) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            self._captured[layer] = output[0] if isinstance(output, tuple) else output

        return hook


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise CheckpointError(f"target: {type(model).__name__} has no list of decoder layers to tap")
    return layers
