"""RoLoRA (Chen et al., 2025): train and average B in one round and A in the next; the other factor is common, so averaging is exact."""

from __future__ import annotations

from dataclasses import replace

from ..core.types import Method
from ..parts.share import Rotating
from .ffa_lora import training_only


def rolora(base: Method) -> Method:
    """RoLoRA: train and share B in one round, A in the next; B first, since A has no gradient while B is 0."""
    turns = Rotating((("*.lora_b",), ("*.lora_a",)))
    return replace(training_only(base, turns), share=turns)
