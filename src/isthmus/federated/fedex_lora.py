"""FedEx-LoRA (Singhal et al., ACL 2025): average the factors and add what averaging lost, mean(BA) - mean(B) mean(A), to the base.

The residual travels as stacked factors of rank (K + 1) r, not as a dense matrix the size of the model.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.types import Method
from ..parts.aggregate import IntoBase
from ..parts.send import Stacks


def fedex_lora(base: Method) -> Method:
    """FedEx-LoRA: average the factors, and add what that lost to the base."""
    return replace(base, aggregate=IntoBase(residual=True), send=Stacks())
