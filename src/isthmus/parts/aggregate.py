"""K payloads to one step: weighted means of deltas, of products, of stacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..core import lowrank
from ..core.tensors import Tensors, matches, prefixed, under
from ..core.types import Aggregate, Server, Update
from .factors import FACTORS, A, B, layers, trained


def weighted_mean(update: Update) -> Tensors:
    """The mean of each tensor over clients, by their weights; (K, *shape) to (*shape)."""
    shares = update.shares
    return {n: torch.tensordot(shares.to(t.dtype), t, dims=1) for n, t in update.payload.items()}


@dataclass(frozen=True)
class WeightedMean(Aggregate):
    """Mean of the deltas, by number of examples."""

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """Stateless."""
        return weighted_mean(update), state


class Wrapped(Aggregate):
    """An aggregate around another, its ``base``: what that needs, publishes and offers is the whole's too.

    All but one offer: that noise is "accounted" holds for what the base returns, not for what is made of it, so only who adds it says so.
    """

    base: Aggregate
    adds: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", self.base.needs | type(self).needs)
        object.__setattr__(self, "travels", type(self).travels + self.base.travels)

    @property
    def offers(self) -> frozenset[str]:
        """The base's and its own."""
        return (self.base.offers - {"accounted"}) | self.adds

    def fits(self, cohort: int) -> None:
        """What the base asks for."""
        self.base.fits(cohort)

    def deployed(self) -> Self:
        """Around the base as it runs between machines."""
        return replace(self, base=self.base.deployed())  # type: ignore[type-var]

    def publish(self, params: Tensors, clients: int) -> Tensors:
        """That of the base."""
        return self.base.publish(params, clients)

    def init(self, shared: Tensors) -> Tensors:
        """That of the base."""
        return self.base.init(shared)


MASK = "mask."


@dataclass(frozen=True)
class MeanWherePresent(Wrapped):
    """Entry by entry the mean over the clients that sent it: ``mask.<name>`` marks what is present of ``<name>``.

    An entry that nobody sent does not change; one that all sent has the ordinary mean, bit for bit.  Names without a mask go to ``base``.
    """

    base: Aggregate = field(default_factory=WeightedMean)
    needs = frozenset({"individual"})
    adds = frozenset({"masks"})

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """Masks themselves make no step."""
        masks, shares = under(update.payload, MASK), update.shares
        rest = {n: t for n, t in update.payload.items() if n not in masks and not n.startswith(MASK)}
        step, state = self.base(replace(update, payload=rest), server, state)
        for n, mask in masks.items():
            t = update.payload[n] * mask
            total, present = torch.tensordot(shares, t, dims=1), torch.tensordot(shares, mask.to(t.dtype), dims=1)
            step[n] = torch.where(mask.all(0), total, torch.where(present > 0, total / present.clamp_min(1e-12), 0.0))
        return step, state


@dataclass(frozen=True)
class CohortMean(Aggregate):
    """Unweighted mean times the share of all clients that took part (SCAFFOLD's control variates)."""

    needs = frozenset({"individual"})

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """Stateless."""
        return {n: t.sum(0) / len(server.seen) for n, t in update.payload.items()}, state


