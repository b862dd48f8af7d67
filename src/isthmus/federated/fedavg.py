"""FedAvg (McMahan et al., AISTATS 2017): train locally, average what was learned, by number of examples.

On LoRA factors this is FedIT (Zhang et al., ICASSP 2024), which averages A and B separately: the mean of the products is not the
product of the means; the ledger's ``aggregation_error`` says how far they are apart.
"""

from __future__ import annotations

from ..core.types import Method, Work
from ..parts.aggregate import WeightedMean
from ..parts.apply import Add
from ..parts.invite import Uniform
from ..parts.observe import AggregationError, UpdateNorm
from ..parts.send import Changed
from ..parts.share import ByName
from ..parts.work import LocalTraining


def plain(work: Work | None = None, participation: float = 1.0) -> Method:
    """The method that all others are made of by `replace`."""
    return Method(
        name="fedavg",
        work=work or LocalTraining(),
        share=ByName(),
        aggregate=WeightedMean(),
        apply=Add(),
        invite=Uniform(participation),
        send=Changed(),
        observers=(UpdateNorm(), AggregationError()),
    )


def fedavg(base: Method) -> Method:
    """FedAvg: average by number of examples (on LoRA factors: FedIT)."""
    return base
