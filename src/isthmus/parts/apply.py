"""The server's step: take it, treat it as a gradient, or restart the factors that were merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..core.tensors import Tensors
from ..core.types import Apply, Server
from .factors import A, B


@dataclass(frozen=True)
class Add(Apply):
    """shared + lr * step."""

    lr: float = 1.0

    def __call__(self, server: Server, step: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        """Stateless."""
        return {n: server.shared[n] + (d if self.lr == 1 else self.lr * d) for n, d in step.items()}, state


@dataclass(frozen=True)
class Adaptive(Apply):
    """FedOpt (Reddi et al., ICLR 2021): the mean delta as a pseudo-gradient for Adam or Yogi on the server."""

    rule: Literal["adam", "yogi"] = "adam"
    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.99)
    tau: float = 1e-3

    def init(self, shared: Tensors) -> Tensors:
        """First moments at 0, second at tau squared, as in the paper."""
        floating = {n: t for n, t in shared.items() if t.is_floating_point()}
        return {f"m.{n}": torch.zeros_like(t) for n, t in floating.items()} | {
            f"v.{n}": torch.full_like(t, self.tau**2) for n, t in floating.items()
        }

    def __call__(self, server: Server, step: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        """x + lr * m / (sqrt(v) + tau), without bias correction, as in the paper's algorithm 2."""
        b1, b2 = self.betas
        changed, state = {}, dict(state)
        for n, d in step.items():
            m = b1 * state[f"m.{n}"] + (1 - b1) * d
            v, square = state[f"v.{n}"], d * d
            v = b2 * v + (1 - b2) * square if self.rule == "adam" else v - (1 - b2) * square * torch.sign(v - square)
            state |= {f"m.{n}": m, f"v.{n}": v}
            changed[n] = server.shared[n] + self.lr * m / (v.sqrt() + self.tau)
        return changed, state


@dataclass(frozen=True)
class Restart(Apply):
    """Add the step, then start the factors of every merged layer afresh: B at 0, A from the round's own seed."""

    relies = frozenset({"merged"})

    def __call__(self, server: Server, step: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        """Stateless; the new A is what `fresh` gives, which a client can compute itself."""
        changed = {n: server.shared[n] + d for n, d in step.items()}
        return changed | fresh(server.shared, server.seed, server.round + 1), state


def fresh(shared: Tensors, seed: int, round: int) -> Tensors:
    """New start values of all factors for a round: A uniform as in LoRA's Kaiming start, B zero."""
    from ..core.seeds import generator

    out = {}
    for n, t in shared.items():
        if n.endswith(B):
            out[n] = torch.zeros_like(t)
        elif n.endswith(A):
            bound = t.shape[-1] ** -0.5
            out[n] = (torch.rand(t.shape, generator=generator(seed, round, n)) * 2 - 1) * bound
    return out
