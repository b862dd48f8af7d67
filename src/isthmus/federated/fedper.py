"""FedPer (Arivazhagan et al., 2019): everything is shared but the head, which stays with each client."""

from __future__ import annotations

from dataclasses import replace

from ..core.types import Method
from ..parts.share import Except


def fedper(base: Method, private: tuple[str, ...] = ("head.*",)) -> Method:
    """FedPer: the head (or what ``private`` names) stays with each client."""
    return replace(base, share=Except(base.share, tuple(private)))
