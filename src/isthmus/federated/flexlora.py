"""FlexLoRA (Bai et al., NeurIPS 2024): average the products, cut the mean back to factors by SVD, give each client its rank's part."""

from __future__ import annotations

from dataclasses import replace

from ..core.types import Method
from ..parts.aggregate import ProductSVD


def flexlora(base: Method) -> Method:
    """FlexLoRA: average the products, cut the mean to each client's rank by SVD."""
    return replace(base, aggregate=ProductSVD())
