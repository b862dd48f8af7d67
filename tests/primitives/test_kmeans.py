import os
import shutil
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans as Reference
from sklearn.cluster import kmeans_plusplus
from sklearn.exceptions import NotFittedError
from sklearn.utils.estimator_checks import check_estimator

from isthmus.primitives import KMeans, kernels, kmeans_batched
from isthmus.primitives import kmeans as module

NAMES = [*kernels.available(), "numpy"]
TYPES = [np.float32, np.float64]


def blobs(n, d, k, separation=3.0, dtype=np.float32, seed=0):
    random = np.random.default_rng(seed)
    return (random.normal(size=(k, d))[random.integers(0, k, n)] * separation + random.normal(size=(n, d))).astype(dtype)


def squares(x, centres):
    return ((x[:, None].astype(np.float64) - centres[None].astype(np.float64)) ** 2).sum(-1)


def assign(lib, x, centres, filtered=False, n=2):
    labels, sums, counts = np.full(len(x), -7, np.int32), np.zeros(centres.shape), np.zeros(len(centres))
    lib.assign(x, x.mean(0).astype(x.dtype), centres, labels, sums, counts, None, filtered, n)
    return labels, sums, counts


def right(x, centres, labels):
    """Every label is float64's argmin, but for ties within the rounding of the type (lowest number among exact ties)."""
    square = squares(x, centres)
    best = square.argmin(1)
    wrong = labels != best
    slack = 64 * np.finfo(x.dtype).eps * np.sqrt(x.shape[1]) * ((x - x.mean(0)).astype(np.float64) ** 2).sum(1).max()
    gap = square[np.arange(len(x)), labels] - square.min(1)
    return not (gap > slack).any() and wrong.mean() < 0.02


def test_the_compiled_kernels_are_here():
    # a machine that develops Isthmus has a compiler; without this every other test could pass in NumPy
    assert "base" in kernels.available()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("n", "d", "k"), [(1, 1, 1), (5, 3, 5), (11, 2, 4), (33, 5, 7), (1000, 64, 256), (700, 16, 64), (300, 384, 100), (97, 17, 31)]
)
def test_a_step_is_float64s(name, dtype, n, d, k):
    lib, random = kernels.load(name), np.random.default_rng(n)
    x = (random.normal(size=(n, d)) + 10).astype(dtype)
    centres = (x[random.integers(0, n, k)] + random.normal(size=(k, d)) / 2).astype(dtype)
    for filtered in (False, True) if lib.can_filter else (False,):
        for laid in (x, np.asfortranarray(x), np.repeat(x, 2, 0)[::2], np.repeat(x, 2, 1)[:, ::2]):
            labels, sums, counts = assign(lib, laid, centres, filtered)
            assert right(x, centres, labels)
            assert counts.sum() == n
            expected = np.zeros((k, d))
            np.add.at(expected, labels, x.astype(np.float64))
            np.testing.assert_allclose(sums, expected, rtol=1e-10)
            out = np.empty(n, dtype)
            found = lib.own(laid, centres, labels, None, out, 2)
            exact = squares(x, centres)[np.arange(n), labels]
            np.testing.assert_allclose(out, exact, rtol=1e-4 if dtype == np.float32 else 1e-10)
            assert found == pytest.approx(exact.sum(), rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("offset", [0, 100, 1e4])
def test_an_offset_of_the_data_changes_no_label(name, offset):
    # flash-kmeans' expansion mislabels 58 % at offset 1,000
    random = np.random.default_rng(0)
    whole = np.round(random.normal(size=(2000, 32)) * 64).astype(np.float32) / 64
    lib, centres = kernels.load(name), whole[:200]
    plain = assign(lib, whole, centres)[0]
    for filtered in (False, True) if lib.can_filter else (False,):
        moved = assign(lib, whole + np.float32(offset), centres + np.float32(offset), filtered)[0]
        np.testing.assert_array_equal(moved, plain)


@pytest.mark.parametrize("name", NAMES)
def test_the_lowest_of_equal_centres_wins(name):
    lib, x = kernels.load(name), blobs(500, 64, 10)
    centres = np.concatenate([x[:20], x[:20], x[:8]])
    for filtered in (False, True) if lib.can_filter else (False,):
        labels, _, counts = assign(lib, x, centres, filtered)
        assert labels.max() < 20
        assert (counts[20:] == 0).all()
        np.testing.assert_array_equal(labels, squares(x, centres).argmin(1))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "numpy"])
