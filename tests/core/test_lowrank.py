from __future__ import annotations

import torch

from isthmus.core import lowrank


def factors(*batch, out=12, r=4, width=20):
    g = torch.Generator().manual_seed(0)
    return torch.randn(*batch, out, r, generator=g, dtype=torch.float64), torch.randn(*batch, r, width, generator=g, dtype=torch.float64)


def test_svd_of_factors_is_the_dense_one():
    b, a = factors(3)
    u, s, vh = lowrank.svd(b, a)
    torch.testing.assert_close(u * s[..., None, :] @ vh, b @ a)
    torch.testing.assert_close(s, torch.linalg.svdvals(b @ a)[..., :4])
    torch.testing.assert_close(u.mT @ u, torch.eye(4, dtype=torch.float64).expand(3, 4, 4))


def test_svd_takes_more_rank_than_width():
    b, a = factors(out=5, r=9, width=7)
    u, s, vh = lowrank.svd(b, a)
    torch.testing.assert_close(u * s @ vh, b @ a)


def test_norm_needs_no_product():
    b, a = factors(3)
    torch.testing.assert_close(lowrank.norm(b, a), torch.linalg.matrix_norm(b @ a))


def test_stacked_factors_are_the_weighted_mean_of_products():
    b, a = factors(5)
    w = torch.tensor([0.1, 0.2, 0.3, 0.25, 0.15], dtype=torch.float64)
    wide_b, wide_a = lowrank.stacked(w, b, a)
    assert wide_b.shape == (12, 20)
    torch.testing.assert_close(wide_b @ wide_a, torch.einsum("k,kor,kri->oi", w, b, a))
