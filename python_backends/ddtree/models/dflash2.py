"""What DFlash 2 adds to the drafter (dflash 0.1.0): convolutions over the block, and scores given the parent.

A convolution lets a row of the block see the rows just before it, around attention and MLP. Its kernel is a
learnt base per channel plus a part that is projected from the row itself, shared by a group of channels.

The selector scores a candidate for position d given the token before it, so a tree's children can be scored
given their parent: `unary[child] + <predecessor[parent] ⊙ W hidden, successor[child]>`. The public package
walks one path with it; here all pairs of neighbouring candidates are scored at once, and no forward is added.

This module knows neither the layers in between nor trees.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ddtree.models.draft_config import Dflash2Sizes


class BlockConvolution(nn.Module):
    """The kernels of the two convolutions around one sub-layer; both follow from the sub-layer's input."""

    def __init__(self, hidden_size: int, sizes: Dflash2Sizes) -> None:
        super().__init__()
        self._kernel_size, self._group_size = sizes.conv_kernel_size, sizes.conv_group_size
        groups = hidden_size // sizes.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, sizes.conv_kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * sizes.conv_kernel_size * groups, bias=False)

    def kernels(
        self,
        rows: torch.Tensor,  # [S, B, H] normed input of the sub-layer
    ) -> torch.Tensor:
        """Give both kernels of every row, `[S, B, 2, kernel, H]`."""
        dynamic = self.kernel_projection(rows).unflatten(-1, (2, self._kernel_size, -1))
        kernels: torch.Tensor = self.base_kernel.to(rows.dtype) + dynamic.repeat_interleave(
            self._group_size, -1
        )
        return kernels


def convolve(
    rows: torch.Tensor,  # [S, B, H]
    kernels: torch.Tensor,  # [S, B, kernel, H]; entry o weighs the row o positions before
) -> torch.Tensor:
    """Weigh every row and those before it; before the block there are zeros. Gives `[S, B, H]`."""
    output = kernels[:, :, 0] * rows
    for offset in range(1, kernels.shape[2]):
        before = F.pad(rows[:, :-offset], (0, 0, offset, 0))
        output = torch.addcmul(output, kernels[:, :, offset], before)
    return output


class CandidateSelector(nn.Module):
    """Scores candidates given the candidate before them."""

    def __init__(self, vocab_size: int, hidden_size: int, sizes: Dflash2Sizes) -> None:
        super().__init__()
        self.top_k = sizes.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, sizes.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, sizes.selector_rank))
        self.hidden_projection = nn.Linear(hidden_size, sizes.selector_rank, bias=False)

    def edge_log_probs(
        self,
        hidden: torch.Tensor,  # [S, D, H] hidden states of the drafted rows
        candidates: torch.Tensor,  # [S, D, K] token ids
        logits: torch.Tensor,  # [S, D, K] the candidates' logits
        roots: torch.Tensor,  # [S] root tokens
    ) -> torch.Tensor:
        """Give log-probabilities `[S, D, K parents, K children]` float32, normalised over the children.

        At the first position the root is the only parent; all its K rows say the same.
        """
        first = roots[:, None, None].expand(-1, 1, candidates.shape[2])
        parents = torch.cat((first, candidates[:, :-1]), 1)
        before = F.embedding(parents, self.predecessor_codebook).float()
        after = F.embedding(candidates, self.successor_codebook).float()
        weighed = before * self.hidden_projection(hidden).float().unsqueeze(2)
        scores: torch.Tensor = logits.float().unsqueeze(2) + weighed @ after.transpose(-1, -2)
        return scores.log_softmax(-1)
