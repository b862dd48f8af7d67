"""SCAFFOLD (Karimireddy et al., ICML 2020): control variates c and c_k turn each client's gradient towards the federation's.

The client's new control variate is the mean of its own gradients over the round, which for plain SGD is the paper's option II and
carries over to other optimisers (derived).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..core.tensors import Tensors, prefixed, tmap, under
from ..core.types import Inbox, Loss, Method, Plugin, Trained
from ..parts.aggregate import CohortMean, Routed

_C = "control."


@dataclass(frozen=True)
class ControlVariates(Plugin):
    """Private c_k for each shared tensor; the server publishes c as ``control.<name>``."""

    name = "scaffold"
    relies = frozenset({_C + "*"})

    def publish(self, params: Tensors, clients: int) -> Tensors:
        """c starts at 0."""
        return prefixed(tmap(torch.zeros_like, params), _C)

    def init(self, params: Tensors) -> Tensors:
        """c_k starts at 0."""
        return tmap(torch.zeros_like, params)

    def wrap(self, loss: Loss, anchor: Tensors, memory: Tensors, inbox: Inbox) -> Loss:
        """A linear term whose gradient is c - c_k."""
        turn = {n: c - memory[n] for n, c in under(inbox.shared, _C).items()}
        return lambda p, batch: loss(p, batch) + sum((p[n] * turn[n]).sum() for n in p if n in turn)

    def end(self, params: Tensors, memory: Tensors, inbox: Inbox, trained: Trained) -> tuple[Tensors, Tensors, Tensors]:
        """c_k becomes the mean raw gradient; its change is sent."""
        after, change = dict(memory), {}
        for n, c in under(inbox.shared, _C).items():
            if n in trained.gradient:
                after[n] = trained.gradient[n] - (c - memory[n])
            change[_C + n] = after[n] - memory[n]
        return params, after, change


def scaffold(base: Method) -> Method:
    """SCAFFOLD: control variates against client drift; they travel too and double the payload."""
    aggregate = Routed({_C + "*": CohortMean(), "*": base.aggregate})
    return replace(base, plugins=(*base.plugins, ControlVariates()), aggregate=aggregate)
