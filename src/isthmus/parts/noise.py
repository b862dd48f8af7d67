"""Noise on the server: means whose sensitivity is known, and their count of noisy rounds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..core import seeds
from ..core.tensors import Tensors
from ..core.types import Aggregate, Inbox, Plugin, Server, Trained, Update
from .aggregate import WeightedMean, Wrapped, factored
from .channels.privacy import CLIP
from .factors import A, B, layers, trained

_ROUNDS = "dp.rounds"


def rounds_of(server: Server) -> int:
    """Noisy rounds so far."""
    return next((int(t) for n, t in server.state.items() if n.endswith(_ROUNDS)), 0)


@dataclass(frozen=True)
class NoisyMean(Wrapped):
    """The mean of a base aggregate as sum over the expected number, with Gaussian noise of ``noise`` times the sensitivity.

    Args:
        base: a mean of what travels.
        clip: bound on the length of an update; where it adapts, its start.
        noise: standard deviation over sensitivity, of the mean and of the count below the bound together.
        fraction: of all clients that a round expects.
        quantile: that the bound follows, or None.
        system: noise from the operating system.
    """

    base: Aggregate = field(default_factory=WeightedMean)
    clip: float = 1.0
    noise: float = 1.0
    fraction: float = 1.0
    quantile: float | None = None
    system: bool = False

    adds = frozenset({"accounted"})

    def deployed(self) -> NoisyMean:
        """With noise from the operating system."""
        return replace(self, base=self.base.deployed(), system=True)

    def init(self, shared: Tensors) -> Tensors:
        """State: rounds that were noised."""
        return self.base.init(shared) | {_ROUNDS: torch.zeros((), dtype=torch.int64)}

    def normal(self, server: Server, name: str, shape: torch.Size) -> Tensor:
        """Standard normal numbers for a tensor of this round."""
        return seeds.system_normal(shape) if self.system else seeds.normal(seeds.key(server.seed, server.round, name, "dp"), shape)

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """Clients weigh the same: their counts did not travel."""
        expected = max(1.0, self.fraction * len(server.seen))
        came = _came(update, server)
        step, kept = self.base(update, server, {n: t for n, t in state.items() if n != _ROUNDS})
        above, count_noise = self.split(expected)
        clip = server.shared[CLIP] if CLIP in server.shared else torch.tensor(self.clip)
        out: Tensors = {}
        for n, t in step.items():
            if n == CLIP:
                below = (t * came + count_noise * self.normal(server, n, t.shape)) / expected + 0.5
                # geometric update with rate 0.2, as in the source
                out[n] = server.shared[n] * (torch.exp(-0.2 * (below.clamp(0, 1) - (self.quantile or 0.5))) - 1)
            else:
                out[n] = t * came / expected + above * clip / expected * self.normal(server, n, t.shape)
        return out, kept | {_ROUNDS: state[_ROUNDS] + 1}

    def split(self, expected: float) -> tuple[float, float]:
        """Noise multiplier of the mean, and standard deviation of the noise on the count, which together cost ``noise``."""
        if self.quantile is None:
            return self.noise, 0.0
        count = max(expected / 20, self.noise)  # as in the source, but never so little that nothing is left for the mean
        return (self.noise**-2 - (2 * count) ** -2) ** -0.5, count


def _came(update: Update, server: Server) -> float:
    """Clients in the update; where only a sum came, their weights are in it, and every client's is 1."""
    return float(update.weight.sum())


@dataclass(frozen=True)
class NoisyProducts(NoisyMean):
    """FlexLoRA's mean of products, each client's ||B_k A_k - B A|| at most ``clip``, with noise on the dense mean before it is cut to factors."""

    needs = frozenset({"individual"})

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """One bound over all layers and all that is not a factor."""
        expected = max(1.0, self.fraction * len(server.seen))
        found, out = layers(update.payload), {}
        change: Tensors = {}
        for layer in found:
            b, a = trained(update, server, layer)
            change[layer] = b @ a - server.shared[layer + B] @ server.shared[layer + A]
        change |= {n: t for n, t in update.payload.items() if not n.endswith((A, B))}
        square = sum(t.reshape(len(t), -1).square().sum(1) for t in change.values())
        scale = torch.clamp(self.clip / (torch.as_tensor(square).sqrt() + 1e-12), max=1.0)
        for n, t in change.items():
            mean = torch.tensordot(scale, t, dims=1) / expected + self.noise * self.clip / expected * self.normal(server, n, t.shape[1:])
            if n in found:
                old_b, old_a = server.shared[n + B], server.shared[n + A]
                out[n + B], out[n + A] = factored(old_b @ old_a + mean, old_b, old_a)
            else:
                out[n] = mean
        return out, {_ROUNDS: state[_ROUNDS] + 1}


@dataclass(frozen=True)
class Bound(Plugin):
    """Holds a place in the payload for whether a client's update was below the bound; the channel fills it."""

    clip: float
    name = "dp"
    relies = frozenset({"accounted"})

    def publish(self, params: Tensors, clients: int) -> Tensors:
        """The bound, which the server moves."""
        return {CLIP: torch.tensor(self.clip)}

    def end(self, params: Tensors, memory: Tensors, inbox: Inbox, trained: Trained) -> tuple[Tensors, Tensors, Tensors]:
        """The place."""
        return params, memory, {CLIP: torch.zeros(())}
