"""Clipping and noise on the client.

In a simulation the noise is counter-based, so that it can be repeated: whoever knows the run's seed can subtract it.  It serves to
measure what privacy costs.  Between machines (`deployed`) the noise comes from the operating system.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...core import seeds
from ...core.tensors import Tensors
from ...core.types import Channel, Inbox


@dataclass(frozen=True)
class GaussianNoise(Channel):
    """Scale the whole payload to a length of at most ``clip`` and add N(0, (sigma clip)^2) to every entry (local DP).

    Losses and example counts do not leave beside it: every client weighs the same.  Refused behind a channel that rounds or thins out.
    """

    clip: float
    sigma: float
    system: bool = False
    name = "gaussian"
    private = True
    needs = frozenset({"exact"})

    def __post_init__(self) -> None:
        if self.clip <= 0 or self.sigma < 0:
            raise ValueError(f"channel gaussian: clip = {self.clip!r} must be above 0 and sigma = {self.sigma!r} at least 0")

    def deployed(self) -> GaussianNoise:
        """With noise from the operating system."""
        return replace(self, system=True)

    def encode(self, payload: Tensors, inbox: Inbox) -> Tensors:
        """Floating tensors and counts (int32, int64) are clipped and noised, counts rounded again; anything else is refused, since it would leave unprotected."""
        scale = clipping(payload, torch.tensor(self.clip), "gaussian", COUNTS)
        key = seeds.key(inbox.seed, inbox.round, inbox.client, "gaussian")
        out: Tensors = {}
        for n, t in payload.items():
            noise = seeds.system_normal(t.shape) if self.system else seeds.normal(seeds.key(key, n), t.shape)
            if t.is_floating_point():
                out[n] = t * scale + self.sigma * self.clip * noise
            else:
                out[n] = (t.double() * scale + self.sigma * self.clip * noise.double()).round().to(t.dtype)
        return out


def length(payload: Tensors) -> Tensor:
    """Euclidean length of a whole payload, ()."""
    return sum(((t if t.is_floating_point() else t.double()).square().sum() for t in payload.values()), torch.zeros(())).sqrt()


COUNTS = (torch.int32, torch.int64)


def clipping(payload: Tensors, most: Tensor, who: str, also: tuple[torch.dtype, ...] = ()) -> Tensor:
    """Factor () that brings a payload to a length of at most ``most``.

    Raises:
        ValueError: a tensor that is neither floating point nor of a type in ``also``, and would leave as it is.
    """
    if bare := [n for n, t in payload.items() if not t.is_floating_point() and t.dtype not in also]:
        what = "neither floating point nor a count" if also else "not floating point"
        raise ValueError(f"channel {who}: {bare[0]} is {what} and would leave without protection")
    return torch.clamp(most / (length(payload) + 1e-12), max=1.0)


CLIP = "dp.clip"


@dataclass(frozen=True)
class Clip(Channel):
    """Scale the whole payload to a length of at most the bound that the server holds as ``dp.clip``, or ``most`` where it holds none.

    Beside a bound that adapts travels whether the payload was shorter than it (1/2, else -1/2).  Example counts and reports stay.
    """

    most: float
    name = "clip"
    private = True
    needs = frozenset({"exact"})
    takes = frozenset({"unbound"})
    relies = frozenset({"accounted"})

    def encode(self, payload: Tensors, inbox: Inbox) -> Tensors:
        """Nothing but floating tensors may pass."""
        adaptive = CLIP in payload
        rest = {n: t for n, t in payload.items() if n != CLIP}
        most = inbox.shared[CLIP] if adaptive else torch.tensor(self.most)
        scale = clipping(rest, most, "clip")
        out = {n: t * scale for n, t in rest.items()}
        return out | ({CLIP: (length(rest) <= most).to(most.dtype) - 0.5} if adaptive else {})


@dataclass(frozen=True)
class Silent(Channel):
    """Nothing leaves beside the payload, which passes as it is: the server clips what it stands for."""

    name = "silent"
    private = True
    needs = frozenset({"exact"})
    takes = frozenset({"unbound"})
    relies = frozenset({"accounted"})
