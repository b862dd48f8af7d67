"""Fewer bits for each number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ...core.tensors import Tensors, tmap
from ...core.types import Channel, Inbox
from ...core.wire import Schema

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Cast(Channel):
    """Floating tensors travel in another dtype: "bf16", "fp16" or "fp32" (which changes nothing)."""

    dtype: Literal["fp32", "fp16", "bf16"] = "bf16"
    feedback: bool = False
    name = "cast"
    needs = frozenset({"unbound"})
    takes = frozenset({"exact"})

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"channel cast: dtype = {self.dtype!r}: accepted are {', '.join(map(repr, _DTYPES))}")

    def encode(self, payload: Tensors, inbox: Inbox) -> Tensors:
        """Integer tensors pass unchanged."""
        return tmap(lambda t: t.to(_DTYPES[self.dtype]) if t.is_floating_point() else t, payload)

    def decode(self, payload: Tensors, like: Schema) -> Tensors:
        """Back to the dtype before."""
        return {n: t.to(like[n][0]) for n, t in payload.items()}


@dataclass(frozen=True)
class Int8(Channel):
    """One symmetric scale per tensor, which travels as ``<name>@scale``; what rounding lost is added to the next payload."""

    feedback: bool = True
    name = "int8"
    needs = frozenset({"unbound"})
    takes = frozenset({"exact"})

    def encode(self, payload: Tensors, inbox: Inbox) -> Tensors:
        """Floating tensors to int8 in [-127, 127]; others pass."""
        out: Tensors = {}
        for n, t in payload.items():
            if not t.is_floating_point():
                out[n] = t
                continue
            scale = (t.abs().amax().float() / 127).clamp_min(1e-30)
            out |= {n: torch.round(t / scale).clamp(-127, 127).to(torch.int8), f"{n}@scale": scale.reshape(1)}
        return out

    def decode(self, payload: Tensors, like: Schema) -> Tensors:
        """Values times their scale."""
        return {n: payload[n].to(d) * payload[f"{n}@scale"].to(d)[0] if d.is_floating_point else payload[n] for n, (d, _) in like.items()}
