"""Gated DeltaNet over a draft tree: every node's output from the state before the tree, read once.

A Gated DeltaNet layer (arXiv 2412.06464) keeps a matrix S per head and does, token after token,

    S <- exp(g) S;   S <- S + k (beta (v - k S));   o = q S

For a chunk of a chain this has a closed form, one triangular system per head (the UT transform of
arXiv 2406.06484). It holds for a tree as well once "comes before" is read as "is an ancestor of" and a decay
is that of the path: parents precede their children, so the system stays lower triangular. With G the sum of
g along a node's path, over pairs where i sees j (itself or an ancestor)

    (I + A) U = beta (V - exp(G) K S)         A_ij = beta_i exp(G_i - G_j) k_i k_j, i != j
    O_i = exp(G_i) q_i S + sum_j exp(G_i - G_j) (q_i k_j) U_j
    S after the path to l = exp(G_l) S + sum_j exp(G_l - G_j) k_j U_j,  j on the path

so no node has a state of its own, and committing a path needs `k`, `U` and `G` of its nodes only. A
descendant's G is never larger than its ancestor's: every exponential is at most 1 where i sees j, and is
masked before it is taken elsewhere, since unrelated branches may differ by any amount.

All is float32 whatever the model's dtype: the state is carried over thousands of tokens. This module knows
tensors; not layers, sessions or where a state is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Rows of a chain that are worked out at once: the work within a block grows with its square.
CHAIN_BLOCK = 64
_NORM_EPS = 1e-6  # of the models' own l2 norm


@dataclass(frozen=True)
class Rows:
    """A layer's rows of `S` sequences, padded to `N`. Padding is zeros everywhere, which makes it inert."""

    queries: torch.Tensor  # [S, Hk, N, dk] float32, normalised and scaled
    keys: torch.Tensor  # [S, Hk, N, dk] float32, normalised
    values: torch.Tensor  # [S, Hv, N, dv] float32; Hv is a multiple of Hk
    log_decays: torch.Tensor  # [S, Hv, N] float32, never positive
    betas: torch.Tensor  # [S, Hv, N] float32, 0..1

    def part(self, start: int, stop: int) -> Rows:
        """Rows `[start, stop)` of every sequence."""
        return Rows(
            self.queries[:, :, start:stop],
            self.keys[:, :, start:stop],
            self.values[:, :, start:stop],
            self.log_decays[:, :, start:stop],
            self.betas[:, :, start:stop],
        )


@dataclass(frozen=True)
class Staged:
    """What a tree gives, and what a commit needs of it beside the keys."""

    outputs: torch.Tensor  # [S, Hv, N, dv]
    updates: torch.Tensor  # [S, Hv, N, dv], U above
    decays: torch.Tensor  # [S, Hv, N], G above


@dataclass(frozen=True)
class Stop:
    """A row of a chain after which the state is wanted as well."""

    sequence: int
    rows: int  # 1..N


@dataclass(frozen=True)
class ReadChain:
    """What a chain gives."""

    outputs: torch.Tensor  # [S, Hv, N, dv]
    states: torch.Tensor  # [S, Hv, dk, dv] after the last row
    stopped: tuple[torch.Tensor, ...]  # each [Hv, dk, dv], one per stop asked for


def unit(
    heads: torch.Tensor,  # [..., d]
) -> torch.Tensor:
    """Scale to length one, in float32: in half precision the norm itself would be off by a percent."""
    heads = heads.float()
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _NORM_EPS)


def path_decays(
    log_decays: torch.Tensor,  # [S, Hv, N]
    sees: torch.Tensor,  # [S, N, N] bool, itself and its ancestors
) -> torch.Tensor:
    """Sum the log decays along each row's path, `[S, Hv, N]`."""
    return log_decays @ sees.transpose(1, 2).to(log_decays.dtype)


