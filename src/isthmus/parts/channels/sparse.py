"""Fewer numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ...core.tensors import Tensors
from ...core.types import Channel, Inbox
from ...core.wire import Schema


@dataclass(frozen=True)
class TopK(Channel):
    """The largest entries of each tensor by magnitude, with their places; the rest waits in the client's memory.

    A tensor of n entries sends ceil(fraction n) values and as many places (int16 where they fit, else int32).
    """

    fraction: float = 0.1
    feedback: bool = True
    name = "topk"
    needs = frozenset({"unbound"})
    takes = frozenset({"exact"})

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"channel topk: fraction = {self.fraction!r}: must be above 0 and at most 1")

    def encode(self, payload: Tensors, inbox: Inbox) -> Tensors:
        """Values in falling order of magnitude."""
        out: Tensors = {}
        for n, t in payload.items():
            if not t.is_floating_point():
                out[n] = t
                continue
            flat = t.reshape(-1)
            places = flat.abs().topk(math.ceil(self.fraction * flat.numel())).indices
            small = torch.int16 if flat.numel() <= 2**15 else torch.int32
            out |= {f"{n}@values": flat.gather(0, places), f"{n}@places": places.to(small)}
        return out

    def decode(self, payload: Tensors, like: Schema) -> Tensors:
        """Zeros but for the values that travelled."""
        out: Tensors = {}
        for n, (dtype, shape) in like.items():
            if f"{n}@values" not in payload:
                out[n] = payload[n]
                continue
            flat = torch.zeros(math.prod(shape), dtype=dtype)
            out[n] = flat.scatter_add(0, payload[f"{n}@places"].long(), payload[f"{n}@values"].to(dtype)).reshape(shape)
        return out
