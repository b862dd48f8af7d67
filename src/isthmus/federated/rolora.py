"""RoLoRA (Chen et al., 2025): train and average B in one round and A in the next; the other factor is common, so averaging is exact."""

from __future__ import annotations

from dataclasses import replace

from ..core.types import CompositionError, Method, Share
from ..parts.share import Both, Rotating
from .ffa_lora import training_only


def alternating(base: Method, turns: Share) -> Method:
    """Only the factor whose turn it is trains and travels; the other is the same on all clients."""
    if "drawn" in base.aggregate.offers:
        raise CompositionError(f"method {base.name}: A is drawn and never trained, so the factors cannot take turns")
    return replace(training_only(base, turns), share=Both(base.share, turns))


def rolora(base: Method) -> Method:
    """RoLoRA: train and share B in one round, A in the next; B first, since A has no gradient while B is 0."""
    turns = Rotating((("*.lora_b",), ("*.lora_a",)))
    return alternating(base, turns)
