"""Filter banks as networks: banks stacked with a nonlinearity, and the loop that trains a forecaster by gradient."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn


class Bank(nn.Module):
    """Filters (filters, channels, length) at every ``stride``-th position: (B, channels, n) to (B, filters, positions).

    A strided convolution, taken as one product of overlapping windows: several times as fast as a convolution of this shape, and it maps
    over clients.
    """

    def __init__(self, channels: int, filters: int, length: int, stride: int) -> None:
        super().__init__()
        self.length, self.stride = length, stride
        self.weight, self.bias = nn.Parameter(torch.empty(filters, channels, length)), nn.Parameter(torch.empty(filters, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform, as a convolution's."""
        reach = self.weight[0].numel() ** -0.5
        nn.init.uniform_(self.weight, -reach, reach)
        nn.init.uniform_(self.bias, -reach, reach)

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, n) to (B, filters, positions)."""
        seen = x.unfold(-1, self.length, self.stride).transpose(-3, -2).flatten(-2)  # (B, positions, channels x length)
        return (seen @ self.weight.flatten(1).T).transpose(-2, -1) + self.bias


class FilterBankNet(nn.Module):
    """Past (B, lookback) to future (B, horizon): banks of filters, a GELU between them, a linear synthesis.

    Every bank is a strided convolution over the outputs of the one before it; the last one's rank, filters times positions, is the
    network's bottleneck.  The past is divided by its standard deviation and freed of its mean, both are given back (reversible instance
    normalisation).

    Args:
        lookback, horizon: L and H.
        banks: (filters, length, stride) of each.
    """

    def __init__(self, lookback: int, horizon: int, banks: Sequence[tuple[int, int, int]] = ((12, 168, 84),)) -> None:
        super().__init__()
        channels, positions, sizes = 1, lookback, []
        for filters, length, stride in banks:
            if min(filters, length, stride) < 1 or length > positions:
                raise ValueError(
                    f"bank {(filters, length, stride)}: must be positive, its length at most the {positions} positions before it"
                )
            sizes.append((channels, filters, length, stride))
            channels, positions = filters, (positions - length) // stride + 1
        self.banks = nn.ModuleList(Bank(c, f, length, stride) for c, f, length, stride in sizes)
        self.synthesis = nn.Linear(channels * positions, horizon)
        self.rank = min(channels * positions, horizon)
        self.multiply_adds = channels * positions * horizon
        positions = lookback
        for c, f, length, stride in sizes:
            positions = (positions - length) // stride + 1
            self.multiply_adds += c * f * length * positions

    def forward(self, past: Tensor) -> Tensor:
        """(B, lookback) to (B, horizon)."""
        mean = past.mean(-1, keepdim=True)
        scale = past.std(-1, keepdim=True, correction=0) + 1e-4
        x = ((past - mean) / scale).unsqueeze(-2)
        for i, bank in enumerate(self.banks):
            x = bank(x if i == 0 else F.gelu(x))
        return self.synthesis(x.flatten(-2)) * scale + mean


def train(
    net: nn.Module,
    past: NDArray[Any],
    future: NDArray[Any],
    validation: tuple[NDArray[Any], NDArray[Any]],
    lr: float = 1e-3,
    size: int = 256,
    epochs: int = 20,
    patience: int = 3,
    rows: int = 65536,
    seed: int = 0,
) -> tuple[float, int]:
    """Fit a forecaster by Adam on squared errors; it ends with the weights that were best on the validation part.

    Args:
        net: past (B, L) to future (B, H).
        past, future: (n, channels, L), (n, channels, H), as `forecast.windows` makes them.
        validation: the same of the validation part.
        lr, size, epochs, patience: rate, rows of a batch, passes at most, passes without improvement.
        rows: windows of channels in a pass; of more, a random part.
        seed: of their order.

    Returns:
        Best validation error, passes.
    """
    draw = np.random.default_rng(seed)
    every = past.shape[0] * past.shape[1]
    optimiser = torch.optim.Adam(net.parameters(), lr)
    best, kept, waited, passes = np.inf, copy.deepcopy(net.state_dict()), 0, 0
    for passes in range(1, epochs + 1):  # noqa: B007
        order = draw.permutation(every)[:rows]
        for at in np.array_split(order, max(1, len(order) // size)):
            i, c = np.divmod(at, past.shape[1])
            x, y = torch.from_numpy(past[i, c].astype(np.float32)), torch.from_numpy(future[i, c].astype(np.float32))
            optimiser.zero_grad()
            F.mse_loss(net(x), y).backward()
            optimiser.step()
        error = errors(net, *validation)[0]
        if error < best:
            best, kept, waited = error, copy.deepcopy(net.state_dict()), 0
        else:
            waited += 1
            if waited == patience:
                break
    net.load_state_dict(kept)
    return float(best), passes


@torch.no_grad()
def errors(net: nn.Module, past: NDArray[Any], future: NDArray[Any]) -> tuple[float, float]:
    """Mean squared and mean absolute error over all windows and channels."""
    squared = absolute = 0.0
    step = max(1, 16384 // past.shape[1])
    for i in range(0, len(past), step):
        x = torch.from_numpy(past[i : i + step].reshape(-1, past.shape[-1]).astype(np.float32))
        gap = net(x) - torch.from_numpy(future[i : i + step].reshape(-1, future.shape[-1]).astype(np.float32))
        squared += float(gap.square().sum(dtype=torch.float64))
        absolute += float(gap.abs().sum(dtype=torch.float64))
    return squared / future.size, absolute / future.size
