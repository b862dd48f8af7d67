"""FedLoVA: LoRA on query and value, both trained by every client; only the value projection's factors travel.

The source observes that the value projection settles much earlier than the query projection, so the query's factors stay with
the client.  No public text of it was found: that a client keeps them from round to round, and that the aggregated model has the
query's factors at their start (B = 0), is derived.  ``evaluate.products`` puts the observation itself into the ledger.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.types import CompositionError, Method
from ..parts.factors import FACTORS
from ..parts.share import Except


def fedlova(base: Method, share: tuple[str, ...] = ("value",)) -> Method:
    """FedLoVA: query and value trained, only the value projection's factors shared; ``share`` names other roles."""
    if not share:
        raise CompositionError("fedlova: share = []: name at least one role, such as value")
    return replace(base, share=Except(base.share, FACTORS, but=tuple(f"*.{role}.*" for role in share)))
