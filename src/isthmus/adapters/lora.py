"""LoRA (Hu et al., ICLR 2022), with factors that stack over clients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.seeds import generator
from ..core.tensors import Tensors
from .families import ROLES, Site
from .rows import Rows


@dataclass(frozen=True)
class Lora:
    """LoRA: W x + s B A x with A (r, in), B (out, r) and s = alpha / r, or alpha / sqrt(r) for rsLoRA (Kalajdzievski, 2023).

    ``ranks`` gives every client a rank of its own, up to ``rank``; factors are padded with zeros, which training leaves at zero.  The
    scale is that of ``rank`` for all clients, so that padded factors mean the same update everywhere.

    Tensors of a site: ``lora_a``, ``lora_b`` (trained); ``delta`` (out, in), the part of a merged base that methods publish; ``bypass_a``
    (q, in), ``bypass_b`` (out, q), frozen factors that a client's plug-in adds.  All are in units of B A.
    """

    rank: int = 8
    alpha: float | None = None
    targets: tuple[str, ...] = ("query", "value")
    layers: str = "all"
    rslora: bool = False
    ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"adapter.rank = {self.rank!r}: must be at least 1")
        if unknown := [t for t in self.targets if t not in ROLES]:
            raise ValueError(f"adapter.targets: {unknown[0]!r} is not a role; accepted are {', '.join(ROLES)}")
        if self.ranks is not None and any(not 1 <= r <= self.rank for r in self.ranks):
            raise ValueError(f"adapter.ranks = {list(self.ranks)!r}: each must be between 1 and adapter.rank = {self.rank}")

    @property
    def scale(self) -> float:
        """s; alpha defaults to twice the rank."""
        alpha = 2 * self.rank if self.alpha is None else self.alpha
        return alpha / (self.rank**0.5 if self.rslora else self.rank)

    def init(self, site: Site, seed: int) -> Tensors:
        """A uniform in +-1/sqrt(in) (as in peft), B zero."""
        bound = site.in_features**-0.5
        a = (torch.rand(self.rank, site.in_features, generator=generator(seed, "lora", site.name)) * 2 - 1) * bound
        return {"lora_a": a, "lora_b": torch.zeros(site.out_features, self.rank)}

    def output(self, site: Site, x: Tensor, params: Tensors, rows: Rows) -> Tensor | None:
        """What the adapter adds to the site's output, (R, L, out)."""
        out = None
        if "delta" in params:
            out = self.scale * rows.product(x, params["delta"])
        for a, b in (("lora_a", "lora_b"), ("bypass_a", "bypass_b")):
            if b in params:
                low = self.scale * rows.product(rows.product(x, params[a]), params[b])
                out = low if out is None else out + low
        return out

    def weight(self, params: Tensors) -> Tensor:
        """The dense change of a site's weight (out, in), for one client's tensors."""
        dense = params["lora_b"] @ params["lora_a"]
        if "delta" in params:
            dense = dense + params["delta"]
        if "bypass_b" in params:
            dense = dense + params["bypass_b"] @ params["bypass_a"]
        return self.scale * dense
