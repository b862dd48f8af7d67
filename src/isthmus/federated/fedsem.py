"""FedSEM: federated multiple-instance learning with a shared memory of evidence.

Beside the mean of the models, every ``every`` rounds each client tells which evidence the model that it received finds in its bags: of each bag the instances of
largest attention, weighed by attention x probability of the bag's label, compressed by weighted k-means to m prototypes a class with an importance each.
The server merges near-duplicates (cosine above ``merge``), chooses at most ``size`` a class by importance x distance to the nearest chosen one, lets scores
sum to one for each class, and hands the memory out.  Clients pull evidence to it and let attention agree with it (`tasks.mil.BagTask.loss`).

A prototype is the mean of at least ``least`` instances of different bags or places, or it is not sent: no single instance leaves.

No public text of the source was found.  Derived: both losses' forms, the thresholds, that prototypes are those of the model as it was received, so that all clients' lie in
one space, and that a memory replaces the one before instead of joining it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.tensors import Tensors
from ..core.types import Aggregate, Inbox, Loss, Method, Plugin, Server, Trained, Update
from ..parts.aggregate import Routed
from ..parts.cluster import lloyd

SENT, IMPORTANCE = "sent.prototypes", "sent.importance"
ANCHORS, SCORES = "memory.anchors", "memory.scores"


def compress(points: Tensor, weight: Tensor, m: int, least: int) -> tuple[Tensor, Tensor]:
    """Points (n, d) of weights (n,) to prototypes (m, d) and importances (m,); both 0 where fewer than ``least`` points fell."""
    centre, total, number = lloyd(points, weight, m)
    enough = (number >= least).to(points.dtype)
    return centre * enough[:, None], total * enough


@dataclass(frozen=True)
class Evidence(Plugin):
    """Looks at the round's bags with the model received, and sends prototypes."""

    every: int
    prototypes: int
    size: int
    least: int
    pull: float
    agree: float
    temperature: float
    name = "fedsem"
    names = ("embed.weight", "head.weight", "weigh.weight")

    def publish(self, params: Tensors, clients: int) -> Tensors:
        """Places for what is sent, the memory, and the weights of its terms."""
        labels, width = params["head.weight"].shape
        out = {SENT: torch.zeros(labels, self.prototypes, width), IMPORTANCE: torch.zeros(labels, self.prototypes)}
        out |= {ANCHORS: torch.zeros(labels, self.size, width), SCORES: torch.zeros(labels, self.size)}
        return out | {f"evidence.{n}": torch.tensor(float(getattr(self, n))) for n in ("pull", "agree", "temperature")}

    def due(self, round: int) -> bool:
        """Every so many rounds, first when the model has learned something."""
        return round > 0 and round % self.every == 0

    def speaks(self, name: str, inbox: Inbox) -> bool:
        """Prototypes, every so many rounds."""
        return name in (SENT, IMPORTANCE) and self.due(inbox.round)

    def look(self, model: Tensors, memory: Tensors, inbox: Inbox, statistics: Loss, batches: Tensors) -> Tensors:
        """Evidence of all bags, each once, compressed class by class."""
        if not self.due(inbox.round):
            return memory
        found = [statistics(model, {n: t[i] for n, t in batches.items()}) for i in range(len(batches["valid"]))]
        row, label = (torch.cat([f[n] for f in found]) for n in ("row", "label"))
        instances, importance = (torch.cat([f[n] for f in found]) for n in ("instances", "importance"))
        again = (row[:, None] == row).tril(-1).any(1)  # a bag of an earlier pass
        importance = torch.where(again[:, None], 0.0, importance)
        points, sent = instances.flatten(0, 1), []
        for c in range(inbox.shared[SENT].shape[0]):
            weight = torch.where(label[:, None] == c, importance, 0.0).flatten()
            sent.append(compress(points, weight, self.prototypes, self.least))
        return {"prototypes": torch.stack([s[0] for s in sent]).detach(), "importance": torch.stack([s[1] for s in sent]).detach()}

    def end(self, params: Tensors, memory: Tensors, inbox: Inbox, trained: Trained) -> tuple[Tensors, Tensors, Tensors]:
        """Nothing is kept."""
        if not self.due(inbox.round):
            return params, memory, {}
        return params, {}, {SENT: memory["prototypes"], IMPORTANCE: memory["importance"]}


