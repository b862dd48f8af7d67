"""Prompts (Jia et al., ECCV 2022, deep; Liu et al., ACL 2022): learned tokens before every block's input, dropped after it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.seeds import generator
from ..core.tensors import Tensors
from .families import Site
from .rows import Rows


@dataclass(frozen=True)
class Prompts:
    """``tokens`` learned tokens at each chosen block: ``prompt`` (tokens, width).  They lengthen every row, so inference costs more."""

    tokens: int = 8
    layers: str = "all"

    @property
    def targets(self) -> tuple[str, ...]:
        """Blocks as a whole."""
        return ("block",)

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"adapter.tokens = {self.tokens!r}: must be at least 1")

    def init(self, site: Site, seed: int) -> Tensors:
        """Normal, with standard deviation 0.02."""
        return {"prompt": 0.02 * torch.randn(self.tokens, site.in_features, generator=generator(seed, "prompt", site.name))}

    def output(self, site: Site, x: Tensor, params: Tensors, rows: Rows) -> Tensor | None:
        """The tokens that stand before x (R, L, d), each row its owner's: (R, tokens, d)."""
        flat = rows.vector(params["prompt"].flatten(-2), x.dtype)
        return flat.reshape(-1, self.tokens, x.shape[-1]).expand(len(x), -1, -1)
