"""FBFS: logic-gate networks federated by choosing Boolean functions instead of averaging parameters.

In round 0 every client trains a network of its own wiring, and sends the functions of its hardened gates.  The server hands the pool of all
clients' last-layer gates to everybody; on rows that it held out of training each client counts how often every gate fires for every class, and how
many rows of a class it has.  From the sums alone the server chooses, for every class c, the m gates whose firing rates differ most,

    score(c, g) = S[c, g] / N[c] - sum_{c' != c} S[c', g] / sum_{c' != c} N[c'],

gates that fire for the others counting by their complement, greedily less ``diversity`` times the largest cosine to the class profile of
a gate that is chosen already.  A row's score for c is the number of chosen gates that fire, less an integer: the middle between the mean
scores of rows of c and of others, which the same sums give.  The choice equals that on the union of the held-out rows, index for index.

No public text of the source was found.  Derived: the profile cosine in place of gate-by-gate co-firing (which would need all pairs of gates), the complement, the
integer offset, and that networks are wired each their own way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.rounds import RunError
from ..core.tensors import Tensors
from ..core.types import Aggregate, Inbox, Loss, Method, Plugin, Server, Trained, Update
from ..parts.aggregate import Routed
from ..parts.share import Held
from ..parts.statistics import Count, Phases, Sum

CODES, FIRES, ROWS = "codes", "count.fires", "count.rows"


def selection(fires: Tensor, rows: Tensor, gates: int, diversity: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Chosen gates (C, m), their signs (C, m), integers (C,), from firing counts (C, G) and row counts (C,).

    Raises:
        RunError: a class of which nobody held out a row.
    """
    if not (rows > 0).all():
        raise RunError(f"fbfs: no client has held-out rows of class {int((rows <= 0).nonzero()[0])}; more rows, or fewer classes")
    classes, total = fires.shape
    s, n = fires.double(), rows.double()[:, None]
    rate = s / n
    score = rate - (s.sum(0) - s) / (n.sum() - n)
    sign = torch.where(score < 0, -1, 1)
    profile = torch.nn.functional.normalize(rate - rate.mean(0), dim=0)  # (C, G)
    m = min(gates, total)
    index = torch.zeros(classes, m, dtype=torch.int64)
    for c in range(classes):
        strength = score[c].abs()
        if not diversity:
            index[c] = torch.argsort(strength, descending=True, stable=True)[:m]
            continue
        like = torch.full((total,), -1.0, dtype=torch.float64)
        left = torch.zeros(total, dtype=torch.float64)
        for i in range(m):
            value = strength - diversity * like.clamp_min(0) + left
            best = int(value.argmax())
            index[c, i] = best
            left[best] = -torch.inf
            like = torch.maximum(like, sign[c, best] * sign[c] * (profile[:, best] @ profile))
    chosen = sign.gather(1, index)
    on = (chosen * rate.gather(1, index)).sum(1)
    off = (chosen * ((s.sum(0) - s) / (n.sum() - n)).gather(1, index)).sum(1)
    return index, chosen, torch.round((on + off) / 2).to(torch.int64)


