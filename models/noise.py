"""Noise by counter: a number for each (seed, choice, position, token id), and nothing else decides it.

Philox 4x32-10 (Salmon et al., 2011) in integer tensor operations: the same on every device, in every batch and in every
layout.
"""

from __future__ import annotations

import torch

__all__ = ["gumbel", "philox"]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Four random 32-bit words for each counter of four 32-bit words and key of two; all int64, broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap around, which leaves their 64 bits right
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((high >> 32) & _MASK) ^ c1 ^ k0,
            high & _MASK,
            ((low >> 32) & _MASK) ^ c3 ^ k1,
            low & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def gumbel(seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise for every token id.

    Args:
        seeds: int64 [n], below 2**63.
        choices: int64 [n], below 2**32.
        positions: int64 [n], below 2**32.
        vocab_size: How many token ids.

    Returns:
        float64 [n, vocab_size], between about -3.2 and 22.9.
    """
    groups = torch.arange(-(-vocab_size // 4), device=seeds.device)  # [groups], four ids each
    counter = (groups[None], positions[:, None], choices[:, None], torch.zeros_like(groups)[None])
    words = philox(counter, ((seeds & _MASK)[:, None], (seeds >> 32)[:, None]))
    bits = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]
    uniform = (bits.double() + 0.5) * 2.0**-32  # never 0 or 1
    return uniform.log_().neg_().log_().neg_()
