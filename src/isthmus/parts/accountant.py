"""How much privacy a number of noisy rounds has cost (accountants of the package dp-accounting)."""

from __future__ import annotations

import math
from functools import cache


class AccountantError(RuntimeError):
    """No accountant is installed."""


@cache
def epsilon(noise: float, fraction: float, rounds: int, delta: float) -> float:
    """epsilon at ``delta`` of ``rounds`` Gaussian releases.

    Args:
        noise: standard deviation over sensitivity.
        fraction: chance that a client takes part in a round (Poisson sampling); 1: everybody always.
        rounds: releases so far.
        delta: of the guarantee; neighbours differ by one client that is added or removed.

    Raises:
        AccountantError: the package is not installed.
    """
    if not rounds:
        return 0.0
    if noise <= 0:
        return math.inf
    try:
        import dp_accounting
        from dp_accounting import pld
    except ImportError:
        raise AccountantError("privacy accounting needs the package dp-accounting: pip install 'isthmus[privacy]'") from None
    event = dp_accounting.GaussianDpEvent(noise)
    event = event if fraction == 1 else dp_accounting.PoissonSampledDpEvent(fraction, event)
    # the exact distribution takes memory that grows with 1 / noise; where there is that little noise, a bound will do
    if noise >= 0.3:
        accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-3)
    else:
        accountant = dp_accounting.rdp.RdpAccountant()
    return float(accountant.compose(event, rounds).get_epsilon(delta))
