"""Noise that is a function of its place: the same numbers on every device, in every batch and for every tree.

Sampling is argmax(log-probability + Gumbel noise), which draws exactly from the distribution. The noise of a
token is computed from (seed, sequence index, absolute position, token id) alone, by the counter-based
generator Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
so a draw does not depend on how many draws came before it. This module knows no logits.
"""

from __future__ import annotations

from typing import Final

import torch

_ROUNDS: Final = 10
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
_WORD: Final = 0xFFFFFFFF
_WORDS_PER_BLOCK: Final = 4
_ROW_BY_ROW_FROM: Final = 8192

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Scramble 128-bit counters under 64-bit keys.

    Args:
        counter: four words of 32 bits, least significant first, as int64 tensors that broadcast together.
        key: two words of 32 bits, likewise.

    Returns:
        Four uniform words in [0, 2^32), int64.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 wraps around, which keeps all 64 bits of the product of two 32-bit words.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((product1 >> 32) & _WORD) ^ c1 ^ k0, ((product0 >> 32) & _WORD) ^ c3 ^ k1
        c1, c3 = product1 & _WORD, product0 & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def gumbel(
    seeds: torch.Tensor,  # [R] int64, the bits of an unsigned 64-bit seed
    sequence_indices: torch.Tensor,  # [R] int64, < 2^32
    positions: torch.Tensor,  # [R] int64, absolute position of the token to draw
    vocab_size: int,
) -> torch.Tensor:
    """Standard Gumbel noise for every token id, `[R, V]` float32 on the inputs' device.

    A uniform has 32 bits: tokens less probable than 2^-33 are practically never drawn.
    """
    if seeds.device.type == "cpu" and vocab_size >= _ROW_BY_ROW_FROM:
        # Ten rounds over one row stay in a core's cache; over several rows they run at a third of the speed.
        rows = zip(seeds.split(1), sequence_indices.split(1), positions.split(1), strict=True)
        return torch.cat([_gumbel(*row, vocab_size) for row in rows])
    return _gumbel(seeds, sequence_indices, positions, vocab_size)


def _gumbel(
    seeds: torch.Tensor, sequence_indices: torch.Tensor, positions: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    blocks = torch.arange(-(-vocab_size // _WORDS_PER_BLOCK), device=seeds.device)
    counter = (
        blocks[None, :],
        sequence_indices[:, None],
        (positions & _WORD)[:, None],
        (positions >> 32)[:, None],
    )
    words = philox(counter, ((seeds & _WORD)[:, None], ((seeds >> 32) & _WORD)[:, None]))
    uniform = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size].double()
    # Half a step off both ends, so that neither logarithm is of zero. float64, because float32 cannot tell
    # apart the uniforms near one, where the largest noise comes from.
    uniform.add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_().float()
