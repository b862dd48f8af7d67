"""Frank-LoRA: A is drawn anew by every client, never trained and never sent; learning rates follow the clients' ranks.

With A fixed and E[A'A] = I, training B alone takes the step of full fine-tuning times a random perturbation whose signal-to-noise
ratio is r / (n + 1), linear in the rank r.  So client k draws A_k (r_k, n) from a seed that the server knows, starts B_k at 0, and sends
B_k; the server regenerates A_k and merges sum_k w_k B_k A_k, which is exact, into the base.  The step that minimises the expected
loss of a smooth function is proportional to SNR / (1 + SNR) = r / (r + n + 1).  No public text of the source was found: this reading
of its abstract, and that a client's rate is relative to that of the largest rank, are derived.  The rule is for SGD; with Adam it is a
heuristic.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.func import vmap

from ..core import seeds
from ..core.tensors import Tensors
from ..core.types import Inbox, Loss, Method, Plugin, Server, Update
from ..parts.aggregate import IntoBase
from ..parts.factors import FACTORS, A, B, within_rank
from ..parts.observe import AggregationError
from ..parts.send import Stacks, kept
from ..parts.share import ByName, Held
from .ffa_lora import training_only

Draw = Literal["gaussian", "orthogonal"]
_COHORT, _RANKS = "cohort.client", "cohort.rank"


@dataclass(frozen=True)
class Drawn:
    """How A is drawn: every ``every`` rounds (0: once and for all), for each client or ``common`` to all.

    "gaussian": independent N(0, 1/r).  "orthogonal": r orthonormal rows times sqrt(n/r), whose perturbation vanishes at r = n.
    """

    every: int = 1
    common: bool = False
    draw: Draw = "gaussian"

    def __call__(self, layer: str, shape: tuple[int, ...], seed: int, round: int, client: Tensor, rank: Tensor) -> Tensor:
        """A (r_max, n) of one client: zeros beyond its rank ()."""
        period = round // self.every if self.every else 0
        key = seeds.key(seed, period, layer, "frank") if self.common else seeds.key(seed, period, client, layer, "frank")
        a = seeds.normal(key, shape)
        if self.draw == "orthogonal":
            a = torch.linalg.qr(a.mT)[0].mT * shape[1] ** 0.5
        return within_rank(a, rank, A) / rank**0.5


@dataclass(frozen=True)
class Resampling(Plugin):
    """Starts each round from a drawn A and from B = 0."""

    drawn: Drawn
    name = "frank_lora"
    names = FACTORS
    relies = frozenset({"drawn"})

    def begin(self, params: Tensors, memory: Tensors, inbox: Inbox, loss: Loss, probe: Tensors) -> tuple[Tensors, Tensors]:
        """A by seed, round, client and layer."""
        out = dict(params)
        for n, t in params.items():
            if n.endswith(A):
                rank = torch.tensor(t.shape[0]) if inbox.rank is None else inbox.rank
                out[n] = self.drawn(n.removesuffix(A), tuple(t.shape), inbox.seed, inbox.round, inbox.client, rank)
            elif n.endswith(B):
                out[n] = torch.zeros_like(t)
        return out, memory


def regenerated(drawn: Drawn, layer: str, shape: tuple[int, ...], seed: int, round: int, clients: Tensor, ranks: Tensor) -> Tensor:
    """Each client's A, (K, r_max, n), again."""
    return vmap(lambda c, r: drawn(layer, shape, seed, round, c, r))(clients, ranks)


