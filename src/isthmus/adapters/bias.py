"""Biases alone (BitFit: Ben Zaken et al., ACL 2022): intrinsic parameters, no added cost at inference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.tensors import Tensors
from .families import ROLES, FamilyError, Site
from .rows import Rows


@dataclass(frozen=True)
class Biases:
    """Biases alone: what is added to each target's own, ``bias`` (out,), zero at the start.

    ``add_bias``: allow targets that have none (Llama and its kin), where a merged model gains a vector.
    """

    targets: tuple[str, ...] = ("up", "down")
    layers: str = "all"
    add_bias: bool = False

    def __post_init__(self) -> None:
        if unknown := [t for t in self.targets if t not in ROLES]:
            raise ValueError(f"adapter.targets: {unknown[0]!r} is not a role; accepted are {', '.join(ROLES)}")

    def init(self, site: Site, seed: int) -> Tensors:
        """No change.

        Raises:
            FamilyError: a target without a bias, unless ``add_bias``.
        """
        if not site.bias and not self.add_bias:
            raise FamilyError(
                f"adapter.targets: {site.path} has no bias to adapt; adapter.add_bias = true gives it one (and the merged model one more vector)"
            )
        return {"bias": torch.zeros(site.out_features)}

    def output(self, site: Site, x: Tensor, params: Tensors, rows: Rows) -> Tensor | None:
        """The change of the bias, for every row its owner's, (R, 1, out)."""
        return rows.vector(params["bias"], x.dtype)[:, None]