@dataclass(frozen=True)
class Routed(Aggregate):
    """Names by pattern, each to its own aggregate; the first pattern that fits counts."""

    routes: Mapping[str, Aggregate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", frozenset(x for part in self.routes.values() for x in part.needs))
        object.__setattr__(self, "travels", tuple(x for part in self.routes.values() for x in part.travels))

    @property
    def offers(self) -> frozenset[str]:
        """The routes themselves, and what their parts offer."""
        return frozenset(self.routes).union(*(part.offers for part in self.routes.values())) - {"accounted"}

    def fits(self, cohort: int) -> None:
        """What each part asks for."""
        for part in self.routes.values():
            part.fits(cohort)

    def deployed(self) -> Routed:
        """The parts as they run between machines."""
        return replace(self, routes={pattern: part.deployed() for pattern, part in self.routes.items()})

    def init(self, shared: Tensors) -> Tensors:
        """Each part's state under its number."""
        return {n: t for i, part in enumerate(self.routes.values()) for n, t in prefixed(part.init(shared), f"{i}/").items()}

    def publish(self, params: Tensors, clients: int) -> Tensors:
        """What the parts publish."""
        return {n: t for part in self.routes.values() for n, t in part.publish(params, clients).items()}

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """The parts' steps side by side."""
        step: Tensors = {}
        after: Tensors = {}
        left = dict(update.payload)
        for i, (pattern, part) in enumerate(self.routes.items()):
            mine = {n: left.pop(n) for n in list(left) if matches(n, (pattern,))}
            if mine:
                got, kept = part(replace(update, payload=mine), server, under(state, f"{i}/"))
                step |= got
                after |= prefixed(kept, f"{i}/")
        return step, after


def _others(update: Update) -> Tensors:
    """The weighted mean of everything that is not a LoRA factor."""
    rest = {n: t for n, t in update.payload.items() if not n.endswith((A, B))}
    return weighted_mean(replace(update, payload=rest))


def mean_product(update: Update, server: Server, layer: str) -> Tensor:
    """``sum_k w_k B_k A_k`` (out, in) of one layer."""
    b, a = lowrank.stacked(update.shares, *trained(update, server, layer))
    return b @ a


def factored(product: Tensor, old_b: Tensor, old_a: Tensor) -> tuple[Tensor, Tensor]:
    """Deltas (out, r), (r, in) that take factors to the truncated SVD of a dense product (out, in), see `ProductSVD`."""
    u, s, vh = torch.linalg.svd(product, full_matrices=False)
    return _cut(u, s, vh, old_b, old_a)


def _cut(u: Tensor, s: Tensor, vh: Tensor, old_b: Tensor, old_a: Tensor) -> tuple[Tensor, Tensor]:
    r = min(old_a.shape[0], len(s))
    sign = torch.sign(vh[:r].gather(1, vh[:r].abs().argmax(1, keepdim=True)))
    root = s[:r].sqrt()
    new_b, new_a = torch.zeros_like(old_b), torch.zeros_like(old_a)
    new_b[:, :r], new_a[:r] = u[:, :r] * sign.T * root, root[:, None] * sign * vh[:r]
    return new_b - old_b, new_a - old_a


@dataclass(frozen=True)
class ProductSVD(Aggregate):
    """FlexLoRA: average the products, cut the mean back to factors by SVD; singular values go half to each factor.

    The sign of every singular pair is fixed by the largest entry of its right vector, so that the result does not depend on the
    linear algebra library (derived).
    """

    needs = frozenset({"individual"})
    travels = FACTORS

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """The step that takes the shared factors to the truncated SVD of the mean product."""
        step = _others(update)
        for layer in layers(update.payload):
            found = lowrank.svd(*lowrank.stacked(update.shares, *trained(update, server, layer)))
            step[layer + B], step[layer + A] = _cut(*found, server.shared[layer + B], server.shared[layer + A])
        return step, state


@dataclass(frozen=True)
class ByNorm(Aggregate):
    """HetLoRA: pad factors of different ranks with zeros, weigh each client by the norm of its product (sparsity weighting)."""

    needs = frozenset({"individual"})
    travels = FACTORS

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """Weights per layer ``||B_k A_k|| / sum_j ||B_j A_j||``."""
        step = _others(update)
        for layer in layers(update.payload):
            b, a = trained(update, server, layer)
            weight = lowrank.norm(b, a)
            weight = torch.where(weight.sum() > 0, weight / weight.sum(), update.shares)
            for name, factor in ((layer + A, a), (layer + B, b)):
                if name in update.payload:
                    step[name] = torch.tensordot(weight, factor, dims=1) - server.shared[name]
        return step, state


@dataclass(frozen=True)
class IntoBase(Aggregate):
    """Add exact low-rank updates to a dense base delta that everybody holds; keep this round's factors for the downlink.

    ``residual`` False: the whole mean product goes into the base (FLoRA stacking, with `Restart` of the factors).  True: the factors
    are averaged and only what averaging lost goes into the base (FedEx-LoRA).  The adapter's scale is not applied: base deltas are in
    units of B A, like the factors.
    """

    residual: bool = False
    needs = frozenset({"individual"})
    travels = FACTORS

    @property
    def offers(self) -> frozenset[str]:
        """Whether the factors themselves were merged, so that they may start afresh."""
        return frozenset() if self.residual else frozenset({"merged"})

    def publish(self, params: Tensors, clients: int) -> Tensors:
        """One dense delta (out, in) for each layer."""
        return {f"{n}.delta": params[n + B].new_zeros(params[n + B].shape[0], params[n + A].shape[1]) for n in layers(params)}

    def factors(self, update: Update, server: Server, layer: str) -> tuple[Tensor, Tensor]:
        """Each client's factors after local work: b (K, out, r), a (K, r, in)."""
        return trained(update, server, layer)

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """State: the factors of the last step of each base delta, ``stack_b`` (out, m) and ``stack_a`` (m, in)."""
        step = _others(update)
        stacks: Tensors = {}
        averaged = weighted_mean(update) if self.residual else {}
        for layer in layers(update.payload):
            b, a = lowrank.stacked(update.shares, *self.factors(update, server, layer))
            if update.rank is not None:  # what lies beyond a client's rank is zero and need not travel
                used = (torch.arange(a.shape[0] // len(update.rank)) < update.rank[:, None]).flatten()
                b, a = b[:, used], a[used]
            if self.residual:
                step |= {layer + f: averaged[layer + f] for f in (A, B) if layer + f in averaged}
                mean_b = server.shared[layer + B] + averaged.get(layer + B, 0.0)
                mean_a = server.shared[layer + A] + averaged.get(layer + A, 0.0)
                b, a = torch.cat([b, -mean_b], 1), torch.cat([a, mean_a], 0)
            stacks |= {f"{layer}.stack_b": b, f"{layer}.stack_a": a}
            step[f"{layer}.delta"] = b @ a
        return step, stacks
