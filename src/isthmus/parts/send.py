"""What travels to a client so that it holds the server's shared tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core.tensors import Tensors, nbytes
from ..core.types import Send, Server
from .apply import fresh
from .factors import DELTA, A, B


def kept(server: Server, name: str) -> list[Tensor]:
    """What the aggregate keeps under a name, however deep it stands in others; [] where it does not."""
    return [t for n, t in server.state.items() if n.startswith("aggregate/") and n.endswith("/" + name)]


@dataclass(frozen=True)
class Changed(Send):
    """Every tensor that changed since the client took part last; start values come from the recipe's seed and do not travel."""


@dataclass(frozen=True)
class Stacks(Send):
    """Base deltas as the low-rank factors of their last step where that is smaller, densely for clients that missed a round.

    ``restart``: LoRA factors were started afresh from the round's seed (`Restart`), so they do not travel at all.
    """

    restart: bool = False
    carries: ClassVar[tuple[str, ...]] = ("*.stack_a", "*.stack_b")

    def travelling(self, server: Server, layer: str) -> Tensors:
        """What of a layer's last step goes into a message."""
        return {n: t for n in (f"{layer}.stack_b", f"{layer}.stack_a") for t in kept(server, n)}

    def stack_a(self, message: Tensors, cache: Tensors, layer: str, round: int, seed: int) -> Tensor:
        """The second factor (m, in) of a layer's last step, on the client."""
        return message[f"{layer}.stack_a"]

    def message(self, server: Server, seen: int) -> Tensors:
        """Stacks for a client that holds everything but the last step."""
        out = super().message(server, seen)
        if self.restart:
            out = {n: t for n, t in out.items() if not n.endswith((A, B))}
        for n in [n for n in out if n.endswith(DELTA)]:
            factors, last = self.travelling(server, n.removesuffix(DELTA)), server.versions[n]
            if factors and (seen >= last or (seen == -1 and last == 0)) and nbytes(factors) < nbytes({n: out[n]}):
                del out[n]
                out |= factors
        return out

    def receive(self, message: Tensors, cache: Tensors, round: int, seed: int) -> Tensors:
        """Adds the stacks to the cached base; regenerates restarted factors."""
        shared = cache | {n: t for n, t in message.items() if n in cache}
        for n in [n for n in message if n.endswith(".stack_b")]:
            layer = n.removesuffix(".stack_b")
            shared[layer + DELTA] = cache[layer + DELTA] + message[n] @ self.stack_a(message, cache, layer, round, seed)
        return shared | (fresh(shared, seed, round) if self.restart and round else {})
