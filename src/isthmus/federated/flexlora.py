"""FlexLoRA (Bai et al., NeurIPS 2024): average the products, cut the mean back to factors by SVD, give each client its rank's part."""

from __future__ import annotations

from dataclasses import replace

from ..core.types import Method
from ..parts.aggregate import ProductSVD


def flexlora(base: Method) -> Method:
    """Singular values come in falling order, so a client of rank r gets the best r directions."""
    return replace(base, aggregate=ProductSVD())