def refine(prototypes: Tensor, importance: Tensor, size: int, merge: float) -> tuple[Tensor, Tensor]:
    """Anchors (size, d) and scores (size,) that sum to one, of one class's prototypes (n, d) with importances (n,), 0: none.

    The same whatever the order of the prototypes, and when one stands there twice.
    """
    there = importance > 0
    points, weight = prototypes[there], importance[there]
    # by importance, then by value, so that their order plays no part
    order = sorted(range(len(weight)), key=lambda i: (-float(weight[i]), points[i].tolist()))
    kept: list[Tensor] = []
    mass: list[float] = []
    for i in order:
        like = [float(F.cosine_similarity(points[i], k, dim=0)) for k in kept]
        best = max(range(len(like)), key=lambda j: like[j], default=-1)
        if best >= 0 and like[best] > merge:
            w = float(weight[i])
            kept[best] = (kept[best] * mass[best] + points[i] * w) / (mass[best] + w)
            mass[best] += w
        else:
            kept.append(points[i])
            mass.append(float(weight[i]))
    anchors, scores = torch.zeros(size, prototypes.shape[1]), torch.zeros(size)
    if not kept:
        return anchors, scores
    all_, value = torch.stack(kept), torch.tensor(mass)
    unit, far = F.normalize(all_, dim=-1, eps=1e-6), torch.full((len(value),), 2.0)
    for place in range(min(size, len(value))):
        best = int((value * far).argmax())
        anchors[place], scores[place] = all_[best], value[best]
        far = torch.minimum(far, 1 - unit @ unit[best])
        far[best] = -1.0
    return anchors, scores / scores.sum()


@dataclass(frozen=True)
class Refine(Aggregate):
    """All clients' prototypes to the next memory."""

    size: int
    merge: float
    needs = frozenset({"individual"})

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """What was sent itself makes no step; a class of which nobody sent anything has no anchors."""
        sent, importance = update.payload[SENT], update.payload[IMPORTANCE]
        made = [refine(sent[:, c].flatten(0, 1), importance[:, c].flatten(), self.size, self.merge) for c in range(sent.shape[1])]
        anchors, scores = torch.stack([a for a, _ in made]), torch.stack([s for _, s in made])
        return {ANCHORS: anchors - server.shared[ANCHORS], SCORES: scores - server.shared[SCORES]}, state


def fedsem(
    base: Method,
    every: int = 5,
    prototypes: int = 8,
    size: int = 32,
    least: int = 3,
    merge: float = 0.95,
    pull: float = 0.3,
    agree: float = 0.03,
    temperature: float = 0.1,
) -> Method:
    """FedSEM: clients share prototypes of the instances that their labels come from, and learn towards everybody's."""
    for name, value, low in (("every", every, 1), ("prototypes", prototypes, 1), ("size", size, 1), ("least", least, 2)):
        if value < low:
            raise ValueError(f"fedsem: {name} = {value!r}: must be at least {low}")
    if not -1 <= merge <= 1 or pull < 0 or agree < 0 or temperature <= 0:
        raise ValueError(
            f"fedsem: merge = {merge!r} must be a cosine, pull = {pull!r} and agree = {agree!r} at least 0, temperature = {temperature!r} above 0"
        )
    return replace(
        base,
        aggregate=Routed({"sent.*": Refine(size, merge), "*": base.aggregate}),
        plugins=(*base.plugins, Evidence(every, prototypes, size, least, pull, agree, temperature)),
    )
