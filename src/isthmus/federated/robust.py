"""Robust aggregation as a change of any method: ``method.kind = "fedavg+median"``.  The rules are in `parts.robust`."""

from __future__ import annotations

from dataclasses import replace

from ..core.types import Method
from ..parts.robust import Bulyan, GeometricMedian, Guarded, Median, MultiKrum, NormBound, Rule, Space, TrimmedMean


def _guarded(base: Method, rule: Rule) -> Method:
    return replace(base, aggregate=Guarded(rule, base.aggregate))


def norm_bound(base: Method, most: float | None = None, space: Space = "factors") -> Method:
    """No update longer than ``most``; without it, than the median length of the round's."""
    if most is not None and most <= 0:
        raise ValueError(f"norm_bound: most = {most!r}: must be above 0")
    return _guarded(base, NormBound(0, space, most))


def krum(base: Method, attackers: int = 1, keep: int = 1, space: Space = "factors") -> Method:
    """Krum: only the update that is closest to its neighbours counts, or the ``keep`` closest."""
    if keep < 1:
        raise ValueError(f"krum: keep = {keep!r}: must be at least 1")
    return _guarded(base, MultiKrum(attackers, space, keep))


def multi_krum(base: Method, attackers: int = 1, space: Space = "factors") -> Method:
    """Multi-Krum: the ``attackers`` updates that are farthest from their neighbours do not count."""
    return _guarded(base, MultiKrum(attackers, space))


def bulyan(base: Method, attackers: int = 1, space: Space = "factors") -> Method:
    """Bulyan: Krum chooses, then a trimmed mean of every entry; at least 4 f + 3 clients a round."""
    return _guarded(base, Bulyan(attackers, space))


def median(base: Method, space: Space = "factors") -> Method:
    """The median of every entry."""
    return _guarded(base, Median(0, space))


def trimmed_mean(base: Method, attackers: int = 1, space: Space = "factors") -> Method:
    """The mean of every entry without its ``attackers`` largest and smallest values."""
    return _guarded(base, TrimmedMean(attackers, space))


def geometric_median(base: Method, space: Space = "factors") -> Method:
    """The geometric median of the updates, for any aggregate that is a weighted mean of something."""
    return _guarded(base, GeometricMedian(0, space))
