"""FLoRA-Chef: each round trains and aggregates one of the factors A and B; which one, and with what weights, follows the clients.

FLFire chooses the factor by how much the clients' updates of it disagree; FLSauce weighs the clients' updates of A by how much they
add to the others', and those of B by how ordinary their length is.  The other factor is common in that round, so the aggregated
product is exactly the weighted mean of products.  No public text of the source was found: both rules are derived from its abstract.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..core.tensors import Tensors, matches, prefixed, under
from ..core.types import Aggregate, CompositionError, Method, Observer, Send, Server, Update
from ..parts.aggregate import WeightedMean, Wrapped
from ..parts.factors import FACTORS, A, B
from ..parts.send import kept
from ..parts.share import Directed
from .rolora import alternating

Rule = Literal["lowest", "highest", "alternate"]
_WORD, _SIDES = "factor", ("*" + B, "*" + A)  # B first: A has no gradient while B is 0


@dataclass(frozen=True)
class Dispersion(Wrapped):
    """Another aggregate that also keeps how far clients disagree about each factor.

    State: ``dispersion`` (2,), an exponential mean of ``sum_k w_k ||d_k - mean||^2 / ||mean||^2`` for B and A; ``run`` (2,), for how
    many rounds in a row each was trained, 0 for the one that was not; ``seen`` (2,), in how many rounds at all.
    """

    base: Aggregate
    keep: float = 0.7

    needs = frozenset({"individual"})
    travels = FACTORS
    adds = frozenset({"dispersion"})

    def init(self, shared: Tensors) -> Tensors:
        """Nothing seen."""
        return prefixed(self.base.init(shared), "base/") | {n: torch.zeros(2) for n in ("dispersion", "run", "seen")}

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """The base's step."""
        step, kept = self.base(update, server, under(state, "base/"))
        dispersion, run, seen = (state[n].clone() for n in ("dispersion", "run", "seen"))
        for side, pattern in enumerate(_SIDES):
            mine = {n: t.flatten(1) for n, t in update.payload.items() if matches(n, (pattern,))}
            if not mine:
                run[side] = 0
                continue
            whole = torch.cat(list(mine.values()), 1)
            mean = update.shares @ whole
            now = (update.shares * (whole - mean).square().sum(1)).sum() / (mean.square().sum() + 1e-12)
            dispersion[side] = now if not seen[side] else self.keep * dispersion[side] + (1 - self.keep) * now
            run[side], seen[side] = run[side] + 1, seen[side] + 1
        return step, prefixed(kept, "base/") | {"dispersion": dispersion, "run": run, "seen": seen}


@dataclass(frozen=True)
class Turns(Observer):
    """``dispersion_b`` and ``dispersion_a`` as kept, and whose turn the round was (``turn_of_a`` 0 or 1), for the ledger."""

    relies = frozenset({"dispersion"})

    def __call__(self, update: Update, before: Server, after: Server) -> dict[str, float]:
        """From the aggregate's state."""
        b, a = kept(after, "dispersion")[0].tolist()
        return {"dispersion_b": b, "dispersion_a": a, "turn_of_a": float(kept(after, "run")[0][1] > 0)}


@dataclass(frozen=True)
class Fire(Send):
    """The directive ``factor`` of each round.

    Both factors take a turn first; then the rule decides, "lowest" or "highest" dispersion, or "alternate".  It changes only where the
    other factor's dispersion is beyond ``margin`` times the present one's, and after ``patience`` rounds in a row in any case.
    """

    rule: Rule = "lowest"
    margin: float = 1.1
    patience: int = 2
    relies = frozenset({"dispersion"})

    def directive(self, server: Server) -> dict[str, str]:
        """Which factor trains and travels."""
        return {_WORD: _SIDES[self._side(*(kept(server, n)[0] for n in ("run", "seen", "dispersion")))]}

    def _side(self, run: Tensor, seen: Tensor, dispersion: Tensor) -> int:
        if not bool(seen.all()) or self.rule == "alternate":
            return int(seen.sum()) % 2
        last = int(run.argmax())
        if run[last] >= self.patience:
            return 1 - last
        mine, other = float(dispersion[last]), float(dispersion[1 - last])
        better = other * self.margin < mine if self.rule == "lowest" else other > mine * self.margin
        return 1 - last if better else last


