"""Algebra on low-rank products ``b @ a``, batched over leading axes; b is (..., out, r), a is (..., r, in)."""

from __future__ import annotations

import torch
from torch import Tensor


def svd(b: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """SVD of ``b @ a`` without forming it.

    Returns u (..., out, m), s (..., m), vh (..., m, in) with m = min(r, out, in); the cost is that of two QRs and a small SVD.
    """
    qb, rb = torch.linalg.qr(b)
    qa, ra = torch.linalg.qr(a.mT)
    u, s, vh = torch.linalg.svd(rb @ ra.mT, full_matrices=False)
    return qb @ u, s, vh @ qa.mT


def norm(b: Tensor, a: Tensor) -> Tensor:
    """Frobenius norm of ``b @ a``, shape (...), from the two r x r Gram matrices."""
    return ((b.mT @ b) * (a @ a.mT).mT).sum((-2, -1)).clamp_min(0).sqrt()


def stacked(weights: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of ``sum_k w_k b_k a_k``: b (K, out, r), a (K, r, in) to (out, K r) and (K r, in), exact."""
    wide = (weights.to(b.dtype)[:, None, None] * b).permute(1, 0, 2).reshape(b.shape[1], -1)
    return wide, a.reshape(-1, a.shape[-1])
