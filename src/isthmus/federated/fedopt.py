"""FedAdam and FedYogi (Reddi et al., ICLR 2021): the mean update is a pseudo-gradient for an adaptive optimiser on the server."""

from __future__ import annotations

from dataclasses import replace

from ..core.types import Method
from ..parts.apply import Adaptive


def fedadam(base: Method, server_lr: float = 1e-2, tau: float = 1e-3) -> Method:
    """FedAdam: Adam on the server, with the mean update as its gradient."""
    return replace(base, apply=Adaptive("adam", server_lr, tau=tau))


def fedyogi(base: Method, server_lr: float = 1e-2, tau: float = 1e-3) -> Method:
    """FedYogi: Yogi on the server; its second moment changes by at most its own size."""
    return replace(base, apply=Adaptive("yogi", server_lr, tau=tau))
