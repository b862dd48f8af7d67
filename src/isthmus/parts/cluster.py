"""k-means on a client: a fixed number of steps, nothing that depends on values, so that it maps over clients."""

from __future__ import annotations

import torch
from torch import Tensor


def _marked(at: Tensor, n: int, like: Tensor) -> Tensor:
    return (at[..., None] == torch.arange(n)).to(like.dtype)


def lloyd(points: Tensor, weight: Tensor, k: int, steps: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted k-means of points (n, d), weight (n,) 0: not there.

    Starts at the heaviest point and goes on with the one farthest from all chosen (deterministic).

    Returns:
        Centres (k, d), the means of what is nearest; weights (k,) and numbers (k,) of points that fell to each.
    """
    there = (weight > 0).to(points.dtype)
    pick = lambda value: _marked(value.argmax(), len(points), points) @ points  # noqa: E731
    centres = [pick(weight)]
    gap = (points - centres[0]).square().sum(-1)
    for _ in range(k - 1):
        centres.append(pick(gap * there))
        gap = torch.minimum(gap, (points - centres[-1]).square().sum(-1))
    centre = torch.stack(centres)
    for _ in range(steps):
        near = _marked(torch.cdist(points, centre).argmin(-1), k, points) * weight[:, None]
        total = near.sum(0)
        centre = torch.where(total[:, None] > 0, (near.mT @ points) / total.clamp_min(1e-12)[:, None], centre)
    near = _marked(torch.cdist(points, centre).argmin(-1), k, points)
    total = (near * weight[:, None]).sum(0)
    mean = ((near * weight[:, None]).mT @ points) / total.clamp_min(1e-12)[:, None]
    return torch.where(total[:, None] > 0, mean, centre), total, (near * there[:, None]).sum(0)
