"""What the convolution of a recurrent layer sees: each row's nearest ancestors, then the session's tail.

    tree  0 -> 1, 0 -> 2, 2 -> 3        tail a b c (last: c), kernel 4
    row 0: a b c 0    row 1: b c 0 1    row 2: b c 0 2    row 3: c 0 2 3

A commit makes the last inputs of (tail, path) the next tail. This module knows indices only.
"""

from __future__ import annotations

import torch


def windows_of(
    depths: torch.Tensor,  # [S, N]
    sees: torch.Tensor | None,  # [S, N, N]; None: chains
    starts: torch.Tensor,  # [S]
    kernel: int,
) -> torch.Tensor:
    """Sources of each row's window, oldest first, `[S, N, kernel]`: all tails, then all rows."""
    size, device = kernel - 1, depths.device
    own_tail = torch.arange(len(depths), device=device)[:, None] * size
    own_rows = len(depths) * size + starts[:, None]
    columns = []
    for back in range(size, -1, -1):
        wanted = depths - back
        if sees is None:
            ancestor = wanted.clamp(min=0)
        else:
            # A row sees exactly one row of each depth above it, so the largest match is the only one.
            ancestor = (sees & (depths[:, None] == wanted[..., None])).to(torch.uint8).argmax(2)
        columns.append(torch.where(wanted >= 0, own_rows + ancestor, own_tail + size + wanted))
    return torch.stack(columns, dim=2)


def next_tails(
    tails: torch.Tensor,  # [S, kernel - 1, channels]
    inputs: torch.Tensor,  # [rows, channels]
    paths: torch.Tensor,  # [S, J] int64 rows of each path
    lengths: torch.Tensor,  # [S]
) -> torch.Tensor:
    """The last inputs of (tail, path), `[S, kernel - 1, channels]`."""
    size = tails.shape[1]
    places = lengths[:, None] + torch.arange(size, device=lengths.device)  # in (tail, path)
    rows = paths.gather(1, (places - size).clamp(min=0, max=paths.shape[1] - 1))
    kept = tails.gather(1, places.clamp(max=size - 1)[..., None].expand_as(tails))
    return torch.where((places < size)[..., None], kept, inputs[rows])