def spread_weights(flat: Tensor, shares: Tensor, strength: float) -> Tensor:
    """Weights (K,) for updates (K, P) of A: ``n_k exp(-strength mean_j cos(d_k, d_j))``, so that near-copies do not dominate."""
    unit = flat / flat.norm(dim=1, keepdim=True).clamp_min(1e-12)
    others = max(1, len(flat) - 1)
    cosine = (unit @ unit.sum(0) - unit.square().sum(1)) / others
    return _normalised(shares * torch.exp(-strength * (cosine - cosine.max())))


def stable_weights(flat: Tensor, shares: Tensor, strength: float) -> Tensor:
    """Weights (K,) for updates (K, P) of B: ``n_k exp(-strength d_k)``, d_k = | ||d_k|| - median | / median absolute deviation."""
    length = flat.norm(dim=1)
    off = (length - length.median()).abs()
    deviation = off.median().clamp_min(1e-6 * length.median()).clamp_min(1e-12)
    return _normalised(shares * torch.exp(-strength * off / deviation))


def _normalised(weight: Tensor) -> Tensor:
    return weight / weight.sum()


@dataclass(frozen=True)
class Sauce(Aggregate):
    """Weighted mean with weights of their own for each factor of each layer; all else by number of examples.

    ``diversity`` 0 and ``stability`` 0 is the ordinary mean, bit for bit.
    """

    diversity: float = 1.0
    stability: float = 0.5
    needs = frozenset({"individual"})
    travels = ("*.lora_?",)

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """Stateless."""
        step: Tensors = {}
        for n, t in update.payload.items():
            weight = update.shares
            if n.endswith(A) and self.diversity:
                weight = spread_weights(t.flatten(1), weight, self.diversity)
            elif n.endswith(B) and self.stability:
                weight = stable_weights(t.flatten(1), weight, self.stability)
            step[n] = torch.tensordot(weight.to(t.dtype), t, dims=1)
        return step, state


def flsauce(base: Method, diversity: float = 1.0, stability: float = 0.5) -> Method:
    """FLSauce alone: weights for A by diversity, for B by stability."""
    for name, value in (("diversity", diversity), ("stability", stability)):
        if value < 0:
            raise ValueError(f"flsauce: {name} = {value!r}: must be at least 0")
    if not isinstance(base.aggregate, WeightedMean):
        raise CompositionError(f"method {base.name}: flsauce weighs a mean of factors; {type(base.aggregate).__name__} is none")
    return replace(base, aggregate=Sauce(diversity, stability))


def flfire(base: Method, rule: Rule = "lowest", margin: float = 1.1, patience: int = 2) -> Method:
    """FLFire alone: one factor a round, chosen by how much clients disagree about it; "alternate" is RoLoRA."""
    if margin < 1 or patience < 1:
        raise ValueError(f"flfire: margin = {margin!r} and patience = {patience!r}: both must be at least 1")
    turns = Directed(_WORD, _SIDES)
    return replace(
        alternating(base, turns),
        aggregate=Dispersion(base.aggregate),
        send=Fire(rule, margin, patience),
        observers=(*base.observers, Turns()),
    )


def flora_chef(
    base: Method, rule: Rule = "lowest", margin: float = 1.1, patience: int = 2, diversity: float = 1.0, stability: float = 0.5
) -> Method:
    """FLoRA-Chef: one factor a round, chosen by dispersion (FLFire), with weights of its own (FLSauce)."""
    return flfire(flsauce(base, diversity, stability), rule, margin, patience)
