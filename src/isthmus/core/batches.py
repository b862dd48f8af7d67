"""Which rows a client sees in which step: the same in every engine, and again after a resume."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .seeds import generator


@dataclass(frozen=True)
class Batches:
    """Batches of ``size`` rows for ``epochs`` passes over a client's rows, or for a fixed number of ``steps``."""

    size: int = 16
    epochs: int = 1
    steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("size", "epochs", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"train.{name} = {value!r}: must be at least 1")

    def count(self, rows: int) -> int:
        """Steps of a client with this many rows."""
        return self.steps if self.steps is not None else self.epochs * math.ceil(rows / self.size)

    def draw(self, rows: Tensor, seed: int, round: int, client: int) -> Tensor:
        """Row numbers (steps, size), shuffled anew for every pass, -1 where a pass does not fill its last batch."""
        per_pass = math.ceil(len(rows) / self.size)
        passes = math.ceil(self.count(len(rows)) / per_pass)
        g = generator(seed, round, client, "order")
        out = torch.full((passes, per_pass * self.size), -1, dtype=torch.long)
        for i in range(passes):
            out[i, : len(rows)] = rows[torch.randperm(len(rows), generator=g)]
        return out.reshape(-1, self.size)[: self.count(len(rows))]

    def probe(self, rows: Tensor, seed: int, round: int, client: int) -> Tensor:
        """One batch (size,) from a stream of its own, so that who asks for it changes nothing else."""
        order = torch.randperm(len(rows), generator=generator(seed, round, client, "probe"))[: self.size]
        return torch.cat([rows[order], torch.full((self.size - len(order),), -1)])
