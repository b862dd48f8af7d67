"""FedUCA: the server weighs clients so that they want to stay (arXiv 2605.18020).

Each client reports only its surplus s_k: its utility (minus loss) less its threshold.  The server would maximise the common objective under E[s_k] >= 0.

"primal_dual": a multiplier for each constraint, lambda_k <- max(0, lambda_k - eta s_k) where client k took part, and weights in proportion to
n_k (1 + lambda_k): who is behind counts for more, round after round, until it is not.

"projection": weights for this round alone.  With the updates Delta_k after n_k steps of rate r, gradients are -Delta_k / (r n_k), and the surplus after a step
sum_j a_j Delta_j rises by about (M a)_k, M_kj = <Delta_k, Delta_j> / (r n_k).  The weights closest to FedAvg's p that leave nobody behind are

    min_a KL(a || p) + rho sum_k xi_k   so that   (M a)_k >= target_k - xi_k,   a a distribution, xi >= 0,

where a dissatisfied client is to win back the share ``gap`` of what it lacks (target -gap s_k) and a satisfied one may lose no more than it has (-s_k).  The dual is
smooth in 0 <= lambda <= rho: a_j is proportional to p_j exp((M' lambda)_j).  What cannot be met shows as ``slack`` in the ledger.

With ``draw`` the mean is over that many clients drawn with replacement by the weights, which is unbiased for it.  Of the source only abstract and introduction could
be read; both forms are derived.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

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

Rule = Literal["primal_dual", "projection"]
MULTIPLIERS, MOST = "uca.multipliers", 1e3


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
    rule: Rule = "primal_dual"
    eta: float = 1.0
    gap: float = 0.5
    rho: float = 10.0
    draw: int | None = None
    needs = frozenset({"individual"})

    def init(self, shared: Tensors) -> Tensors:
        """Nothing was solved yet; ``multipliers`` (clients,) has its length from the first round on."""
        return {"uca.slack": torch.zeros(()), "uca.multiplier": torch.zeros(()), MULTIPLIERS: torch.zeros(0)}

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """The mean of what trains, by the weights found."""
        kept = state[MULTIPLIERS] if len(state[MULTIPLIERS]) else torch.zeros(len(server.seen))
        if self.rule == "projection":
            weight, multiplier, slack = self._projected(update)
        else:
            own = (kept[update.client] - self.eta * update.payload[SURPLUS]).clamp(0, MOST)
            kept = kept.index_copy(0, update.client, own)
            weight, multiplier, slack = update.weight * (1 + own), own.numpy(), np.zeros(0)
        if self.draw is not None:
            g = generator(server.seed, server.round, "feduca")
            drawn = torch.multinomial((weight / weight.sum()).double(), self.draw, True, generator=g)
            weight = torch.bincount(drawn, minlength=len(weight)).to(update.weight.dtype)
        step, _ = WeightedMean()(replace(update, weight=weight), server, {})
        return step, {"uca.slack": _scalar(slack), "uca.multiplier": _scalar(multiplier), MULTIPLIERS: kept}

    def _projected(self, update: Update) -> tuple[Tensor, np.ndarray, np.ndarray]:
        flat = torch.cat(
            [t.reshape(len(update.weight), -1).double() for n, t in update.payload.items() if not n.startswith("rational.")], 1
        )
        steps = update.report.get("steps", torch.ones_like(update.weight)).double().clamp_min(1)
        m = (flat @ flat.mT / (self.lr * steps[:, None])).numpy()
        surplus = update.payload[SURPLUS].double().numpy()
        target = np.where(surplus < 0, -self.gap * surplus, -surplus)
        p = update.shares.double().numpy()
        a, multiplier, slack = constrained_weights(p, m, target, self.rho)
        return update.weight if a is p else torch.from_numpy(a).to(update.weight.dtype), multiplier, slack


def _scalar(x: np.ndarray) -> Tensor:
    return torch.tensor(float(x.max(initial=0.0)), dtype=torch.float32)


@dataclass(frozen=True)
class Feasibility(Observer):
    """The largest slack and multiplier of the round: slack above 0 says that no weights would have kept everybody."""

    def __call__(self, update: Update, before: Server, after: Server) -> dict[str, float]:
        """From the aggregate's state."""
        return {n.rpartition("uca.")[2]: float(t) for n, t in after.state.items() if "uca." in n and not n.endswith(MULTIPLIERS)}


def feduca(
    base: Method,
    thresholds: tuple[float, ...] = (1e9,),
    patience: int = 3,
    start: int = 0,
    rule: Rule = "projection",
    eta: float = 1.0,
    gap: float = 0.5,
    rho: float = 10.0,
    draw: int | None = None,
) -> Method:
    """FedUCA: weights that keep rational clients in; ``thresholds``: the loss that each puts up with, 1e9: any.

    ``rule`` "projection" kept more of them than "primal_dual" on digits (docs/feduca.md); with thresholds that hardly anybody can have met, neither helps.
    """
    if not isinstance(base.work, LocalTraining) or not isinstance(base.aggregate, WeightedMean):
        raise CompositionError("feduca: goes with local training and a mean of updates")
    if not 0 < gap <= 1 or rho <= 0 or eta <= 0 or (draw is not None and draw < 1):
        raise ValueError(
            f"feduca: gap = {gap!r} must be above 0 and at most 1, rho = {rho!r} and eta = {eta!r} above 0, draw = {draw!r} at least 1"
        )
    return replace(
        base,
        plugins=(*base.plugins, Rational(tuple(thresholds), patience, start)),
        aggregate=Staying(UtilityConstrained(base.work.lr, rule, eta, gap, rho, draw)),
        invite=Present(base.invite),
        observers=(*base.observers, Retention(), Feasibility()),
    )
