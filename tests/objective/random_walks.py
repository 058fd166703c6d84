"""Log-ratio sums whose growth with length is known."""

import torch
from torch import Tensor


def walks(size: int, sigma: float, exponent: float = 0.5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """S ~ Normal(0, (σ·L^a)²) for L from 8 to 4,096, evenly in log L."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (8 * 512 ** torch.rand(size, generator=generator)).long()
    noise = torch.randn(size, dtype=torch.float64, generator=generator)
    return sigma * lengths.double() ** exponent * noise, lengths
