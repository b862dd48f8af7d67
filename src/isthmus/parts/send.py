"""What travels to a client so that it holds the server's shared tensors."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.tensors import Tensors, nbytes
from ..core.types import Send, Server
from .apply import fresh
from .factors import A, B


@dataclass(frozen=True)
class Changed(Send):
    """Every tensor that changed since the client took part last; start values come from the recipe's seed and do not travel."""


@dataclass(frozen=True)
class Stacks(Send):
    """Base deltas as the low-rank factors of their last step where that is smaller, densely for clients that missed a round.

    ``restart``: LoRA factors were started afresh from the round's seed (`Restart`), so they do not travel at all.
    """

    restart: bool = False

    def message(self, server: Server, seen: int) -> Tensors:
        """Stacks for a client that holds everything but the last step."""
        out = super().message(server, seen)
        if self.restart:
            out = {n: t for n, t in out.items() if not n.endswith((A, B))}
        for n in [n for n in out if n.endswith(".delta")]:
            layer = n.removesuffix(".delta")
            factors = {
                f: server.state[f"aggregate/{layer}.{f}"] for f in ("stack_b", "stack_a") if f"aggregate/{layer}.{f}" in server.state
            }
            last = server.versions[n]
            if factors and (seen >= last or (seen == -1 and last == 0)) and nbytes(factors) < nbytes({n: out[n]}):
                del out[n]
                out |= {f"{layer}.{f}": t for f, t in factors.items()}
        return out

    def receive(self, message: Tensors, cache: Tensors, round: int, seed: int) -> Tensors:
        """Adds the stacks to the cached base; regenerates restarted factors."""
        shared = cache | {n: t for n, t in message.items() if not n.endswith((".stack_a", ".stack_b"))}
        for n in [n for n in message if n.endswith(".stack_b")]:
            layer = n.removesuffix(".stack_b")
            shared[f"{layer}.delta"] = cache[f"{layer}.delta"] + message[n] @ message[f"{layer}.stack_a"]
        return shared | (fresh(shared, seed, round) if self.restart and round else {})
