"""Rows of several clients behind each other, and products in which every row meets its owner's matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """R rows; ``owner`` (R,) is the client of each, in 0..K-1, or None when there is one client only.

    ``equal``: the owners are 0, 0, .., 1, 1, .. with the same number of rows each.
    """

    owner: Tensor | None = None
    clients: int = 1
    equal: bool = False

    @staticmethod
    def of(owner: Tensor, clients: int) -> Rows:
        """The cheapest description of these owners."""
        if clients == 1:
            return Rows()
        r = len(owner)
        equal = r % clients == 0 and torch.equal(owner, torch.arange(clients).repeat_interleave(r // clients))
        return Rows(owner, clients, equal)

    def product(self, x: Tensor, w: Tensor) -> Tensor:
        """x (R, L, in) times w (K, m, in), or one w (m, in) for all, to (R, L, m); w is cast to the dtype of x."""
        if w.dim() == 2 or self.owner is None:
            return F.linear(x, (w if w.dim() == 2 else w[0]).to(x.dtype))
        if self.equal:
            return torch.bmm(x.reshape(self.clients, -1, x.shape[-1]), w.to(x.dtype).mT).reshape(*x.shape[:-1], -1)
        return torch.bmm(x, w[self.owner].to(x.dtype).mT)

    def vector(self, v: Tensor, dtype: torch.dtype) -> Tensor:
        """v (K, m), or one v (m,) for all, to each row's own (R, m) or (1, m)."""
        if v.dim() == 1 or self.owner is None:
            return v.reshape(1, -1).to(dtype)
        return v[self.owner].to(dtype)
