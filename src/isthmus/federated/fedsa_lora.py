"""FedSA-LoRA (Guo et al., ICLR 2025): A and B train, only A (what is general) travels; B stays with each client.

The head follows the base method (shared unless `fedper` joins), so that a global model exists (derived).
"""

from __future__ import annotations

from dataclasses import replace

from ..core.types import Method
from ..parts.share import Except


def fedsa_lora(base: Method) -> Method:
    """FedSA-LoRA: A and B trained, A shared, B private."""
    return replace(base, share=Except(base.share, ("*.lora_b",)))
