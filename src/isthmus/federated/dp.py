"""Central differential privacy for clients: every update is clipped, the server's mean is noised, an accountant counts (DP-FedAvg, McMahan et al., ICLR 2018).

The unit is a client: two federations are neighbours when one client is in one of them only.  Every client takes part with chance q,
independently (Poisson sampling), and the sum is divided by the expected number q K, so that its sensitivity is ``clip`` whoever comes.  With
``quantile`` the bound follows that quantile of the clients' lengths (Andrew et al., NeurIPS 2021); a part of the noise then goes to the
count of clients below it.  Where a method aggregates products of factors (FlexLoRA), clipping and noise go to the products: noise on the
factors would be multiplied by the factors, and by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..core import seeds
from ..core.rounds import Finished
from ..core.types import CompositionError, Invite, Method, Observer, Server, Update
from ..parts.accountant import epsilon
from ..parts.aggregate import ProductSVD, WeightedMean
from ..parts.channels.privacy import CLIP, Clip, Silent
from ..parts.invite import Uniform
from ..parts.noise import Bound, NoisyMean, NoisyProducts, rounds_of


@dataclass(frozen=True)
class Cost:
    """What a run of rounds costs: the accountant's arguments but the number of rounds."""

    noise: float
    fraction: float
    delta: float

    def __call__(self, rounds: int) -> float:
        """epsilon after so many rounds."""
        return epsilon(self.noise, self.fraction, rounds, self.delta)


@dataclass(frozen=True)
class Poisson(Invite):
    """Every client with chance ``fraction``, at least one; refuses a round that would go beyond the budget."""

    fraction: float
    loss: Cost
    budget: float | None = None

    def expected(self, clients: int) -> int:
        """On average."""
        return max(1, round(self.fraction * clients))

    def __call__(self, server: Server) -> list[int]:
        """Ascending client numbers; the run ends here once the budget is spent."""
        spent = rounds_of(server)
        if self.budget is not None and not spent and self.loss(1) > self.budget:
            raise ValueError(f"dp: budget = {self.budget:g}: one round costs epsilon = {self.loss(1):.2f} already; raise noise")
        if self.budget is not None and self.loss(spent + 1) > self.budget:
            raise Finished(
                f"privacy: {spent} rounds cost epsilon = {self.loss(spent):.2f}; another would cost {self.loss(spent + 1):.2f} of {self.budget:g}"
            )
        drawn = torch.rand(len(server.seen), generator=seeds.generator(server.seed, server.round, "poisson"))
        chosen = (drawn < self.fraction).nonzero().flatten().tolist()
        return chosen or [int(drawn.argmin())]


@dataclass(frozen=True)
class Spent(Observer):
    """epsilon so far, for the ledger."""

    loss: Cost
    relies = frozenset({"accounted"})

    def __call__(self, update: Update, before: Server, after: Server) -> dict[str, float]:
        """With the bound, where it moves.

        That a round which nobody was drawn for invites one client instead shifts the result by at most the chance of that, which goes
        into delta: + rounds (1 + e^epsilon) (1 - q)^K.
        """
        rounds = rounds_of(after)
        spent, empty = self.loss(rounds), (1 - self.loss.fraction) ** len(after.seen)
        delta = min(1.0, self.loss.delta + rounds * empty * (1 + math.exp(min(spent, 700.0))))
        more = {"clip": float(after.shared[CLIP])} if CLIP in after.shared else {}
        return {"epsilon": spent, "delta": delta} | more


def dp(
    base: Method, clip: float = 1.0, noise: float = 1.0, delta: float = 1e-5, budget: float | None = None, quantile: float | None = None
) -> Method:
    """Central DP for clients: clip, mean with noise, epsilon in the ledger; the run ends before it exceeds ``budget``."""
    for name, value, fine in (("clip", clip, clip > 0), ("noise", noise, noise >= 0), ("delta", delta, 0 < delta < 1)):
        if not fine:
            raise ValueError(f"dp: {name} = {value!r}: clip must be above 0, noise at least 0, delta between 0 and 1")
    if quantile is not None and not (0 < quantile < 1 and noise > 0):
        raise ValueError(f"dp: quantile = {quantile!r}: must be between 0 and 1, with noise above 0")
    if not isinstance(base.invite, Uniform):
        raise CompositionError("dp: the method invites clients in its own way, for which the accountant has no bound")
    fraction = base.invite.fraction
    loss = Cost(noise, fraction, delta)
    products = isinstance(base.aggregate, ProductSVD)
    if not products and not isinstance(base.aggregate, WeightedMean):
        raise CompositionError(
            f"dp: the sensitivity of {type(base.aggregate).__name__} is not known; dp goes with a mean of updates, or of products"
        )
    if products and quantile is not None:
        raise CompositionError("dp: the bound of products does not adapt; leave quantile out")
    noisy = NoisyProducts if products else NoisyMean
    observers: Sequence[Observer] = [o for o in base.observers if "individual" not in o.needs]
    return replace(
        base,
        aggregate=noisy(base.aggregate, clip, noise, fraction, quantile),
        invite=Poisson(fraction, loss, budget),
        plugins=(*base.plugins, *([Bound(clip)] if quantile is not None else [])),
        channels=(*base.channels, Silent() if products else Clip(clip)),
        observers=(*observers, Spent(loss)),
    )
