"""FFA-LoRA (Sun et al., ICLR 2024): A is random, common and frozen; only B trains and travels, so averaging is exact."""

from __future__ import annotations

from dataclasses import replace

from ..core.types import CompositionError, Method, Share
from ..parts.share import Both, ByName, Except
from ..parts.work import LocalTraining

_A = ("*.lora_a",)


def training_only(base: Method, trains: Share) -> Method:
    """The base with only those of its names trained that ``trains`` has too."""
    if not isinstance(base.work, LocalTraining):
        raise CompositionError(f"method {base.name}: needs local training; its work is {type(base.work).__name__}")
    return replace(base, work=replace(base.work, trains=Both(base.work.trains, trains)))


def ffa_lora(base: Method) -> Method:
    """FFA-LoRA: A frozen and common, B trained and shared; half the uplink where layers are square."""
    return replace(training_only(base, ByName(but=_A)), share=Except(base.share, _A))
