"""Aggregation that some hostile clients cannot steer: what stands between the updates and any aggregate.

Every rule takes the cohort's updates to other updates, so that the aggregate behind it, whatever it is, needs to know nothing: a bound
scales them, Krum drops some, the geometric median weighs them anew, coordinate-wise rules leave one in place of all.  Lengths and
distances are of what travels ("factors"), or of the products B A that LoRA factors stand for ("products"); coordinate-wise rules then work
on the dense products and cut the result back to factors by SVD.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from ..core.rounds import RunError
from ..core.tensors import Tensors, expand_to
from ..core.types import Aggregate, CompositionError, Server, Update
from .aggregate import WeightedMean, Wrapped, factored
from .factors import A, B, layers, trained

Space = Literal["factors", "products"]


def gram(update: Update, server: Server, space: Space = "factors") -> Tensor:
    """Inner products (K, K) of the clients' updates, in fp64; "products": of B_k A_k less the server's B A, layer by layer."""
    k = len(update.weight)
    found = layers(update.payload) if space == "products" else []
    total = torch.zeros(k, k, dtype=torch.float64)
    for n, t in update.payload.items():
        if t.is_floating_point() and not (found and n.endswith((A, B))):
            flat = t.reshape(k, -1).double()
            total += flat @ flat.mT
    for layer in found:
        b, a = trained(update, server, layer)
        # an update B_k A_k - B A is [B_k, -B] [A_k; A], of twice the rank
        wide = torch.cat([b, -server.shared[layer + B].expand_as(b)], 2).double()
        tall = torch.cat([a, server.shared[layer + A].expand_as(a)], 1).double()
        total += (torch.einsum("kor,los->klrs", wide, wide) * torch.einsum("kri,lsi->klrs", tall, tall)).sum((2, 3))
    return total


def distances(inner: Tensor) -> Tensor:
    """Squared distances (K, K) from inner products."""
    square = inner.diagonal()
    return (square[:, None] + square[None] - 2 * inner).clamp_min(0)


@dataclass(frozen=True)
class Rule:
    """Takes a cohort's updates to others.

    Args:
        attackers: hostile clients that it withstands.
        space: what lengths and distances are of.
    """

    attackers: int = 1
    space: Space = "factors"

    def __post_init__(self) -> None:
        if self.attackers < 0:
            raise ValueError(f"attackers = {self.attackers!r}: must be at least 0")

    def fewest(self) -> int:
        """Updates that it needs."""
        return 2 * self.attackers + 1

    def __call__(self, update: Update, server: Server) -> Update:
        """Of at least `fewest` updates."""
        raise NotImplementedError


@dataclass(frozen=True)
class NormBound(Rule):
    """No update is longer than ``most``, or, without it, than the median length of the cohort."""

    most: float | None = None

    def fewest(self) -> int:
        """Any number will do."""
        return 1

    def __call__(self, update: Update, server: Server) -> Update:
        """Longer ones are scaled down, as they travel."""
        length = gram(update, server, self.space).diagonal().clamp_min(0).sqrt()
        most = length.median() if self.most is None else torch.tensor(self.most, dtype=length.dtype)
        scale = torch.clamp(most / length.clamp_min(1e-30), max=1.0)
        payload = {n: t * expand_to(scale, t).to(t.dtype) if t.is_floating_point() else t for n, t in update.payload.items()}
        return replace(update, payload=payload)


def krum_scores(square: Tensor, attackers: int) -> Tensor:
    """Sum of squared distances of each update to its K - f - 2 nearest (Blanchard et al., NeurIPS 2017)."""
    k = len(square)
    near = square.masked_fill(torch.eye(k, dtype=torch.bool), torch.inf).sort(1).values
    return near[:, : max(1, k - attackers - 2)].sum(1)


@dataclass(frozen=True)
class MultiKrum(Rule):
    """Keep the ``keep`` updates that are closest to their neighbours; 1 is Krum, None all but the attackers."""

    keep: int | None = None

    def fewest(self) -> int:
        """2 f + 3."""
        return 2 * self.attackers + 3 if self.attackers else 1

    def __call__(self, update: Update, server: Server) -> Update:
        """The others are left out."""
        scores = krum_scores(distances(gram(update, server, self.space)), self.attackers)
        keep = min(len(scores), self.keep or len(scores) - self.attackers)
        return update.take(torch.argsort(scores, stable=True)[:keep].sort().values)


@dataclass(frozen=True)
class GeometricMedian(Rule):
    """Weights under which the mean is the point of the smallest total distance to all updates (Pillutla et al., 2022), by Weiszfeld steps."""

    steps: int = 100

    def __call__(self, update: Update, server: Server) -> Update:
        """The mean under any aggregate then is the median; example counts say how much a client's distance matters."""
        inner = gram(update, server, self.space)
        own = update.shares.double()
        share = own.clone()
        floor = 1e-9 * inner.diagonal().mean().clamp_min(1e-300).sqrt()
        for _ in range(self.steps):
            # ||x_k - sum_j s_j x_j||^2
            gap = (inner.diagonal() - 2 * inner @ share + share @ inner @ share).clamp_min(0).sqrt().clamp_min(floor)
            new = own / gap
            new = new / new.sum()
            if (new - share).abs().max() < 1e-12:
                break
            share = new
        return replace(update, weight=share.to(update.weight.dtype))


