"""Gated DeltaNet one token after another, in double precision: every node runs its own path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Token:
    """What a layer makes of one token."""

    query: torch.Tensor  # [Hk, dk]
    key: torch.Tensor  # [Hk, dk]
    value: torch.Tensor  # [Hv, dv]
    log_decay: torch.Tensor  # [Hv]
    beta: torch.Tensor  # [Hv]


@dataclass(frozen=True)
class Walked:
    """The end of a path."""

    output: torch.Tensor  # [Hv, dv] of the last token
    state: torch.Tensor  # [Hv, dk, dv] after it


def walk_path(state: torch.Tensor, path: Sequence[Token]) -> Walked:
    """Run the tokens of a path through a state `[Hv, dk, dv]`."""
    state = state.double().clone()
    output = torch.zeros(state.shape[0], state.shape[2], dtype=torch.float64)
    for token in path:
        for head in range(state.shape[0]):
            key_head = head * token.key.shape[0] // state.shape[0]
            key, query = token.key[key_head].double(), token.query[key_head].double()
            state[head] *= token.log_decay[head].double().exp()
            missing = token.value[head].double() - key @ state[head]
            state[head] += torch.outer(key, token.beta[head].double() * missing)
            output[head] = query @ state[head]
    return Walked(output, state)


def convolve_path(tail: torch.Tensor, path: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The convolution's output `[C]` at the last token of a path `[n, C]` after a tail `[kernel - 1, C]`."""
    history = torch.cat((tail, path)).double()[-weight.shape[1] :]
    return (history * weight.double().T).sum(0)
