"""Faster CPU modules in place of a loaded model's own, with the same weights and the same results.

On a CPU a decoding step reads every weight once for a handful of rows, and most of its time goes into
matmuls that reorder their weights on each call and into many small operators. Here linear layers get
weights reordered once (oneDNN), projections of the same input become one matmul, RMS norms one operator. The
model's classes, module names and forward code stay as they are; only leaf modules are replaced.

The oneDNN operators are private names of PyTorch, the ones its own compiler emits when it freezes weights.
The pinned version is known to have them; where they are missing, `can_pack` is false and nothing is replaced.

Nothing here is assumed about a model: projections are merged only where siblings have the usual names, and a
norm is replaced only after it gave the same numbers on random input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn import functional

# Siblings that a decoder layer applies one after another to the same input.
_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of PyTorch can reorder weights for the device and dtype.

    float32 is left alone: it is the dtype people choose for exactness, and gains little.
    """
    has_kernels = hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and torch.backends.mkldnn.is_available()
    return device.type == "cpu" and dtype == torch.bfloat16 and has_kernels and _has_bf16_kernels()


def _has_bf16_kernels() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001


class PackedLinear(nn.Module):
    """A linear layer whose weight was reordered once; `weight` is kept only when somebody else needs it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)  # noqa: SLF001
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply to rows `[..., in_features]`."""
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001
            rows, self._packed, self.bias, "none", [], ""
        )
        return output


def packed_linear(weight: torch.Tensor) -> nn.Module:
    """A linear layer without bias over `weight` `[out, in]`, reordered where that is possible."""
    if can_pack(weight.device, weight.dtype):
        return PackedLinear(weight, None)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


class _SharedProjection:
    """One matmul for several projections of the same input; keeps the output for the siblings that follow."""

    def __init__(self, linear: PackedLinear) -> None:
        self.linear = linear
        self._input: torch.Tensor | None = None
        self._output: torch.Tensor | None = None

    def project(self, rows: torch.Tensor, *, is_last: bool) -> torch.Tensor:
        if self._input is not rows:
            self._input, self._output = rows, self.linear(rows)
        output = self._output
        assert output is not None
        if is_last:  # hold no activation longer than the layer does
            self._input = self._output = None
        return output


class ProjectionShare(nn.Module):
    """One sibling's columns of a merged projection."""

    def __init__(self, shared: _SharedProjection, columns: slice, *, is_last: bool) -> None:
        super().__init__()
        self._shared = shared
        self.columns = columns
        self._is_last = is_last

    @property
    def merged(self) -> PackedLinear:
        """The projection of all siblings at once."""
        return self._shared.linear

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply to rows `[..., in_features]`; right in any order, one matmul in the usual one."""
        return self._shared.project(rows, is_last=self._is_last)[..., self.columns]


class FusedRmsNorm(nn.Module):
    """RMS norm as one operator."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._eps = eps

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply to rows `[..., hidden]`."""
        return functional.rms_norm(rows, self.weight.shape, self.weight, self._eps)


def pack(model: nn.Module) -> None:
    """Replace what can be replaced in place; the caller asked `can_pack` first."""
    for parent in list(model.modules()):
        for names in _SAME_INPUT:
            _merge_siblings(parent, names)
    for parent, name, child in _children(model):
        if type(child) is nn.Linear:
            setattr(parent, name, PackedLinear(child.weight.detach(), child.bias))
        elif type(child).__name__.endswith("RMSNorm"):
            _replace_norm(parent, name, child)


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            yield parent, name, child


def _merge_siblings(parent: nn.Module, names: Sequence[str]) -> None:
    children = [getattr(parent, name, None) for name in names]
    linears = [child for child in children if type(child) is nn.Linear]
    if len(linears) != len(names) or len({linear.bias is None for linear in linears}) != 1:
        return
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [bias.detach() for linear in linears if (bias := getattr(linear, "bias", None)) is not None]
    bias = torch.cat(biases) if biases else None
    shared = _SharedProjection(PackedLinear(weight, bias))
    start = 0
    for name, linear in zip(names, linears, strict=True):
        stop = start + linear.out_features
        setattr(parent, name, ProjectionShare(shared, slice(start, stop), is_last=name == names[-1]))
        start = stop


def _replace_norm(parent: nn.Module, name: str, norm: nn.Module) -> None:
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, torch.Tensor) or not isinstance(eps, float) or weight.dim() != 1:
        return
    fused = FusedRmsNorm(weight.detach(), eps)
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(4, weight.shape[0], generator=generator).to(weight.dtype)
    # Gemma scales by 1 + weight, others differ in more: only a norm that gives the same numbers is replaced.
    if torch.allclose(fused(probe).float(), norm(probe).float(), rtol=2e-2, atol=1e-2):
        setattr(parent, name, fused)