@dataclass(frozen=True)
class MergeDrawn(IntoBase):
    """Merges sum_k w_k B_k A_k into the base, with A_k drawn again; keeps the B's and whose they were for the downlink."""

    drawn: Drawn = field(default_factory=Drawn)

    @property
    def offers(self) -> frozenset[str]:
        """Products with the clients' drawn A."""
        return super().offers | {"drawn"}

    def factors(self, update: Update, server: Server, layer: str) -> tuple[Tensor, Tensor]:
        """b (K, out, r) as it came, a (K, r, in)."""
        shape = tuple(server.shared[layer + A].shape)
        ranks = _ranks(update, shape[0])
        return update.payload[layer + B], regenerated(self.drawn, layer, shape, server.seed, server.round, update.client, ranks)

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """State: ``stack_b`` (out, m) of each layer, the cohort's numbers and ranks (K,)."""
        step, stacks = super().__call__(update, server, state)
        full = next(t.shape[0] for n, t in server.shared.items() if n.endswith(A))
        kept = {n: t for n, t in stacks.items() if n.endswith(".stack_b")}
        return step, kept | {_COHORT: update.client.int(), _RANKS: _ranks(update, full).int()}


def _ranks(update: Update, full: int) -> Tensor:
    return torch.full_like(update.client, full) if update.rank is None else update.rank


@dataclass(frozen=True)
class SendB(Stacks):
    """The last step as the cohort's B's and numbers, where that is smaller than the merged delta: clients draw the A's again."""

    drawn: Drawn = field(default_factory=Drawn)
    relies = frozenset({"drawn"})
    carries = (*Stacks.carries, _COHORT, _RANKS)

    def travelling(self, server: Server, layer: str) -> Tensors:
        """The stacked B's, and once for all layers the cohort."""
        cohort = {n: t for n in (_COHORT, _RANKS) for t in kept(server, n)}
        return super().travelling(server, layer) | cohort

    def stack_a(self, message: Tensors, cache: Tensors, layer: str, round: int, seed: int) -> Tensor:
        """The A's of the round before, without what lies beyond each rank."""
        clients, ranks = message[_COHORT].long(), message[_RANKS].long()
        a = regenerated(self.drawn, layer, tuple(cache[layer + A].shape), seed, round - 1, clients, ranks)
        used = torch.arange(a.shape[1]) < ranks[:, None]
        return a[used]


@dataclass(frozen=True)
class RankRate(Plugin):
    """The learning rate of B grows with the client's rank: r (R + n + 1) / (R (r + n + 1)) relative to the reference rank R."""

    reference: int | None = None
    name = "rank_rate"
    names = FACTORS

    def rates(self, params: Tensors, memory: Tensors, inbox: Inbox) -> Tensors:
        """Layer by layer, since n is the layer's."""
        out: Tensors = {}
        for n, a in params.items():
            if n.endswith(A):
                full, wide = self.reference or a.shape[0], a.shape[1] + 1
                rank = torch.tensor(float(a.shape[0])) if inbox.rank is None else inbox.rank.float()
                out[n.removesuffix(A) + B] = rank * (full + wide) / (full * (rank + wide))
        return out


def rank_rate(base: Method, reference: int | None = None) -> Method:
    """Learning rates of B in proportion to the rank's signal-to-noise, for any method with A frozen; the largest rank's stays as it is."""
    if reference is not None and reference < 1:
        raise ValueError(f"rank_rate: reference = {reference!r}: must be at least 1")
    return replace(base, plugins=(*base.plugins, RankRate(reference)))


def frank_lora(base: Method, every: int = 1, common: bool = False, draw: Draw = "gaussian", rates: bool = True) -> Method:
    """Frank-LoRA: A drawn anew every ``every`` rounds (0: never), only B trained and sent; rates by rank unless ``rates`` is false."""
    if every < 0:
        raise ValueError(f"frank_lora: every = {every!r}: must be at least 0")
    drawn = Drawn(every, common, draw)
    method = replace(
        training_only(base, ByName(but=("*" + A,))),
        share=Held(base.share, ("*" + A,)),
        plugins=(*base.plugins, Resampling(drawn)),
        aggregate=MergeDrawn(drawn=drawn),
        send=SendB(drawn=drawn),
        observers=tuple(o for o in base.observers if not isinstance(o, AggregationError)),  # exact, and A is not where it looks
    )
    return rank_rate(method) if rates else method
