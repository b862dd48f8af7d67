"""Clipping and noise on the client.

The noise of this file is counter-based, so that a simulation can be repeated: whoever knows the run's seed can subtract it.  It serves
to measure what privacy costs; it is no protection, and a deployment must draw from the operating system.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...core import seeds
from ...core.tensors import Tensors
from ...core.types import Channel, Inbox


@dataclass(frozen=True)
class GaussianNoise(Channel):
    """Scale the whole payload to a length of at most ``clip`` and add N(0, (sigma clip)^2) to every entry (simulated local DP).

    Losses and example counts do not leave beside it: every client weighs the same.  Refused behind a channel that rounds or thins out.
    """

    clip: float
    sigma: float
    name = "gaussian"
    private = True
    needs = frozenset({"exact"})

    def __post_init__(self) -> None:
        if self.clip <= 0 or self.sigma < 0:
            raise ValueError(f"channel gaussian: clip = {self.clip!r} must be above 0 and sigma = {self.sigma!r} at least 0")

    def encode(self, payload: Tensors, inbox: Inbox) -> Tensors:
        """Every floating tensor is clipped and noised; anything else is refused, since it would leave unprotected."""
        if bare := [n for n, t in payload.items() if not t.is_floating_point()]:
            raise ValueError(f"channel gaussian: {bare[0]} is not floating point and would leave without noise")
        length = sum((t.square().sum() for t in payload.values()), torch.zeros(())).sqrt()
        scale = torch.clamp(self.clip / (length + 1e-12), max=1.0)
        key = seeds.key(inbox.seed, inbox.round, inbox.client, "gaussian")
        return {n: t * scale + self.sigma * self.clip * seeds.normal(seeds.key(key, n), t.shape) for n, t in payload.items()}
