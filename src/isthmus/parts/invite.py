"""Who takes part."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.seeds import generator
from ..core.types import Invite, Server


@dataclass(frozen=True)
class Uniform(Invite):
    """A fraction of all clients, drawn without replacement each round; at least one."""

    fraction: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"participation = {self.fraction!r}: must be above 0 and at most 1")

    def expected(self, clients: int) -> int:
        """Always the same."""
        return max(1, round(self.fraction * clients))

    def __call__(self, server: Server) -> list[int]:
        """Ascending client numbers."""
        clients = len(server.seen)
        if self.fraction == 1:
            return list(range(clients))
        k = self.expected(clients)
        return sorted(torch.randperm(clients, generator=generator(server.seed, server.round, "invite"))[:k].tolist())
