"""FedProx (Li et al., MLSys 2020): the local objective gains mu/2 ||w - w_received||^2."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..core.tensors import Tensors
from ..core.types import Inbox, Loss, Method, Plugin


@dataclass(frozen=True)
class Proximal(Plugin):
    """The proximal term, over every tensor that trains."""

    mu: float = 0.01
    name = "fedprox"

    def wrap(self, loss: Loss, anchor: Tensors, memory: Tensors, inbox: Inbox) -> Loss:
        """loss + mu/2 ||params - anchor||^2."""
        if not self.mu:
            return loss
        return lambda p, batch: loss(p, batch) + self.mu / 2 * sum((p[n] - anchor[n]).square().sum() for n in p)


def fedprox(base: Method, mu: float = 0.01) -> Method:
    """FedProx: a proximal term mu/2 ||w - w_received||^2 in the local objective; ``mu`` = 0 is the base."""
    if mu < 0:
        raise ValueError(f"fedprox: mu = {mu!r}: must be at least 0")
    return replace(base, plugins=(*base.plugins, Proximal(mu)))
