"""F-CMs: concept-based models over clients that annotate different concepts, at different times (after arXiv 2602.04093).

Every round clients tell how many rows they have of each concept annotated, and how often pairs of them go together.  From the sums the server keeps which concepts
anybody has ever annotated, and which depend on each other (mutual information above ``edge`` bits).  A concept's module is averaged over the clients that
annotate it, by their annotated rows:

    w_c <- w_c + sum_k n_kc delta_kc / sum_k n_kc ,

everything else by FedAvg.  A concept that appears switches on its module and its column of the label module, which starts at zero: no prediction changes at
that moment, and all other modules stay bit for bit.  One that disappears keeps its module.  Every client holds all modules, so it predicts and corrects concepts that it never annotated.

``adapt`` False is the fixed architecture: everything on from the start, missing annotations masked, plain averages.

Of the source abstract and introduction could be read; the rules above are derived.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..core.tensors import Tensors
from ..core.types import Aggregate, Inbox, Loss, Method, Observer, Plugin, Server, Trained, Update
from ..parts.aggregate import WeightedMean, Wrapped
from ..parts.statistics import Sum

ACTIVE, PARENTS, ROUND = "concepts.active", "concepts.parents", "concepts.round"
COUNT, PAIRS, SEEN = "count.annotated", "count.pairs", "fcm.pairs"


@dataclass(frozen=True)
class Concepts(Plugin):
    """Tells what is annotated; says to the model which round it is."""

    adapt: bool
    name = "fcm"
    names = ("concept.weight", "label.weight")

    def publish(self, params: Tensors, clients: int) -> Tensors:
        """Which concepts are active, their parents, and places for counts."""
        m = params["concept.weight"].shape[0]
        if not self.adapt:
            return {}
        out = {ACTIVE: torch.zeros(m), PARENTS: torch.zeros(m, m)}
        return out | {COUNT: torch.zeros(m, dtype=torch.int64), PAIRS: torch.zeros(m, m, 4, dtype=torch.int64)}

    def speaks(self, name: str, inbox: Inbox) -> bool:
        """Counts, every round."""
        return name in (COUNT, PAIRS)

    def begin(self, params: Tensors, memory: Tensors, inbox: Inbox, loss: Loss, probe: Tensors) -> tuple[Tensors, Tensors]:
        """Annotations depend on the round."""
        return params | {ROUND: torch.tensor(float(inbox.round))}, memory

    def look(self, model: Tensors, memory: Tensors, inbox: Inbox, statistics: Loss, batches: Tensors) -> Tensors:
        """Counts over the round's rows."""
        if not self.adapt:
            return memory
        found = [statistics(model, {n: t[i] for n, t in batches.items()}) for i in range(len(batches["valid"]))]
        return {n: torch.stack([f[n] for f in found]).sum(0) for n in ("annotated", "pairs")}

    def end(self, params: Tensors, memory: Tensors, inbox: Inbox, trained: Trained) -> tuple[Tensors, Tensors, Tensors]:
        """Nothing is kept."""
        return params, {}, {COUNT: memory["annotated"], PAIRS: memory["pairs"]} if self.adapt else {}


def dependence(pairs: Tensor) -> Tensor:
    """Mutual information in bits (M, M) from counts (M, M, 4) of values 00, 01, 10, 11; 0 where nothing was counted."""
    joint = pairs.double().reshape(*pairs.shape[:2], 2, 2)
    total = joint.sum((-1, -2), keepdim=True)
    p = joint / total.clamp_min(1)
    apart = p.sum(-1, keepdim=True) * p.sum(-2, keepdim=True)
    return torch.where(p > 0, p * (p.clamp_min(1e-300) / apart.clamp_min(1e-300)).log2(), 0.0).sum((-1, -2))


@dataclass(frozen=True)
class ByConcept(Wrapped):
    """Rows of ``concept.*`` over those who annotated that concept; what else there is by ``base``."""

    base: Aggregate = field(default_factory=WeightedMean)
    edge: float = 0.02
    needs = frozenset({"individual"})

    def init(self, shared: Tensors) -> Tensors:
        """No pair was counted yet."""
        return self.base.init(shared) | {SEEN: torch.zeros_like(shared[PAIRS])}

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """Counts themselves make no step; a concept that nobody annotates this round keeps its module."""
        counts = update.payload[COUNT].to(update.weight.dtype)  # (K, M)
        shares = counts / counts.sum(0).clamp_min(1)
        mine = {n: t for n, t in update.payload.items() if n.startswith("concept.")}
        rest = {n: t for n, t in update.payload.items() if n not in mine and n not in (COUNT, PAIRS)}
        step, kept = self.base(replace(update, payload=rest), server, {n: t for n, t in state.items() if n != SEEN})
        for n, t in mine.items():
            step[n] = torch.einsum("km,km...->m...", shares.to(t.dtype), t)
        total, _ = Sum()(update.take(torch.arange(len(update.weight))), server, {})
        pairs = torch.maximum(state[SEEN], total[PAIRS])
        active = torch.maximum(server.shared[ACTIVE], (counts.sum(0) > 0).float())
        parents = torch.tril((dependence(pairs) > self.edge).float(), -1)
        return step | {ACTIVE: active - server.shared[ACTIVE], PARENTS: parents - server.shared[PARENTS]}, kept | {SEEN: pairs}


@dataclass(frozen=True)
class Registry(Observer):
    """How many concepts are active, and edges between them."""

    def __call__(self, update: Update, before: Server, after: Server) -> dict[str, float]:
        """Counts."""
        return {"concepts": float(after.shared[ACTIVE].sum()), "edges": float(after.shared[PARENTS].sum())}


def fcm(base: Method, adapt: bool = True, edge: float = 0.02) -> Method:
    """F-CMs: a module for each concept, averaged over those who annotate it; the model grows with the concepts."""
    if edge < 0:
        raise ValueError(f"fcm: edge = {edge!r}: must be at least 0 bits")
    method = replace(base, plugins=(*base.plugins, Concepts(adapt)))
    return replace(method, aggregate=ByConcept(base.aggregate, edge), observers=(*base.observers, Registry())) if adapt else method
