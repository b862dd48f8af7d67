"""The two reference lines: what a client reaches alone, and what all data in one place would reach."""

from __future__ import annotations

from dataclasses import replace

from ..core.types import Method
from ..parts.share import ByName


def local(base: Method) -> Method:
    """Reference line: every client trains alone for as many rounds; nothing travels."""
    return replace(base, share=ByName(()))


def pooled(base: Method) -> Method:
    """All clients' data at one client, for as many rounds: what federation is measured against."""
    return replace(base, pooled=True)
