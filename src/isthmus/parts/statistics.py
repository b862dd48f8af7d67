"""Rounds that share statistics instead of updates."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..core.batches import Batches
from ..core.tensors import Tensors
from ..core.types import Aggregate, Inbox, Loss, Server, Trained, Update, Work


@dataclass(frozen=True)
class Sum(Aggregate):
    """The plain sum of what travels: counts of all clients as if they had been counted in one place."""

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """Stateless; integers stay integers."""
        return {n: t.sum(0, dtype=None if t.is_floating_point() else t.dtype) for n, t in update.payload.items()}, state


@dataclass(frozen=True)
class Count(Work):
    """Sums the task's statistics over all rows, every row once; nothing trains."""

    def counts(self, round: int) -> bool:
        """Always."""
        return True

    def plan(self, batches: Batches, round: int) -> Batches:
        """One pass."""
        return replace(batches, epochs=1, steps=None)

    def __call__(self, params: Tensors, loss: Loss, batches: Tensors, inbox: Inbox, rates: Tensors) -> Trained:
        """``loss`` gives sums of a batch."""
        total: Tensors = {}
        for i in range(len(batches["valid"])):
            found = loss(params, {n: t[i] for n, t in batches.items()})
            total = {n: total[n] + t for n, t in found.items()} if total else found
        return Trained(params, {"rows": batches["valid"].sum().float()}, {}, total)


@dataclass(frozen=True)
class Phases(Work):
    """One work up to a round, another from then on."""

    first: Work
    then: Work
    switch: int

    def _of(self, round: int) -> Work:
        return self.first if round < self.switch else self.then

    def counts(self, round: int) -> bool:
        """That of the round's work."""
        return self._of(round).counts(round)

    def plan(self, batches: Batches, round: int) -> Batches:
        """That of the round's work."""
        return self._of(round).plan(batches, round)

    def __call__(self, params: Tensors, loss: Loss, batches: Tensors, inbox: Inbox, rates: Tensors) -> Trained:
        """The round's work."""
        return self._of(inbox.round)(params, loss, batches, inbox, rates)