@dataclass(frozen=True)
class Coordinatewise(Rule):
    """One update in place of all, entry by entry."""

    def entries(self, stacked: Tensor) -> Tensor:
        """(K, *shape) to (*shape)."""
        raise NotImplementedError

    def __call__(self, update: Update, server: Server) -> Update:
        """Example counts play no part."""
        found = layers(update.payload) if self.space == "products" else []
        payload: Tensors = {}
        for n, t in update.payload.items():
            if not t.is_floating_point():
                raise RunError(f"{type(self).__name__}: {n} is not floating point; a coordinate-wise rule has no meaning for it")
            if not (found and n.endswith((A, B))):
                payload[n] = self.entries(t)[None]
        for layer in found:
            b, a = trained(update, server, layer)
            new = factored(self.entries(b @ a), server.shared[layer + B], server.shared[layer + A])
            payload |= {layer + f: t[None] for f, t in zip((B, A), new, strict=True)}
        return Update(payload, torch.ones(1), {}, torch.full((1,), -1), None if update.rank is None else update.rank.max()[None])


@dataclass(frozen=True)
class Median(Coordinatewise):
    """The median of every entry; the mean of the middle two where there are two."""

    def entries(self, stacked: Tensor) -> Tensor:
        """(K, *shape) to (*shape)."""
        ordered, k = stacked.sort(0).values, len(stacked)
        return (ordered[(k - 1) // 2] + ordered[k // 2]) / 2


@dataclass(frozen=True)
class TrimmedMean(Coordinatewise):
    """The mean of every entry without its f largest and f smallest values (Yin et al., ICML 2018)."""

    def entries(self, stacked: Tensor) -> Tensor:
        """(K, *shape) to (*shape)."""
        f = self.attackers
        return stacked.sort(0).values[f : len(stacked) - f].mean(0)


@dataclass(frozen=True)
class Bulyan(Coordinatewise):
    """Krum chooses K - 2 f updates one by one, then of every entry the values next to the median are averaged (El Mhamdi et al., ICML 2018)."""

    def fewest(self) -> int:
        """4 f + 3."""
        return 4 * self.attackers + 3 if self.attackers else 1

    def __call__(self, update: Update, server: Server) -> Update:
        """First the choice, then the entries."""
        square, left = distances(gram(update, server, self.space)), list(range(len(update.weight)))
        chosen: list[int] = []
        while len(chosen) < len(update.weight) - 2 * self.attackers:
            at = torch.tensor(left)
            best = left[int(krum_scores(square[at][:, at], self.attackers).argmin())]
            chosen.append(best)
            left.remove(best)
        return super().__call__(update.take(torch.tensor(sorted(chosen))), server)

    def entries(self, stacked: Tensor) -> Tensor:
        """(theta, *shape) to (*shape)."""
        ordered, theta = stacked.sort(0).values, len(stacked)
        middle = (ordered[(theta - 1) // 2] + ordered[theta // 2]) / 2
        near = (stacked - middle).abs().argsort(0)[: theta - 2 * self.attackers]
        return stacked.gather(0, near).mean(0)


@dataclass(frozen=True)
class Guarded(Wrapped):
    """An aggregate behind a rule."""

    rule: Rule = field(default_factory=Median)
    base: Aggregate = field(default_factory=WeightedMean)
    needs = frozenset({"individual"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if "accounted" in self.base.offers:
            raise CompositionError(f"{type(self.rule).__name__}: behind it the noise of dp would not fit what one client can change")
        if isinstance(self.rule, Coordinatewise) and self.base.offers & {"drawn", "masks"}:
            raise CompositionError(
                f"{type(self.rule).__name__}: entries of different clients' payloads do not mean the same under this method; "
                f"choose norm_bound, krum or geometric_median"
            )

    def fits(self, cohort: int) -> None:
        """A cohort that is too small is refused before the first round."""
        super().fits(cohort)
        if cohort < self.rule.fewest():
            raise CompositionError(
                f"{type(self.rule).__name__}: {self.rule.attackers} attackers need {self.rule.fewest()} clients a round; there are {cohort}"
            )

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """The base's step from what the rule leaves."""
        if len(update.weight) < self.rule.fewest():
            raise RunError(
                f"round {server.round}: {len(update.weight)} updates came; {type(self.rule).__name__} against {self.rule.attackers} attackers "
                f"needs {self.rule.fewest()}"
            )
        return self.base(self.rule(update, server), server, state)
