"""RoLoRA (Chen et al., 2025): train and average B in one round and A in the next; the other factor is common, so averaging is exact."""

from __future__ import annotations

from dataclasses import replace

from ..core.types import Method
from ..parts.share import Rotating
from .ffa_lora import training_only


def rolora(base: Method) -> Method:
    """B first: with B = 0 at the start, A has no gradient.  Everything that is not a factor trains in every round."""
    turns = Rotating((("*.lora_b",), ("*.lora_a",)))
    return replace(training_only(base, turns), share=turns)