def test_tiles_hold_every_centre(name):
    lib = kernels.load(name)
    for k in range(1, 80):
        edges = lib.tiles(k)
        assert edges[0] == 0
        assert edges[-1] == k
        assert (np.diff(edges) > 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_known_of_rows_changes_no_label(name):
    lib, x = kernels.load(name), blobs(3001, 70, 40, 1.0)
    known, shift = np.zeros(len(x), np.uint32), x.mean(0)
    for step in range(3):
        centres = x[step * 50 : step * 50 + 50] + np.float32(step)
        found = np.empty((2, len(x)), np.int32)
        for labels, memory in zip(found, (None, known), strict=True):
            lib.assign(x, shift, centres, labels, None, None, None, lib.can_filter, 2, known=memory)
        np.testing.assert_array_equal(found[0], found[1])
        assert right(x, centres, found[1])
    assert known.all() or not lib.can_filter


@pytest.mark.parametrize("name", [n for n in NAMES if n != "numpy"])
@pytest.mark.parametrize("outside", [False, True])
def test_sums_that_are_kept_are_those_of_the_labels(name, outside, monkeypatch, tmp_path):
    lib, kept = kernels.load(name), []
    monkeypatch.setattr(kernels, "load", lambda *_: lib)
    monkeypatch.setattr(module, "_PIECE", 2**16)
    x = blobs(4000, 24, 30, 1.0)
    data = module._Inside(x)
    if outside:
        np.save(tmp_path / "x.npy", x)
        data = module._Outside(np.load(tmp_path / "x.npy", mmap_mode="r"), np.dtype(np.float32))
    problem, centres, labels = module._Problem(data, None, 2), x[:40].copy(), np.full(len(x), -1, np.int32)
    sums = module._Sums(problem, 40)
    for _ in range(12):
        problem.assign(centres, labels, sums)
        expected = np.zeros((40, 24))
        np.add.at(expected, labels, x.astype(np.float64))
        np.testing.assert_allclose(sums.values, expected, rtol=1e-12, atol=1e-9)
        np.testing.assert_array_equal(sums.counts, np.bincount(labels, minlength=40))
        kept.append(sums.mass is not None)
        centres = problem.average(centres, sums.values, sums.counts)
    assert kept[-1]
    assert not kept[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("algorithm", ["lloyd", "bounds"])
def test_large_sums_are_made_in_the_order_of_labels(name, algorithm, monkeypatch):
    lib, x = kernels.load(name), blobs(3000, 20, 30, 1.0)
    monkeypatch.setattr(kernels, "load", lambda *_: lib)
    fit = lambda: KMeans(40, init=x[:40], tol=0, max_iter=9, algorithm=algorithm).fit(x)
    plain = fit()
    monkeypatch.setattr(module, "_SORT", 0)
    np.testing.assert_array_equal(fit().labels_, plain.labels_)
    np.testing.assert_allclose(fit().cluster_centers_, plain.cluster_centers_, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["full", "bounds"])
def test_a_cluster_whose_rows_weigh_nothing_is_empty(how):
    # 0.1 + 0.2 - 0.3 is not 0: what rounding leaves of a weight must not count as one
    x = np.repeat(np.concatenate([[0.1, 0.0, 0.0, 0.0], np.full(200, 9.0)])[:, None], 2, 1)
    weights = np.concatenate([[0.0], [0.1, 0.2, 0.3], np.ones(200)])
    problem = module._Problem(module._Inside(x), weights, 1)
    here, away = (np.repeat(np.array(c)[:, None], 2, 1) for c in ([0.0, 5.0, 9.0], [0.1, 0.0, 9.0]))
    labels, sums = np.full(len(x), -1, np.int32), module._Sums(problem, 3)
    bounds = module._Bounds(problem, here) if how == "bounds" else None
    for centres in (here, here, here, away):
        if bounds:
            counts = bounds.assign(centres, labels)[1]
        else:
            problem.assign(centres, labels, sums)
            counts = sums.counts
    assert labels[0] == 0
    assert (labels[1:4] == 1).all()
    assert counts[0] == 0


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("how", ["full", "bounds"])
def test_a_huge_row_leaves_nothing_behind(how, weighted):
    # in float64 1e17 + 1 - 1e17 is 0: whoever only moves rows between sums loses the small ones of a cluster that a huge one leaves
    x = np.random.default_rng(0).normal(size=(3000, 8))
    x[0] = 1e17
    problem = module._Problem(module._Inside(x), np.full(len(x), 0.5) if weighted else None, 2)
    together, apart = np.stack([np.zeros(8), np.full(8, 1e30)]), np.stack([np.zeros(8), x[0]])
    labels, sums = np.full(len(x), -1, np.int32), module._Sums(problem, 2)
    bounds = module._Bounds(problem, together) if how == "bounds" else None
    for centres in (together, together, together, apart):
        kept = sums.mass is not None
        if bounds:
            values, counts, _ = bounds.assign(centres, labels)
        else:
            problem.assign(centres, labels, sums)
            values, counts = sums.values, sums.counts
    assert kept or bounds or weighted
    one = 0.5 if weighted else 1.0
    np.testing.assert_allclose(values, one * np.stack([x[1:].sum(0), x[0]]), rtol=1e-10)
    np.testing.assert_array_equal(counts, [one * 2999, one])


@pytest.mark.parametrize("name", [n for n in NAMES if n != "numpy"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("separation", [0.0, 1.0, 4.0])
def test_bounds_change_no_label(name, dtype, separation, monkeypatch):
    lib = kernels.load(name)
    monkeypatch.setattr(kernels, "load", lambda *_: lib)
    monkeypatch.setattr(module, "_FILTER", (10**9, 0))
    x = blobs(3000, 40, 30, separation, dtype)
    fit = lambda algorithm: KMeans(60, init=x[:60], tol=0, max_iter=12, algorithm=algorithm).fit(x)
    plain, bounded = fit("lloyd"), fit("bounds")
    np.testing.assert_array_equal(plain.labels_, bounded.labels_)
    np.testing.assert_allclose(plain.cluster_centers_, bounded.cluster_centers_, rtol=1e-5, atol=1e-5)
    assert plain.n_iter_ == bounded.n_iter_


def test_bounds_skip_most_of_what_is_settled():
    x = blobs(20000, 64, 64, 4.0)
    problem = module._Problem(module._Inside(x), None, 2)
    if problem.lib.name == "numpy":
        pytest.skip("no bounds in NumPy")
    start = KMeans(64, random_state=0, n_init=1).fit(x).cluster_centers_
    bounds = module._Bounds(problem, start)
    places = np.full(len(x), -1, np.int32)
    assert bounds.assign(start, places)[2] == len(x)
    assert bounds.looked == 1.0
    bounds.assign((start + 0.01).astype(np.float32), places)
    assert bounds.looked < 0.05


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("n", "d", "k"), [(500, 2, 3), (5000, 20, 12), (3000, 50, 40)])
def test_clustered_data_end_where_scikit_learn_does(dtype, n, d, k):
    x = blobs(n, d, k, 5.0, dtype)
    start, _ = kmeans_plusplus(x, k, random_state=0)
    ours, theirs = KMeans(k, init=start).fit(x), Reference(k, init=start, n_init=1).fit(x)
    np.testing.assert_array_equal(ours.labels_, theirs.labels_)
    np.testing.assert_allclose(ours.cluster_centers_, theirs.cluster_centers_, rtol=1e-4, atol=1e-4)
    assert ours.inertia_ == pytest.approx(theirs.inertia_, rel=1e-5)
    assert ours.n_iter_ == theirs.n_iter_
    np.testing.assert_allclose(ours.transform(x[:5]), theirs.transform(x[:5]), rtol=1e-3)
    assert ours.score(x) == pytest.approx(-ours.inertia_)


def test_sample_weights_are_repetitions():
    x, random = blobs(400, 6, 5), np.random.default_rng(1)
    times = random.integers(0, 4, len(x))
    weighted = KMeans(5, init=x[:5], tol=0).fit(x, sample_weight=times)
    repeated = KMeans(5, init=x[:5], tol=0).fit(np.repeat(x, times, 0))
    np.testing.assert_allclose(weighted.cluster_centers_, repeated.cluster_centers_, rtol=1e-5)
    assert weighted.inertia_ == pytest.approx(repeated.inertia_, rel=1e-6)


def test_labels_are_those_of_the_final_centres():
    x = blobs(5000, 16, 30, 0.3)
    for iterations in (1, 3):
        m = KMeans(30, max_iter=iterations, random_state=0).fit(x)
        np.testing.assert_array_equal(m.labels_, m.predict(x))
        assert m.inertia_ == pytest.approx(squares(x, m.cluster_centers_).min(1).sum(), rel=1e-6)


def test_empty_clusters_take_the_furthest_rows_as_in_scikit_learn():
    x = blobs(300, 3, 4, 8.0, np.float64)
    start = np.concatenate([x[:2], np.full((3, 3), 1e3)])
    ours, theirs = KMeans(5, init=start, tol=0).fit(x), Reference(5, init=start, n_init=1, tol=0).fit(x)
    assert len(np.unique(ours.labels_)) == 5
    assert ours.inertia_ == pytest.approx(theirs.inertia_)
    np.testing.assert_array_equal(ours.labels_, theirs.labels_)


@pytest.mark.parametrize(
    "x",
    [np.zeros((30, 4)), np.tile(np.arange(3.0), (40, 1)), np.c_[np.arange(30.0), np.ones(30)], np.repeat(np.eye(4), 8, 0)],
    ids=["zeros", "one row over and over", "a constant column", "four rows over and over"],
)
@pytest.mark.parametrize("k", [1, 4, 12])
def test_degenerate_data(x, k):
    m = KMeans(k, random_state=0).fit(x)
    assert np.isfinite(m.cluster_centers_).all()
    assert m.inertia_ == pytest.approx(squares(x, m.cluster_centers_).min(1).sum())
    if len(np.unique(x, axis=0)) <= k:
        assert m.inertia_ == pytest.approx(0, abs=1e-9)


def test_as_many_clusters_as_rows():
    x = blobs(20, 3, 20)
    assert KMeans(20, random_state=0).fit(x).inertia_ == pytest.approx(0, abs=1e-6)
    assert KMeans(1).fit(x).cluster_centers_[0] == pytest.approx(x.mean(0), abs=1e-5)


def test_the_best_of_several_starts_stays():
    x = blobs(2000, 2, 12, 4.0)
    one = [KMeans(12, init="random", n_init=1, random_state=s).fit(x).inertia_ for s in range(5)]
    assert KMeans(12, init="random", n_init=10, random_state=0).fit(x).inertia_ <= np.median(one)
    assert KMeans(12, init=lambda x, k, random_state: x[:k]).fit(x).n_iter_ > 0
    again = [KMeans(12, random_state=3).fit(x).labels_ for _ in range(2)]
    np.testing.assert_array_equal(*again)


def test_k_means_plus_plus_is_as_good_as_scikit_learns():
    x = blobs(3000, 8, 25, 4.0)
    ours = [squares(x, module.plus_plus(x, 25, np.random.RandomState(s))).min(1).sum() for s in range(12)]
    theirs = [squares(x, kmeans_plusplus(x, 25, random_state=s)[0]).min(1).sum() for s in range(12)]
    assert np.median(ours) == pytest.approx(np.median(theirs), rel=0.15)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weighted", [False, True])
def test_seeding_steps(name, weighted):
    lib, x, random = kernels.load(name), blobs(9000, 20, 5), np.random.default_rng(0)
    weights = random.integers(0, 3, len(x)).astype(np.float32) if weighted else None
    mass = np.ones(len(x)) if weights is None else weights.astype(np.float64)
    near = np.full(len(x), 1e30, np.float32)
    blocks = lib.take(x, x[7], near, weights, 2)
    exact = squares(x, x[7:8])[:, 0]
    np.testing.assert_allclose(near, exact, rtol=1e-4, atol=1e-4)
    assert len(blocks) == -(-len(x) // kernels.BLOCK)
    assert blocks.sum() == pytest.approx((mass * exact).sum(), rel=1e-5)
    candidates = x[100:113].copy()
    expected = [(mass * np.minimum(exact, squares(x, c[None])[:, 0])).sum() for c in candidates]
    np.testing.assert_allclose(lib.potential(x, x[0], candidates, near, weights, 2), expected, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", TYPES)
def test_nearest_rows(name, dtype):
    lib, memory, queries = kernels.load(name), blobs(900, 33, 9, dtype=dtype), blobs(70, 33, 9, dtype=dtype, seed=1)
    far, who = lib.nearest(queries, memory.mean(0), memory, 6, 2)
    square = squares(queries, memory)
    np.testing.assert_array_equal(who, np.argsort(square, 1, kind="stable")[:, :6])
    np.testing.assert_allclose(far, np.take_along_axis(square, who, 1), rtol=1e-4)


class Slices:
    """What an HDF5 or Zarr array is to us: a shape, a type, and slices of rows."""

    def __init__(self, x):
        self.shape, self.dtype, self._x = x.shape, x.dtype, x

    def __getitem__(self, at):
        return self._x[at]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
def test_outside_memory_ends_where_inside_does(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(module, "_PIECE", 40_000)
    x = (blobs(5000, 12, 9, 4.0) * 8).astype(dtype)
    start = np.ascontiguousarray(x[:9])
    mapped = np.memmap(tmp_path / "x", dtype, "w+", shape=x.shape)
    mapped[:] = x
    inside = KMeans(9, init=start).fit(x)
    for outside in (mapped, mapped[:], Slices(x)):
        m = KMeans(9, init=start).fit(outside)
        np.testing.assert_array_equal(m.labels_, inside.labels_)
        np.testing.assert_allclose(m.cluster_centers_, inside.cluster_centers_, rtol=1e-5)
        np.testing.assert_array_equal(m.predict(outside), inside.labels_)
        assert KMeans(9, random_state=0).fit(outside).inertia_ == pytest.approx(KMeans(9, random_state=0).fit(x).inertia_, rel=0.2)
    part = mapped[1001:4003]
    np.testing.assert_array_equal(KMeans(9, init=start).fit(part).labels_, KMeans(9, init=start).fit(x[1001:4003]).labels_)


def test_a_broken_source_says_so():
    class Broken(Slices):
        def __getitem__(self, at):
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        KMeans(3).fit(Broken(blobs(100, 3, 3)))


@pytest.mark.slow
def test_a_large_file_stays_on_disk(tmp_path):
    """256 MiB in pieces of 8: resident memory grows by less than a third of it."""
    code = f"""
import numpy as np, resource
from isthmus.primitives import KMeans, kmeans
kmeans._PIECE = 8 * 2**20
x = np.memmap({str(tmp_path / "x")!r}, np.float32, "w+", shape=(2**20, 64))
for i in range(0, 2**20, 2**16): x[i:i + 2**16] = np.random.default_rng(i).normal(size=(2**16, 64)); x.flush()
del x
x = np.memmap({str(tmp_path / "x")!r}, np.float32, "r", shape=(2**20, 64))
open("/proc/self/clear_refs", "w").write("5")  # the peak so far is forgotten
peak = lambda: int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) / 1024
before = peak()
KMeans(16, max_iter=2, random_state=0).fit(x)
print(peak() - before)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert float(found.stdout) < 85


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_many_small_problems(kind):
    x = np.stack([blobs(200, 5, 4, 6.0, seed=s) for s in range(7)])
    start = x[:, :4].copy()
    labels, centres, inertia = kmeans_batched(torch.from_numpy(x) if kind == "torch" else x, 4, init=start, tol=0)
    assert isinstance(labels, torch.Tensor if kind == "torch" else np.ndarray)
    for i in range(len(x)):
        one = KMeans(4, init=start[i], tol=0, algorithm="lloyd").fit(x[i])
        np.testing.assert_array_equal(np.asarray(labels[i]), one.labels_)
        np.testing.assert_allclose(np.asarray(centres[i]), one.cluster_centers_, rtol=1e-5, atol=1e-5)
        assert float(inertia[i]) == pytest.approx(one.inertia_, rel=1e-5)
    # its own start, and an empty cluster
    assert (kmeans_batched(x, 4, random_state=0)[2] < 1.5 * np.asarray(inertia).max()).all()
    start[:, 3] = 1e4
    labels, _, _ = kmeans_batched(x, 4, init=start)
    assert all(len(np.unique(row)) == 4 for row in labels)


def test_many_small_problems_in_numpy(monkeypatch):
    x = np.stack([blobs(60, 3, 3, 6.0, seed=s) for s in range(3)])
    native = kmeans_batched(x, 3, init=x[:, :3].copy())
    monkeypatch.setattr(kernels, "load", lambda *_: kernels.Plain())
    for a, b in zip(native, kmeans_batched(x, 3, init=x[:, :3].copy()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_clusters": 0}, "n_clusters = 0"), ({"n_clusters": 2.5}, "n_clusters = 2.5"), ({"max_iter": 0}, "max_iter = 0"),
        ({"tol": -1}, "tol = -1"), ({"algorithm": "elkan"}, "accepted are 'auto'"), ({"init": "k-means"}, "accepted are 'k-means"),
        ({"n_init": 0}, "n_init = 0"), ({"init": np.zeros((2, 2))}, "must be \\(3, 4\\)"), ({"init": np.full((3, 4), np.nan)}, "NaN"),
        ({"n_clusters": 99}, "n_samples=50 should be >= n_clusters=99"), ({"n_threads": 0}, "n_threads = 0"),
    ],
)  # fmt: skip
def test_bad_options(change, message):
    with pytest.raises(ValueError, match=message):
        KMeans(**({"n_clusters": 3} | change)).fit(blobs(50, 4, 3))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none_are_refused(bad, tmp_path):
    x = blobs(50, 4, 3)
    x[17, 2] = bad
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=x.shape)
    mapped[:] = x
    for data in (x, x.astype(np.float64), mapped, Slices(x)):
        with pytest.raises(ValueError, match=r"NaN|infinity"):
            KMeans(3).fit(data)
    with pytest.raises(ValueError, match="NaN or infinity"):
        kmeans_batched(x[None], 3)
    with pytest.raises(ValueError, match="must be \\(problems, n, d\\)"):
        kmeans_batched(blobs(5, 4, 3), 3)
    with pytest.raises(ValueError, match="between 1 and the 5 rows"):
        kmeans_batched(blobs(5, 4, 3)[None], 6)
    with pytest.raises(ValueError, match="init has shape"):
        kmeans_batched(blobs(5, 4, 3)[None], 2, init=np.zeros((1, 3, 4)))


def test_before_fit_and_other_widths(tmp_path):
    with pytest.raises(NotFittedError):
        KMeans(3).predict(blobs(5, 4, 3))
    m = KMeans(3).fit(blobs(50, 4, 3))
    with pytest.raises(ValueError, match="expecting 4 features"):
        m.predict(blobs(50, 5, 3))
    with pytest.raises(ValueError, match="expecting 4 features"):
        m.predict(np.memmap(tmp_path / "x", np.float32, "w+", shape=(5, 6)))


def test_scikit_learns_common_checks():
    reason = {"check_sample_weight_equivalence_on_dense_data": "k-means++ draws other rows where rows are repeated, as in scikit-learn"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_estimator(KMeans(n_clusters=3, random_state=0), expected_failed_checks=reason)


def test_the_fallback_says_that_it_is_one(monkeypatch):
    monkeypatch.setattr(kernels, "available", lambda: [])
    monkeypatch.delenv("ISTHMUS_KERNELS", raising=False)
    with pytest.warns(RuntimeWarning, match="compiled kernels were not built"):
        assert kernels.load.__wrapped__().name == "numpy"
    monkeypatch.setenv("ISTHMUS_KERNELS", "sse9")
    with pytest.raises(ValueError, match="accepted are base, avx2"):
        kernels.load.__wrapped__()
    monkeypatch.setenv("ISTHMUS_KERNELS", "amx")
    with pytest.raises(ValueError, match="not built or not for this machine"):
        kernels.load.__wrapped__()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 40), st.sampled_from(TYPES), st.integers(0, 10**6), st.floats(-1e3, 1e3))
def test_any_shape(n, d, k, dtype, seed, offset):
    random = np.random.default_rng(seed)
    x, centres = ((random.normal(size=(rows, d)) + offset).astype(dtype) for rows in (n, k))
    for name in NAMES:
        lib = kernels.load(name)
        for filtered in (False, True) if lib.can_filter else (False,):
            labels, _, counts = assign(lib, x, centres, filtered)
            assert counts.sum() == n
            square = squares(x, centres)
            gap = square[np.arange(n), labels] - square.min(1)
            assert gap.max() <= 256 * np.finfo(dtype).eps * (square.max() + d)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_triton():
    """In its interpreter, which has to be chosen before triton is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(Path(__file__).with_name("triton_cases.py"))]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-2000:]


@pytest.mark.slow
def test_indices_go_past_two_to_the_31st(tmp_path):
    """More than 2^31 entries in a sparse file: rows at its end have the labels that they have by themselves."""
    n, d = 2**21 + 1000, 1024
    if shutil.disk_usage(tmp_path).free < 1 << 30:
        pytest.skip("less than 1 GiB of disk")
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(n, d))
    assert mapped.size > 2**31
    tail = np.random.default_rng(0).normal(size=(500, d)).astype(np.float32)
    mapped[-500:] = tail
    centres = np.vstack([np.zeros(d), tail[:3]]).astype(np.float32)
    m = KMeans(4, init=centres, n_init=1, max_iter=1).fit(centres)
    label = m.predict(mapped)
    assert len(label) == n
    assert (label[:-500] == label[0]).all()
    assert np.array_equal(label[-500:], m.predict(tail))
    mapped._mmap.close()
    (tmp_path / "x").unlink()
