"""Federated routing: which model to ask, learned from what clients asked (after arXiv 2601.22318).

`router_kmeans`: clients cluster their queries and send centroids and how many queries each stands for; the server clusters the centroids by these weights;
then clients count, for each cluster and model, how often they asked, how often it was right and what it cost.  Everything after the first round is a sum:
split the same rows over any clients and, the centres given, the table is the same.  ``secure``: the centres come from sums as well (Lloyd's steps over
the federation, from random directions), so that a secure sum goes over all of it.

`router_mlp`: the averaged network, each model's head by those only who have asked that model.

Of the source the abstract and summaries could be read.  Derived: the draw towards the overall mean (`tasks.queries.estimates`), the secure form.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from ..core.seeds import generator, seed_of
from ..core.tensors import Tensors
from ..core.types import Aggregate, Inbox, Loss, Method, Plugin, Server, Trained, Update
from ..parts.aggregate import MASK, MeanWherePresent, Routed
from ..parts.cluster import lloyd
from ..parts.share import Held
from ..parts.statistics import Count, Sum
from ..primitives.kmeans import KMeans

CENTRES, MICRO = "router.centres", 1e6
TABLES = {"count.right": "router.right", "count.spent": "router.spent", "count.asked": "router.asked"}


@dataclass(frozen=True)
class Clusters(Plugin):
    """Centroids in the first round (``secure``: sums in the first ``lloyd`` ones), counts from then on."""

    clusters: int
    local: int
    secure: bool
    lloyd: int
    name = "router"
    names = ("quality.weight", "body.weight")
    relies = frozenset({"tables"})

    def counting(self, round: int) -> bool:
        """Whether the centres are settled."""
        return round >= (self.lloyd if self.secure else 1)

    def publish(self, params: Tensors, clients: int) -> Tensors:
        """Centres, tables, and places for what is sent."""
        models, width = params["quality.weight"].shape[0], params["body.weight"].shape[1]
        start = torch.zeros(self.clusters, width)
        if self.secure:
            start = torch.nn.functional.normalize(torch.randn(start.shape, generator=generator("router", self.clusters, width)), dim=-1)
        whole = lambda: torch.zeros(self.clusters, models, dtype=torch.int64)  # noqa: E731
        out = {CENTRES: start} | {n: whole() for pair in TABLES.items() for n in pair}
        if self.secure:
            return out | {
                "sent.sums": torch.zeros(self.clusters, width, dtype=torch.int64),
                "sent.rows": torch.zeros(self.clusters, dtype=torch.int64),
            }
        return out | {"sent.centroids": torch.zeros(self.local, width), "sent.sizes": torch.zeros(self.local, dtype=torch.int64)}

    def speaks(self, name: str, inbox: Inbox) -> bool:
        """One or the other."""
        return name.startswith("count." if self.counting(inbox.round) else "sent.")

    def look(self, model: Tensors, memory: Tensors, inbox: Inbox, statistics: Loss, batches: Tensors) -> Tensors:
        """Cluster what was asked here."""
        if self.secure or self.counting(inbox.round):
            return memory
        centroids, _, sizes = lloyd(batches["x"].flatten(0, 1), batches["valid"].flatten().to(batches["x"].dtype), self.local, 20)
        return {"centroids": centroids, "sizes": sizes.to(torch.int64)}

    def end(self, params: Tensors, memory: Tensors, inbox: Inbox, trained: Trained) -> tuple[Tensors, Tensors, Tensors]:
        """Nothing is kept."""
        if self.counting(inbox.round):
            return params, {}, {f"count.{n}": trained.counts[n] for n in ("right", "spent", "asked")}
        if self.secure:
            return params, {}, {"sent.sums": trained.counts["sums"], "sent.rows": trained.counts["rows"]}
        return params, {}, {"sent.centroids": memory["centroids"], "sent.sizes": memory["sizes"]}


@dataclass(frozen=True)
class Merge(Aggregate):
    """Weighted k-means over all clients' centroids; where there are fewer of them than clusters, the first stands for the rest."""

    needs = frozenset({"individual"})

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """The step to the new centres."""
        sizes, points = update.payload["sent.sizes"].flatten(), update.payload["sent.centroids"].flatten(0, 1)
        points, sizes = points[sizes > 0], sizes[sizes > 0]
        old = server.shared[CENTRES]
        k = min(len(old), len(points))
        centres = points
        if k < len(points):
            made = KMeans(k, n_init=5, random_state=seed_of(server.seed, "merge") % 2**32).fit(
                points.numpy(), sample_weight=sizes.numpy().astype(float)
            )
            centres = torch.from_numpy(np.asarray(made.cluster_centers_, dtype=np.float32))
        return {CENTRES: torch.cat([centres, centres[:1].expand(len(old) - k, -1)]) - old}, state


