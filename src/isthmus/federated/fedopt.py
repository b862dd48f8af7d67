"""FedAdam and FedYogi (Reddi et al., ICLR 2021): the mean update is a pseudo-gradient for an adaptive optimiser on the server."""

from __future__ import annotations

from dataclasses import replace

from ..core.types import Method
from ..parts.apply import Adaptive


def fedadam(base: Method, server_lr: float = 1e-2, tau: float = 1e-3) -> Method:
    """Adam on the server."""
    return replace(base, apply=Adaptive("adam", server_lr, tau=tau))


def fedyogi(base: Method, server_lr: float = 1e-2, tau: float = 1e-3) -> Method:
    """Yogi on the server: the second moment changes by at most its own size."""
    return replace(base, apply=Adaptive("yogi", server_lr, tau=tau))
