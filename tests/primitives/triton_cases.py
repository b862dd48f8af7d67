"""The Triton kernels in Triton's interpreter; run by test_kmeans.py in a process of its own."""

import numpy as np
import pytest
import torch

from isthmus.primitives import KMeans, kmeans_triton

# shared memory that a block may have, in bytes, as the vendors' documents state it
DEVICES = {"H200": 232448, "A100": 166912, "RTX 4090": 101376, "T4": 65536, "any": 49152}


def problem(problems, n, d, k, offset=0.0, seed=0):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(problems, n, d, generator=random) + offset
    return x, x[:, torch.randperm(n, generator=random)[:k]].clone()


@pytest.mark.parametrize(("n", "d", "k"), [(1, 1, 1), (33, 5, 7), (70, 16, 64), (130, 64, 100), (40, 200, 20), (20, 700, 9)])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_a_step_is_float64s(n, d, k, offset):
    x, centres = problem(2, n, d, min(k, n), offset)
    labels = kmeans_triton.assign(x, centres, x.mean(1))
    square = torch.cdist(x.double(), centres.double())
    assert torch.equal(labels.long(), square.argmin(-1))
    total, count = kmeans_triton.sums(x, labels, centres.shape[1])
    for p in range(2):
        expected = torch.zeros(centres.shape[1], d, dtype=torch.float64).index_add_(0, labels[p].long(), x[p].double())
        torch.testing.assert_close(total[p], expected, rtol=1e-6, atol=1e-4)
        assert torch.equal(count[p], torch.bincount(labels[p], minlength=centres.shape[1]))


def test_half_precision_rows():
    x, centres = problem(1, 100, 64, 10)
    rounded = x.half()
    labels = kmeans_triton.assign(rounded, centres, rounded.float().mean(1))
    assert torch.equal(labels.long(), torch.cdist(rounded.double(), centres.double()).argmin(-1))


def test_pieces_of_unequal_clusters(monkeypatch):
    monkeypatch.setattr(kmeans_triton, "PIECE", 8)
    x = torch.randn(2, 100, 5)
    labels = torch.zeros(2, 100, dtype=torch.int32)
    labels[1, :3] = 3
    total, count = kmeans_triton.sums(x, labels, 4)
    torch.testing.assert_close(total[0, 0], x[0].double().sum(0), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(total[1, 3], x[1, :3].double().sum(0), rtol=1e-6, atol=1e-5)
    assert count.tolist() == [[100, 0, 0, 0], [97, 0, 0, 3]]


def test_whole_fits_end_where_the_processors_do():
    random = np.random.default_rng(0)
    x = (random.normal(size=(4, 6)) * 5)[random.integers(0, 4, (3, 150))] + random.normal(size=(3, 150, 6))
    x = torch.from_numpy(x).float()
    labels, centres, inertia = kmeans_triton.fit(x, 4, init=x[:, :4], tol=0, max_iter=30)
    for p in range(3):
        one = KMeans(4, init=x[p, :4].numpy(), tol=0, max_iter=30).fit(x[p].numpy())
        assert (labels[p].numpy() == one.labels_).all()
        np.testing.assert_allclose(centres[p].numpy(), one.cluster_centers_, rtol=1e-5, atol=1e-5)
        assert float(inertia[p]) == pytest.approx(one.inertia_, rel=1e-5)
    seeds = kmeans_triton.plus_plus(x, 4, torch.Generator().manual_seed(1))
    assert (torch.cdist(seeds.double(), x.double()).min(-1).values < 1e-4).all()
    assert all(len(np.unique(row)) == 4 for row in kmeans_triton.fit(x, 4, random_state=1)[0])


def test_an_empty_cluster_takes_the_furthest_row():
    x = torch.cat([torch.randn(1, 30, 2), torch.full((1, 1, 2), 50.0)], 1)
    start = torch.tensor([[[0.0, 0.0], [9999.0, 9999.0]]])
    assert kmeans_triton.fit(x, 2, init=start)[0][0, -1] == 1


def test_streamed_steps(monkeypatch):
    monkeypatch.setattr(kmeans_triton, "_WIDE", 4 * 8 * 32)
    x, centres = problem(1, 100, 8, 6)
    whole = kmeans_triton.assign(x, centres, x.mean(1))
    expected = kmeans_triton.sums(x, whole, 6)
    for data in (x[0], x[0].numpy(), x[0].double().numpy()):
        labels = np.full(100, -1, np.int32)
        total, count = kmeans_triton.step_streamed(data, centres[0], x[0].mean(0), labels)
        assert (labels == whole[0].numpy()).all()
        torch.testing.assert_close(total, expected[0][0], rtol=1e-6, atol=1e-5)
        assert torch.equal(count, expected[1][0])


@pytest.mark.parametrize("shared", DEVICES.values(), ids=list(DEVICES))
def test_tiles_fit_the_device(shared):
    for d in range(1, 4097):
        for itemsize in (2, 4, 8):
            size = kmeans_triton.tiles(d, itemsize, shared)
            assert itemsize * size["DEEP"] * (size["ROWS"] + size["CENTRES"]) * size["num_stages"] <= shared
            assert all(size[n] >= 16 and size[n] & (size[n] - 1) == 0 for n in ("ROWS", "CENTRES", "DEEP"))
    assert kmeans_triton.tiles(64, 4, 232448)["ROWS"] == 128


@pytest.mark.parametrize(
    ("x", "k", "init", "message"),
    [
        (torch.zeros(3, 4), 2, None, "must be"), (torch.zeros(1, 4, 2), 5, None, "between 1 and the 4"),
        (torch.full((1, 4, 2), torch.nan), 2, None, "NaN"), (torch.zeros(1, 4, 2), 2, torch.zeros(1, 3, 2), "init has shape"),
    ],
)  # fmt: skip
def test_bad_input(x, k, init, message):
    with pytest.raises(ValueError, match=message):
        kmeans_triton.fit(x, k, init)
