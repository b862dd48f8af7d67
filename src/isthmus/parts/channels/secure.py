"""Sums that the server sees only as sums."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ...core.tensors import Tensors
from ...core.types import Channel, Inbox
from ...core.wire import Schema

WEIGHT, CLIPPED = "@weight", "@clipped"


@dataclass(frozen=True)
class SecureSum(Channel):
    """Fixed-point numbers in Z_2^64 whose sum over clients is all that the server uses; a deployment adds masks that cancel in it.

    Floating tensors travel times the client's weight, so that the decoded sum is the weighted mean; integer tensors (counts) as they
    are, their sum as it is.  Reports do not leave.  An entry beyond ``largest`` is cut, and the sum of how many were is told.

    Args:
        bits: behind the point; the mean is exact to 2^-bits of an entry times its weight.
        largest: magnitude of an entry.
        clients: that there may be at most.
        weight: of a client at most.
    """

    bits: int = 24
    largest: float = 64.0
    clients: int = 1024
    weight: int = 1 << 20
    name = "secure_sum"
    summed = True
    needs = frozenset({"exact", "aligned"})
    takes = frozenset({"exact", "individual"})

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 40 or self.largest <= 0 or self.clients < 1 or self.weight < 1:
            raise ValueError(f"channel secure_sum: bits = {self.bits!r} must be 1 to 40; largest, clients and weight above 0")
        room = math.log2(self.largest) + math.log2(self.clients) + math.log2(self.weight) + self.bits
        if room >= 63:
            raise ValueError(
                f"channel secure_sum: largest x clients x weight x 2^bits takes {room:.1f} bits; 63 are there (fewer bits, or a smaller bound)"
            )

    def encode(self, payload: Tensors, inbox: Inbox) -> Tensors:
        """Every tensor as int64, with the weight and the number of entries that were cut."""
        w = torch.ones(()) if inbox.weight is None else inbox.weight
        w = w.double().nan_to_num(0.0).clamp(0, self.weight).round()
        out: Tensors = {}
        cut = torch.zeros((), dtype=torch.int64)
        for n, t in payload.items():
            if not t.is_floating_point():
                out[n] = t.to(torch.int64)
                continue
            x = t.double()
            kept = x.nan_to_num(0.0, self.largest, -self.largest).clamp(-self.largest, self.largest)
            cut = cut + (kept != x).sum()
            out[n] = (kept * w * 2.0**self.bits).round().to(torch.int64)
        return out | {WEIGHT: w.to(torch.int64).reshape(1), CLIPPED: cut.reshape(1)}

    def decode(self, payload: Tensors, like: Schema) -> Tensors:
        """The sum's means, and integer sums as they are."""
        total = payload[WEIGHT].double().clamp_min(1)
        return {
            n: (payload[n].double() / 2.0**self.bits / total).to(d) if d.is_floating_point else payload[n].to(d)
            for n, (d, _) in like.items()
        }
