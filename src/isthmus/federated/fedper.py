"""FedPer (Arivazhagan et al., 2019): everything is shared but the head, which stays with each client."""

from __future__ import annotations

from dataclasses import replace

from ..core.types import Method
from ..parts.share import Except


def fedper(base: Method, private: tuple[str, ...] = ("head.*",)) -> Method:
    """``private``: patterns of names that stay."""
    return replace(base, share=Except(base.share, tuple(private)))
