"""FedUCA: the server weighs clients so that they want to stay (arXiv 2605.18020).

Each client reports only its surplus s_k: its utility (minus loss) less its threshold.  With the updates Delta_k after n_k steps of rate eta, and gradients
-Delta_k / (eta n_k), the surplus after a step sum_j a_j Delta_j rises by about (M a)_k, M_kj = <Delta_k, Delta_j> / (eta n_k).  The server
takes the weights closest to FedAvg's p that leave nobody behind,

    min_a KL(a || p) + rho sum_k xi_k   so that   (M a)_k >= target_k - xi_k,   a a distribution, xi >= 0,

where a dissatisfied client is to win back the share ``gap`` of what it lacks (target -gap s_k), and a satisfied one may lose no more than it has (target -s_k).  The dual
is smooth in 0 <= lambda <= rho: a_j is proportional to p_j exp((M' lambda)_j).  With ``draw`` the mean is over that many clients drawn with
replacement by a, which is unbiased for it.  A target that cannot be met shows as ``slack`` in the ledger.

Of the source only abstract and introduction could be read; this form of the problem and its solution are derived.  The first-order model is for SGD.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from ..core.seeds import generator
from ..core.tensors import Tensors
from ..core.types import Aggregate, CompositionError, Method, Observer, Server, Update
from ..parts.aggregate import WeightedMean
from ..parts.work import LocalTraining
from .rational import SURPLUS, Present, Rational, Retention, Staying


def constrained_weights(p: np.ndarray, m: np.ndarray, target: np.ndarray, rho: float = 10.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights a (K,), multipliers (K,) and slack (K,) of the problem above, for p (K,), M (K, K) and targets (K,); -inf: no constraint."""
    free = ~np.isfinite(target)
    bound = np.where(free, 0.0, rho)
    goal = np.where(free, 0.0, target)
    log = np.log(np.maximum(p, 1e-300))

    def dual(multiplier: np.ndarray) -> tuple[float, np.ndarray]:
        z = log + m.T @ multiplier
        top = z.max()
        total = np.exp(z - top).sum()
        return float(top + np.log(total) - goal @ multiplier), m @ (np.exp(z - top) / total) - goal

    if not bound.any():
        return p, np.zeros_like(p), np.zeros_like(p)
    found = scipy.optimize.minimize(
        dual,
        np.zeros_like(p),
        jac=True,
        method="L-BFGS-B",
        bounds=[(0.0, b) for b in bound],
        options={"ftol": 1e-14, "gtol": 1e-9, "maxiter": 1000},
    )
    if not found.x.any():
        return p, found.x, np.zeros_like(p)
    z = log + m.T @ found.x
    a = np.exp(z - z.max())
    a /= a.sum()
    return a, found.x, np.where(free, 0.0, np.maximum(goal - m @ a, 0.0))


@dataclass(frozen=True)
class UtilityConstrained(Aggregate):
    """FedAvg's mean with weights under constraints; ``slack`` and ``multiplier`` of the round are kept for the ledger."""

    lr: float
    gap: float = 0.5
    rho: float = 10.0
    draw: int | None = None
    needs = frozenset({"individual"})

    def init(self, shared: Tensors) -> Tensors:
        """Nothing was solved yet."""
        return {"uca.slack": torch.zeros(()), "uca.multiplier": torch.zeros(())}

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """The mean of what trains, by the weights found."""
        flat = torch.cat(
            [t.reshape(len(update.weight), -1).double() for n, t in update.payload.items() if not n.startswith("rational.")], 1
        )
        steps = update.report.get("steps", torch.ones_like(update.weight)).double().clamp_min(1)
        m = (flat @ flat.mT / (self.lr * steps[:, None])).numpy()
        surplus = update.payload[SURPLUS].double().numpy()
        target = np.where(surplus < 0, -self.gap * surplus, -surplus)
        p = update.shares.double().numpy()
        a, multiplier, slack = constrained_weights(p, m, target, self.rho)
        weight = update.weight if a is p else torch.from_numpy(a).to(update.weight.dtype)
        if self.draw is not None:
            g = generator(server.seed, server.round, "feduca")
            weight = torch.bincount(torch.multinomial(torch.from_numpy(a), self.draw, True, generator=g), minlength=len(a)).to(
                update.weight.dtype
            )
        step, _ = WeightedMean()(replace(update, weight=weight), server, {})
        return step, {"uca.slack": _scalar(slack), "uca.multiplier": _scalar(multiplier)}


def _scalar(x: np.ndarray) -> Tensor:
    return torch.tensor(float(x.max(initial=0.0)), dtype=torch.float32)


@dataclass(frozen=True)
class Feasibility(Observer):
    """The largest slack and multiplier of the round: slack above 0 says that no weights would have kept everybody."""

    def __call__(self, update: Update, before: Server, after: Server) -> dict[str, float]:
        """From the aggregate's state."""
        return {n.rpartition("uca.")[2]: float(t) for n, t in after.state.items() if "uca." in n}


def feduca(
    base: Method,
    thresholds: tuple[float, ...] = (1e9,),
    patience: int = 3,
    start: int = 0,
    gap: float = 0.5,
    rho: float = 10.0,
    draw: int | None = None,
) -> Method:
    """FedUCA: weights that keep rational clients in; ``thresholds``: the loss that each puts up with, 1e9: any."""
    if not isinstance(base.work, LocalTraining) or not isinstance(base.aggregate, WeightedMean):
        raise CompositionError("feduca: goes with local training and a mean of updates")
    if not 0 < gap <= 1 or rho <= 0 or (draw is not None and draw < 1):
        raise ValueError(f"feduca: gap = {gap!r} must be above 0 and at most 1, rho = {rho!r} above 0, draw = {draw!r} at least 1")
    return replace(
        base,
        plugins=(*base.plugins, Rational(tuple(thresholds), patience, start)),
        aggregate=Staying(UtilityConstrained(base.work.lr, gap, rho, draw)),
        invite=Present(base.invite),
        observers=(*base.observers, Retention(), Feasibility()),
    )
