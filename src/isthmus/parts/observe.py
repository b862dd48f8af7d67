"""Numbers for the ledger that need one round's updates."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..core.types import Observer, Server, Update
from .aggregate import mean_product, weighted_mean
from .factors import A, B, layers


@dataclass(frozen=True)
class AggregationError(Observer):
    """How far averaging factors is from averaging products, relative: ||mean(BA) - mean(B) mean(A)|| / ||mean(BA)|| over all layers."""

    needs = frozenset({"individual"})

    def __call__(self, update: Update, before: Server, after: Server) -> dict[str, float]:
        """Nothing where no factors travel."""
        factors = {n: t for n, t in update.payload.items() if n.endswith((A, B))}
        averaged, lost, whole = weighted_mean(replace(update, payload=factors)), 0.0, 0.0
        for layer in layers(factors):
            if layer + A not in before.shared or layer + B not in before.shared:
                continue
            product = mean_product(update, before, layer)
            b = before.shared[layer + B] + averaged.get(layer + B, 0.0)
            a = before.shared[layer + A] + averaged.get(layer + A, 0.0)
            lost += float((product - b @ a).square().sum())
            whole += float(product.square().sum())
        return {"aggregation_error": (lost / whole) ** 0.5} if whole else {}


@dataclass(frozen=True)
class UpdateNorm(Observer):
    """Length of the mean update, and the dispersion of the clients' around it."""

    needs = frozenset({"individual"})

    def __call__(self, update: Update, before: Server, after: Server) -> dict[str, float]:
        """``dispersion`` = sum_k w_k ||d_k - mean||^2 / ||mean||^2."""
        update = replace(update, payload={n: t for n, t in update.payload.items() if t.is_floating_point()})
        mean = weighted_mean(update)
        square = sum(float(m.square().sum()) for m in mean.values())
        spread = sum(float((update.shares * (t - mean[n]).reshape(len(t), -1).square().sum(1)).sum()) for n, t in update.payload.items())
        return {"update_norm": square**0.5, "dispersion": spread / square} if square else {}
