"""Clients that leave: each stays only while the federation's model serves it at least as well as what it could have alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..core.rounds import Finished
from ..core.tensors import Tensors
from ..core.types import Aggregate, CompositionError, Inbox, Invite, Loss, Method, Observer, Plugin, Server, Trained, Update
from ..parts.aggregate import WeightedMean, Wrapped
from ..parts.invite import Uniform

SURPLUS, LEFT, GONE = "rational.surplus", "rational.left", "rational.gone"


@dataclass(frozen=True)
class Rational(Plugin):
    """Measures the model that it receives on one batch of its own, smoothed over rounds, against its threshold; leaves after ``patience`` misses.

    Memory: ``loss`` (smoothed), ``misses``, ``gone``.  What it tells: threshold less loss, and whether it leaves.
    """

    thresholds: tuple[float, ...]
    patience: int = 3
    start: int = 0
    smooth: float = 0.5
    name = "rational"
    probe = True
    relies = frozenset({"staying"})

    def __post_init__(self) -> None:
        if self.patience < 1 or self.start < 0 or not self.thresholds:
            raise ValueError(
                f"rational: patience = {self.patience!r} must be at least 1, start = {self.start!r} at least 0, thresholds one or more"
            )

    def publish(self, params: Tensors, clients: int) -> Tensors:
        """Places for what it tells."""
        if len(self.thresholds) not in (1, clients):
            raise CompositionError(f"rational: {len(self.thresholds)} thresholds; there are {clients} clients (one number is everybody's)")
        return {SURPLUS: torch.zeros(()), LEFT: torch.zeros(())}

    def init(self, params: Tensors) -> Tensors:
        """No round yet."""
        return {"loss": torch.full((), torch.nan), "misses": torch.zeros(()), "gone": torch.zeros(())}

    def begin(self, params: Tensors, memory: Tensors, inbox: Inbox, loss: Loss, probe: Tensors) -> tuple[Tensors, Tensors]:
        """Before local work."""
        now = loss(params, probe).detach()
        seen = torch.where(memory["loss"].isnan(), now, self.smooth * memory["loss"] + (1 - self.smooth) * now)
        bad = (self.threshold(inbox.client) < seen) & torch.tensor(inbox.round >= self.start)
        misses = torch.where(bad, memory["misses"] + 1, 0.0)
        return params, {"loss": seen, "misses": misses, "gone": (misses >= self.patience).to(seen.dtype)}

    def threshold(self, client: Tensor) -> Tensor:
        """The largest loss that it puts up with, ()."""
        all_ = torch.tensor(self.thresholds)
        return all_[0] if len(all_) == 1 else all_.gather(0, client.reshape(1).long())[0]

    def end(self, params: Tensors, memory: Tensors, inbox: Inbox, trained: Trained) -> tuple[Tensors, Tensors, Tensors]:
        """One that leaves gives nothing more."""
        gone = memory["gone"] > 0
        params = {n: torch.where(gone, inbox.shared[n], t) if n in inbox.shared else t for n, t in params.items()}
        return params, memory, {SURPLUS: self.threshold(inbox.client) - memory["loss"], LEFT: memory["gone"]}


@dataclass(frozen=True)
class Staying(Wrapped):
    """A base aggregate over those who stay; the state remembers who left."""

    base: Aggregate = field(default_factory=WeightedMean)

    needs = frozenset({"individual"})
    adds = frozenset({"staying"})

    def init(self, shared: Tensors) -> Tensors:
        """Nobody has left."""
        return self.base.init(shared) | {GONE: torch.zeros(0, dtype=torch.bool)}

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """What clients tell makes no step."""
        gone = state[GONE] if len(state[GONE]) else torch.zeros(len(server.seen), dtype=torch.bool)
        leaving = update.payload[LEFT] > 0
        gone = gone.index_fill(0, update.client[leaving], True)
        rest = {n: t for n, t in state.items() if n != GONE}
        stay = (~leaving).nonzero().flatten()
        if not len(stay):
            return {}, rest | {GONE: gone}
        step, rest = self.base(update.take(stay), server, rest)
        return {n: t for n, t in step.items() if n not in (SURPLUS, LEFT)}, rest | {GONE: gone}


def present(server: Server) -> list[int]:
    """Clients that have not left."""
    gone = next((t for n, t in server.state.items() if n.endswith(GONE)), torch.zeros(0))
    return [c for c in range(len(server.seen)) if not (len(gone) and gone[c])]


@dataclass(frozen=True)
class Present(Invite):
    """Whom the base invites, of those who are still there."""

    base: Invite = field(default_factory=Uniform)

    def expected(self, clients: int) -> int:
        """At most as many as the base's."""
        return self.base.expected(clients)

    def __call__(self, server: Server) -> list[int]:
        """The run ends when everybody has left."""
        there = set(present(server))
        if not there:
            raise Finished("all clients have left the federation")
        return [c for c in self.base(server) if c in there] or sorted(there)[:1]


@dataclass(frozen=True)
class Retention(Observer):
    """How many are still there, and the worst surplus of the round."""

    headlines = ("staying",)
    needs = frozenset({"individual"})

    def __call__(self, update: Update, before: Server, after: Server) -> dict[str, float]:
        """Counts."""
        return {"staying": float(len(present(after))), "worst_surplus": float(update.payload[SURPLUS].min())}


def rational(base: Method, thresholds: tuple[float, ...] = (1e9,), patience: int = 3, start: int = 0) -> Method:
    """Clients leave for good once the model that they receive has missed their threshold of loss for ``patience`` rounds in a row."""
    return replace(
        base,
        plugins=(*base.plugins, Rational(tuple(thresholds), patience, start)),
        aggregate=Staying(base.aggregate),
        invite=Present(base.invite),
        observers=(*base.observers, Retention()),
    )