@dataclass(frozen=True)
class LloydStep(Aggregate):
    """New centres from sums; one to which nothing fell stays."""

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """The step to them."""
        total, _ = Sum()(update, server, {})
        rows = total["sent.rows"].double()[:, None]
        return {CENTRES: torch.where(rows > 0, total["sent.sums"] / MICRO / rows.clamp_min(1) - server.shared[CENTRES], 0.0).float()}, state


@dataclass(frozen=True)
class Tables(Aggregate):
    """Counts of all clients to the tables."""

    @property
    def offers(self) -> frozenset[str]:
        """Tables over clusters."""
        return frozenset({"tables"})

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """Every round's counts take the place of those before."""
        total, _ = Sum()(update, server, {})
        return {TABLES[n]: t.round().to(torch.int64) - server.shared[TABLES[n]] for n, t in total.items()}, state


def router_kmeans(base: Method, clusters: int = 24, local: int = 16, secure: bool = False, lloyd: int = 8) -> Method:
    """A routing table over clusters of queries, from sums: two rounds, nothing trains (``secure``: ``lloyd`` + 1 rounds, all of them sums)."""
    for name, value in (("clusters", clusters), ("local", local), ("lloyd", lloyd)):
        if value < 1:
            raise ValueError(f"router_kmeans: {name} = {value!r}: must be at least 1")
    return replace(
        base,
        work=Count(),
        share=Held(base.share, ("*",)),
        aggregate=Routed({"sent.*": LloydStep() if secure else Merge(), "count.*": Tables()}),
        plugins=(*base.plugins, Clusters(clusters, local, secure, lloyd)),
        observers=(),
    )


HEADS = ("quality.weight", "quality.bias", "cost.weight", "cost.bias")


@dataclass(frozen=True)
class Asked(Plugin):
    """Tells which models its rows have answers of."""

    name = "asked"
    names = HEADS
    relies = frozenset({"masks"})

    def publish(self, params: Tensors, clients: int) -> Tensors:
        """A bit for each model and tensor."""
        return {MASK + n: torch.zeros(params[n].shape[0], *[1] * (params[n].dim() - 1), dtype=torch.bool) for n in HEADS}

    def look(self, model: Tensors, memory: Tensors, inbox: Inbox, statistics: Loss, batches: Tensors) -> Tensors:
        """From the round's rows."""
        asked = batches["y"].chunk(3, -1)[2] * batches["valid"][..., None]
        return {"asked": asked.flatten(0, -2).amax(0) > 0}

    def end(self, params: Tensors, memory: Tensors, inbox: Inbox, trained: Trained) -> tuple[Tensors, Tensors, Tensors]:
        """Masks in the shapes of the heads' rows."""
        return params, {}, {MASK + n: memory["asked"].reshape(inbox.shared[MASK + n].shape) for n in HEADS}


def router_mlp(base: Method) -> Method:
    """The base's mean, but each model's head is averaged over the clients only that have asked that model."""
    return replace(base, aggregate=MeanWherePresent(base.aggregate), plugins=(*base.plugins, Asked()), observers=())
