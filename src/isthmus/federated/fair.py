"""Two baselines that look after the clients who are served worst.

`qffl` (Li et al., ICLR 2020, q-FedAvg) minimises sum_k p_k F_k^(q+1) / (q + 1): with updates D_k = -delta_k / lr, estimated Lipschitz constant 1 / lr,

    step = -sum_k p_k F_k^q D_k / sum_k p_k (q F_k^(q-1) |D_k|^2 + F_k^q / lr),

which for q = 0 is FedAvg.  `afl` (Mohri et al., ICML 2019) gives clients the weights of an adversary, lambda <- lambda exp(eta F), normalised; F_k is client k's mean training
loss of the round, which it reports.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..core.tensors import Tensors
from ..core.types import Aggregate, CompositionError, Method, Server, Update
from ..parts.aggregate import WeightedMean
from ..parts.work import LocalTraining

ADVERSARY = "afl.log_weights"


def _loss(update: Update) -> torch.Tensor:
    return update.report["loss"].clamp_min(1e-8)


@dataclass(frozen=True)
class QFair(Aggregate):
    """q-FedAvg's step."""

    q: float
    lr: float
    needs = frozenset({"individual", "reported"})

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """Stateless."""
        loss, p = _loss(update).double(), update.shares.double()
        square = sum((t.reshape(len(t), -1).double().square().sum(1) for t in update.payload.values()), torch.zeros(())) / self.lr**2
        h = p * (self.q * loss ** (self.q - 1) * square + loss**self.q / self.lr)
        weight = p * loss**self.q / self.lr / h.sum()
        return {n: torch.tensordot(weight.to(t.dtype), t, dims=1) for n, t in update.payload.items()}, state


@dataclass(frozen=True)
class Adversarial(Aggregate):
    """FedAvg's mean by an adversary's weights, which start at those of the examples and remember every client."""

    eta: float
    needs = frozenset({"individual", "reported"})

    def init(self, shared: Tensors) -> Tensors:
        """``log_weights`` (clients,) has its length from the first round on."""
        return {ADVERSARY: torch.zeros(0)}

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """The step with the weights before this round's losses; then the adversary moves."""
        log = state[ADVERSARY] if len(state[ADVERSARY]) else torch.full((len(server.seen),), torch.nan)
        mine = log[update.client]
        mine = torch.where(mine.isnan(), update.weight.log(), mine)
        step, _ = WeightedMean()(replace(update, weight=mine.softmax(0)), server, {})
        log = log.index_copy(0, update.client, mine + self.eta * _loss(update))
        return step, {ADVERSARY: log - log.nan_to_num(-torch.inf).amax()}


def qffl(base: Method, q: float = 1.0) -> Method:
    """q-FFL: clients with a large loss count for more; q = 0: FedAvg."""
    if q < 0:
        raise ValueError(f"qffl: q = {q!r}: must be at least 0")
    if not isinstance(base.work, LocalTraining) or not isinstance(base.aggregate, WeightedMean):
        raise CompositionError("qffl: goes with local training and a mean of updates")
    return replace(base, aggregate=QFair(q, base.work.lr))


def afl(base: Method, eta: float = 0.1) -> Method:
    """AFL: an adversary chooses the clients' weights, for the worst-served ones; eta = 0: FedAvg."""
    if eta < 0:
        raise ValueError(f"afl: eta = {eta!r}: must be at least 0")
    if not isinstance(base.aggregate, WeightedMean):
        raise CompositionError("afl: goes with a mean of updates")
    return replace(base, aggregate=Adversarial(eta))