@dataclass(frozen=True)
class Candidates(Plugin):
    """Sends the functions of the hardened gates once, four bits each, and the counts in the round after."""

    gates: int
    classes: int
    secure: bool = False
    name = "fbfs"
    names = ("gates.weight",)
    relies = frozenset({"chosen"})

    def publish(self, params: Tensors, clients: int) -> Tensors:
        """Where codes and counts arrive, and what the server makes of them."""
        layers, width, _ = params["gates.weight"].shape
        pool = torch.zeros(clients, layers, width, dtype=torch.uint8)
        total = clients * width
        m = min(self.gates, total) or total // self.classes
        whole = lambda *shape: torch.zeros(*shape, dtype=torch.int32)  # noqa: E731
        out = {"pool.types": pool, FIRES: whole(self.classes, total), ROWS: whole(self.classes)}
        out |= {"select.index": whole(self.classes, m), "select.sign": whole(self.classes, m), "select.bias": whole(self.classes)}
        return out | ({} if self.secure else {CODES: torch.zeros((layers * width + 1) // 2, dtype=torch.uint8)})

    def speaks(self, name: str, inbox: Inbox) -> bool:
        """Functions in round 0, counts from then on."""
        if inbox.round == 0:
            return name == ("pool.types" if self.secure else CODES)
        return inbox.round > 0 and name in (FIRES, ROWS)

    def begin(self, params: Tensors, memory: Tensors, inbox: Inbox, loss: Loss, probe: Tensors) -> tuple[Tensors, Tensors]:
        """Gates are wired each client's own way."""
        return params | {"gates.owner": inbox.client}, memory

    def end(self, params: Tensors, memory: Tensors, inbox: Inbox, trained: Trained) -> tuple[Tensors, Tensors, Tensors]:
        """Codes, or counts."""
        if inbox.round == 0:
            types = params["gates.weight"].argmax(-1).to(torch.uint8)
            if self.secure:
                own = torch.arange(inbox.shared["pool.types"].shape[0]) == inbox.client
                return params, memory, {"pool.types": own[:, None, None] * types}
            flat = types.reshape(-1)
            flat = torch.cat([flat, flat.new_zeros(flat.numel() % 2)]).reshape(-1, 2)
            return params, memory, {CODES: flat[:, 0] + 16 * flat[:, 1]}
        if inbox.round > 0:
            return params, memory, {FIRES: trained.counts["fires"], ROWS: trained.counts["rows"]}
        return params, memory, {}


@dataclass(frozen=True)
class Pool(Aggregate):
    """Codes to rows of the pool."""

    needs = frozenset({"individual"})

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """Only the rows of those who sent change."""
        old = server.shared["pool.types"]
        codes = update.payload[CODES]
        flat = torch.stack([codes % 16, codes // 16], 2).reshape(len(codes), -1)[:, : old[0].numel()]
        return {
            "pool.types": torch.zeros_like(old).index_copy(0, update.client, flat.reshape(-1, *old.shape[1:]) - old[update.client])
        }, state


@dataclass(frozen=True)
class Choose(Aggregate):
    """The selection from the sums of counts; without ``gates`` every last-layer gate votes for its own group's class, as in an ensemble."""

    gates: int
    diversity: float
    everything: bool = False

    @property
    def offers(self) -> frozenset[str]:
        """A selection."""
        return frozenset({"chosen"})

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """Counts themselves make no step."""
        total, _ = Sum()(update, server, {})
        classes, candidates = total[FIRES].shape
        if self.everything:
            width = server.shared["pool.types"].shape[2]
            groups = torch.arange(candidates).reshape(-1, classes, width // classes).transpose(0, 1).reshape(classes, -1)
            found = groups, torch.ones(groups.shape), torch.zeros(classes)
        else:
            found = selection(total[FIRES], total[ROWS], self.gates, self.diversity)
        names = ("select.index", "select.sign", "select.bias")
        return {n: t.to(torch.int32) - server.shared[n] for n, t in zip(names, found, strict=True)}, state


def fbfs(base: Method, gates: int = 100, diversity: float = 0.4, classes: int = 10, secure: bool = False, ensemble: bool = False) -> Method:
    """FBFS: clients train logic-gate networks alone, the server chooses among all their gates by summed counts.

    ``secure``: everything travels as sums.  ``ensemble``: no choice, all networks vote (a baseline).
    """
    for name, value in (("gates", gates), ("classes", classes)):
        if value < 1:
            raise ValueError(f"fbfs: {name} = {value!r}: must be at least 1")
    if diversity < 0:
        raise ValueError(f"fbfs: diversity = {diversity!r}: must be at least 0")
    routes: dict[str, Aggregate] = {"pool.types": Sum()} if secure else {CODES: Pool()}
    return replace(
        base,
        work=Phases(base.work, Count(), 1),
        share=Held(base.share, ("*",)),
        aggregate=Routed(routes | {"count.*": Choose(gates, diversity, ensemble)}),
        plugins=(*base.plugins, Candidates(0 if ensemble else gates, classes, secure)),
        observers=(),
    )


@dataclass(frozen=True)
class Majority(Aggregate):
    """Of every gate the function that most clients' hardened gates have, the lowest of equals."""

    names = ("gates.weight",)
    needs = frozenset({"individual"})

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """The step to ten times the one-hot of the winner."""
        old = server.shared["gates.weight"]
        types = (old + update.payload["gates.weight"]).argmax(-1)
        won = torch.nn.functional.one_hot(types, 16).sum(0).argmax(-1)
        return {"gates.weight": 10.0 * torch.nn.functional.one_hot(won, 16).to(old.dtype) - old}, state


def gate_majority(base: Method) -> Method:
    """Every gate becomes the function that most clients gave it (a baseline for FBFS)."""
    return replace(base, aggregate=Majority())