def stage_tree(
    rows: Rows,
    states: torch.Tensor,  # [S, Hv, dk, dv] float32, before the tree
    sees: torch.Tensor,  # [S, N, N] bool, lower triangular: itself and its ancestors
) -> Staged:
    """Work out all nodes of all trees; the states stay as they are."""
    num_sequences, key_heads, count, _ = rows.keys.shape
    value_heads, value_dim = rows.values.shape[1], rows.values.shape[3]
    groups = (num_sequences, key_heads, value_heads // key_heads)
    decays = path_decays(rows.log_decays, sees)
    gaps = decays[..., :, None] - decays[..., None, :]
    pairs = gaps.masked_fill_(~sees[:, None], float("-inf")).exp_().view(*groups, count, count)
    both = torch.cat((rows.keys, rows.queries), dim=2)  # one read of the states for keys and queries
    met = both[:, :, None] @ states.view(*groups, -1, value_dim)
    met = met.view(num_sequences, value_heads, -1, value_dim)
    alike = (both @ rows.keys.transpose(2, 3))[:, :, None]  # [S, Hk, 1, 2N, N]
    betas, faded = rows.betas.unsqueeze(-1), decays.exp().unsqueeze(-1)
    system = (pairs * alike[:, :, :, :count]).flatten(1, 2) * betas
    wanted = betas * (rows.values - faded * met[:, :, :count])
    # What stands on and above the diagonal is not read.
    updates = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    shares = (pairs * alike[:, :, :, count:]).flatten(1, 2)
    return Staged(faded * met[:, :, count:] + shares @ updates, updates, decays)


def commit_path(
    states: torch.Tensor,  # [S, Hv, dk, dv] float32
    keys: torch.Tensor,  # [S, Hk, J, dk], of the path's rows, first row first
    updates: torch.Tensor,  # [S, Hv, J, dv]
    decays: torch.Tensor,  # [S, Hv, J]
    lengths: torch.Tensor,  # [S] int64, rows of each path, 0..J; 0 leaves the state as it is
) -> torch.Tensor:
    """Give the states `[S, Hv, dk, dv]` after each path; what lies beyond a path is not looked at."""
    num_sequences, key_heads, longest, _ = keys.shape
    value_heads = updates.shape[1]
    if longest == 0:
        return states
    places = (lengths - 1).clamp(min=0)[:, None, None].expand(-1, value_heads, 1)
    is_path = torch.arange(longest, device=keys.device) < lengths[:, None]
    last = decays.gather(2, places).masked_fill((lengths == 0)[:, None, None], 0.0)
    fading = (last - decays).masked_fill_(~is_path[:, None], float("-inf")).exp_()
    weighted = (updates * fading.unsqueeze(-1)).masked_fill(~is_path[:, None, :, None], 0.0)
    weighted = weighted.view(num_sequences, key_heads, value_heads // key_heads, longest, -1)
    kept = keys.masked_fill(~is_path[:, None, :, None], 0.0).transpose(2, 3)[:, :, None]
    return (kept @ weighted).view_as(states) + last.exp().unsqueeze(-1) * states


def read_chain(
    rows: Rows,
    states: torch.Tensor,  # [S, Hv, dk, dv] float32
    block: int = CHAIN_BLOCK,
    stops: Sequence[Stop] = (),
) -> ReadChain:
    """Work out chains block after block: a prompt's chunk, whose every row is kept."""
    outputs = []
    stopped: dict[Stop, torch.Tensor] = {}
    for start in range(0, rows.keys.shape[2], block):
        part = rows.part(start, start + block)
        count = part.keys.shape[2]
        ones = torch.ones((count, count), dtype=torch.bool, device=states.device)
        staged = stage_tree(part, states, ones.tril().expand(len(states), -1, -1))
        for stop in stops:
            if start < stop.rows <= start + count:
                own = slice(stop.sequence, stop.sequence + 1)
                rest = torch.tensor([stop.rows - start], device=states.device)
                after = commit_path(
                    states[own], part.keys[own], staged.updates[own], staged.decays[own], rest
                )
                stopped[stop] = after[0]
        lengths = torch.full((len(states),), count, device=states.device)
        # Padding at a chain's end decays nothing and adds nothing, so the last row is right for all.
        states = commit_path(states, part.keys, staged.updates, staged.decays, lengths)
        outputs.append(staged.outputs)
    return ReadChain(torch.cat(outputs, dim=2), states, tuple(stopped[stop] for stop in stops))
