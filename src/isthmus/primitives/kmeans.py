"""Exact k-means: every step gives each row the centre that float64 arithmetic would, without an N x K matrix of distances.

After Flash-KMeans (arXiv 2603.09229): *FlashAssign* keeps the running minimum beside the products, *Sort-Inverse Update* sums rows in their
labels' order.  Here for processors (`native/kernels.cpp`); `primitives.kmeans_triton` has both for GPUs.  Beyond the source:

* the data's mean is taken from rows and centres before they are multiplied: an offset of the data does not eat a float's digits;
* where the processor multiplies tiles of bfloat16 (AMX), those products with an error bound settle most rows, the others are looked at
  again in full: same labels, several times faster on data with structure (*derived*);
* bounds (Yinyang over groups of centres) skip what cannot have changed.  They cost more than they save on noise, so a sample of rows
  predicts what they would skip before they are switched on (*derived*).
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import scipy.sparse
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, ClusterMixin, TransformerMixin
from sklearn.metrics.pairwise import euclidean_distances
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, check_random_state, validate_data

from . import kernels

Array = NDArray[Any]
_PIECE = 64 * 2**20  # bytes that are read at a time from what does not lie in memory
_SEEDS = 256  # rows for each cluster that k-means++ looks at there
_FILTER = 48, 24  # least width and number of centres at which products of bfloat16 pay (measured: benchmarks/kmeans.py)
_SORT = 8 * 2**20  # bytes of sums of one thread from which on rows are summed in their labels' order


class _Outside:
    """Rows that lie in a file: pieces, the next one read while this one is worked on, and let go afterwards."""

    def __init__(self, x: Any, dtype: Any) -> None:
        self.x, self.shape, self.dtype = x, x.shape, dtype
        self.mapped = isinstance(x, np.memmap) and x.strides[0] > 0 and hasattr(mmap, "MADV_DONTNEED")
        self.rows = max(1, _PIECE // (x.shape[1] * np.dtype(x.dtype).itemsize))
        self.pieces = -(-x.shape[0] // self.rows)

    def _advise(self, start: int, stop: int, what: int) -> None:
        whole, base = np.frombuffer(self.x._mmap, np.uint8).ctypes.data, self.x.ctypes.data
        row = self.x.strides[0]
        first = (base - whole + start * row) // mmap.PAGESIZE * mmap.PAGESIZE
        last = min(base - whole + stop * row, len(self.x._mmap))
        self.x._mmap.madvise(what, first, last - first)

    def __iter__(self) -> Iterator[tuple[slice, Array]]:
        edges = [(i, min(i + self.rows, self.shape[0])) for i in range(0, self.shape[0], self.rows)]
        if self.mapped:
            for here, after in zip(edges, [*edges[1:], None], strict=True):
                if after:
                    self._advise(*after, mmap.MADV_WILLNEED)
                yield slice(*here), np.asarray(self.x[slice(*here)], self.dtype)
                self._advise(*here, mmap.MADV_DONTNEED)
            return
        got: list[Array | BaseException] = []

        def read(edge: tuple[int, int]) -> None:
            try:
                got.append(np.ascontiguousarray(self.x[slice(*edge)], self.dtype))
            except BaseException as error:
                got.append(error)

        reader = threading.Thread(target=read, args=(edges[0],))
        reader.start()
        for here, after in zip(edges, [*edges[1:], None], strict=True):
            reader.join()
            piece = got.pop()
            if isinstance(piece, BaseException):
                raise piece
            if after:
                reader = threading.Thread(target=read, args=(after,))
                reader.start()
            yield slice(*here), piece

    def take(self, rows: Array) -> Array:
        """Some rows."""
        out = np.empty((len(rows), self.shape[1]), self.dtype)
        for done, i in enumerate(np.argsort(rows, kind="stable"), 1):
            out[i] = self.x[int(rows[i])]
            if self.mapped and (done % 128 == 0 or done == len(rows)):  # a touched row brings its neighbourhood with it
                self._advise(0, self.shape[0], mmap.MADV_DONTNEED)
        return out


class _Inside:
    """Rows that lie in memory: one piece."""

    pieces = 1

    def __init__(self, x: Array) -> None:
        self.x, self.shape, self.dtype = x, x.shape, x.dtype

    def __iter__(self) -> Iterator[tuple[slice, Array]]:
        yield slice(None), self.x

    def take(self, rows: Array) -> Array:
        return self.x[rows]


class _Problem:
    """Data, weights and what does not change over a fit; steps over all pieces."""

    def __init__(self, data: _Inside | _Outside, weights: Array | None, n_threads: int | None, shift: Array | None = None) -> None:
        self.data, self.weights, self.n = data, weights, kernels.threads(n_threads)
        self.lib = kernels.load()
        self.rows, self.width = data.shape
        self.filter = self.lib.can_filter and data.dtype == np.float32
        self.known = np.zeros(self.rows, np.uint32) if self.filter else None
        if shift is not None:
            self.shift = shift
            return
        # the mean, by as many partial sums as keep all threads busy
        parts = np.repeat(np.arange(16, dtype=np.int32), -(-self.rows // 16))[: self.rows]
        sums, counts = np.zeros((16, self.width)), np.zeros(16)
        for at, piece in data:
            if isinstance(data, _Outside) and not np.isfinite(piece).all():
                raise ValueError("Input X contains NaN or infinity.")
            self.lib.update(piece, parts[at], sums, counts, None, self.n)
        self.shift = (sums.sum(0) / self.rows).astype(data.dtype)
        parts[:] = 0
        self.variance = self.inertia(self.shift[None], parts, weighted=False) / self.rows / self.width

    def _weights(self, at: slice) -> Array | None:
        return None if self.weights is None else self.weights[at]

    def assign(self, centres: Array, labels: Array, sums: _Sums | None = None) -> int:
        """Labels (n,) are brought up to date, and sums where they are given.  Returns how many labels changed."""
        into = sums.start() if sums else {"sums": None, "counts": None}
        filtered, looked, changed = self.filtered(len(centres)), 0, 0
        for at, piece in self.data:
            known = self.known[at] if filtered and self.known is not None else None
            found = self.lib.assign(
                piece, self.shift, centres, labels[at], weights=self._weights(at), filtered=filtered, n=self.n, known=known, **into
            )
            changed, looked = changed + found[0], looked + found[1]
            if sums and sums.sort:
                sums.add(at, piece, labels)
        if filtered and looked > self.rows / 4:
            self.filter = False
        if sums:
            sums.finish(labels, changed)
        return changed

    def filtered(self, k: int) -> bool:
        """Whether products of bfloat16 settle most rows."""
        return self.filter and self.width >= _FILTER[0] and k >= _FILTER[1]

    def inertia(self, centres: Array, labels: Array, out: Array | None = None, weighted: bool = True) -> float:
        """Weighted sum of squared distances to the rows' own centres; each into out (n,)."""
        found = 0.0
        for at, piece in self.data:
            weights = self._weights(at) if weighted else None
            found += self.lib.own(piece, centres, labels[at], weights, None if out is None else out[at], self.n)
        return found

    def relocate(self, centres: Array, labels: Array, sums: Array, counts: Array) -> tuple[Array, Array]:
        """Sums and weights where each empty cluster has the row that is furthest from its centre."""
        empty = np.flatnonzero(counts == 0)
        sums, counts = sums.copy(), counts.copy()
        far = np.empty(self.rows, self.data.dtype)
        self.inertia(centres, labels, far, weighted=False)
        if self.weights is not None:
            far[self.weights == 0] = -1
        empty = empty[: self.rows]
        furthest = np.argpartition(far, -len(empty))[: -len(empty) - 1 : -1]
        for cluster, at, row in zip(empty, furthest, self.data.take(furthest), strict=True):
            weight = 1.0 if self.weights is None else float(self.weights[at])
            if counts[labels[at]] <= weight or weight == 0:
                continue  # its cluster would be empty instead
            sums[labels[at]] -= weight * row.astype(np.float64)
            counts[labels[at]] -= weight
            sums[cluster], counts[cluster] = weight * row.astype(np.float64), weight
        return sums, counts

    def average(self, centres: Array, sums: Array, counts: Array) -> Array:
        """Means; a cluster without weight keeps its centre."""
        kept = counts > 0
        return np.where(kept[:, None], sums / np.where(kept, counts, 1)[:, None], centres).astype(self.data.dtype)


class _Sums:
    """Sums (k, d) and weights (k,) of the rows of each label.

    Once few labels change, sums are kept and only the rows that change theirs are moved.  A huge row that leaves a small sum would leave its
    rounding behind.  So what may be lost is bounded beside each sum, in units of 2^-53: an addition loses at most that share of the sizes
    added up so far.  Sums are made anew once it is over eight times what making them anew may lose (*derived*).
    """

    def __init__(self, problem: _Problem, k: int) -> None:
        self.problem = problem
        self.values, self.counts, self.moves = np.zeros((k, problem.width)), np.zeros(k), np.zeros((k, 3))
        self.mass: Array | None = None  # sizes of each label's rows, added up; None: not measured
        self.lost = np.zeros(k)
        self.share = 1.0  # of labels that changed in the last step
        self.sort = self.values.nbytes > _SORT  # each thread's own would be too large: summed afterwards, in their labels' order

    def start(self) -> dict[str, Any]:
        """What `Native.assign` needs to bring them up to date."""
        kept = self.mass is not None and self.share < 0.25
        if not kept:
            self.values[:], self.counts[:], self.mass = 0, 0, None
        self.moves[:] = 0
        if self.sort:
            return {"sums": None, "counts": None}
        return {"sums": self.values, "counts": self.counts, "moves": self.moves if self.share < 0.5 else None, "kept": kept}

    def add(self, at: slice, piece: Array, labels: Array, moves: Array | None = None) -> None:
        """The rows of a piece, in their labels' order."""
        self.problem.lib.update(piece, labels[at], self.values, self.counts, self.problem._weights(at), self.problem.n, moves)

    def finish(self, labels: Array, changed: int) -> None:
        """After the step."""
        if self.mass is not None:
            self.settle(labels)
        elif self.moves[:, 2].any():
            self._measured()
        self.share = changed / self.problem.rows

    def settle(self, labels: Array) -> None:
        """Account for what was moved; anew where that may have lost too much."""
        assert self.mass is not None
        weights = self.problem.weights
        rows = self.counts if weights is None else np.bincount(labels, weights > 0, len(self.counts))
        moved, parts = self.moves[:, 0] + self.moves[:, 1], self.problem.n * self.problem.data.pieces
        self.lost += np.where(self.moves[:, 2] > 0, self.moves[:, 2] * moved + parts * (self.mass + moved), 0)
        self.mass += self.moves[:, 0] - self.moves[:, 1]
        for values in (self.values, self.counts, self.mass, self.lost):
            values[rows == 0] = 0
        if not (np.isfinite(self.lost) & (self.lost <= 8 * (rows + 64) * self.mass)).all():
            self.values[:], self.counts[:], self.moves[:] = 0, 0, 0
            for at, piece in self.problem.data:
                self.add(at, piece, labels, self.moves)
            self._measured()

    def _measured(self) -> None:
        """Sums were made of rows that moves has the sizes of."""
        self.mass, self.lost = self.moves[:, 0].copy(), self.moves[:, 2] * self.moves[:, 0]


class _Bounds:
    """Steps that skip what cannot have changed.

    Near centres share a group, so centres stand in an order of their own: what is at place p here is number order[p] outside.  Labels are
    places while it lasts.
    """

    def __init__(self, problem: _Problem, centres: Array) -> None:
        lib = problem.lib
        assert isinstance(lib, kernels.Native)
        self.problem, self.lib = problem, lib
        self.order = _by_place(centres).astype(np.int32)
        self.edges = _edges(lib, len(centres), problem.width)
        self.upper = np.zeros(problem.rows, problem.data.dtype)
        self.lower = np.zeros((problem.rows, len(self.edges) - 1), problem.data.dtype)
        self.sums = _Sums(problem, len(centres))
        self.sums.mass = np.zeros(len(centres))
        self.before = centres
        self.looked, self.steps = 1.0, 0

    def assign(self, centres: Array, labels: Array) -> tuple[Array, Array, int]:
        """Brings labels, which are places, up to date (the first time it gets numbers); sums, weights, how many changed."""
        problem, type_ = self.problem, self.problem.data.dtype.type
        moved = _distance(centres, self.before)[self.order].astype(type_) * type_(1 + 1e-6)
        mine, changed, looked = np.ascontiguousarray(centres[self.order]), 0, 0
        first, sums = labels.copy() if self.steps == 0 else None, self.sums
        if first is not None:
            labels[:] = -1
        sums.moves[:] = 0
        for at, piece in problem.data:
            found = self.lib.bounded(
                piece, problem.shift, mine, self.edges, labels[at], self.upper[at], self.lower[at], moved, sums.values,
                sums.counts, sums.moves, problem._weights(at), problem.n,
            )  # fmt: skip
            changed, looked = changed + found[0], looked + found[1]
        if first is not None:
            changed = int(np.count_nonzero(self.order[labels] != first))
        self.before, self.looked, self.steps = centres, looked / problem.rows / (len(self.edges) - 1), self.steps + 1
        sums.settle(labels)
        values, counts = np.empty_like(sums.values), np.empty_like(sums.counts)
        values[self.order], counts[self.order] = sums.values, sums.counts
        return values, counts, changed


def _distance(a: Array, b: Array) -> Array:
    return np.sqrt(((a.astype(np.float64) - b) ** 2).sum(1))


def _by_place(centres: Array) -> Array:
    """An order in which near centres are neighbours: halves along the widest axis, stable."""
    parts, done = [np.arange(len(centres))], []
    while parts:
        part = parts.pop()
        if len(part) <= 12:
            done.append(part)
            continue
        axis = centres[part].var(0).argmax()
        part = part[np.argsort(centres[part, axis], kind="stable")]
        half = (len(part) // 2 + 11) // 12 * 12
        parts += [np.sort(part[half:]), np.sort(part[:half])]
    return np.concatenate([p for p in done if len(p)])


def _edges(lib: kernels.Native, k: int, width: int) -> Array:
    """First tile of each group, (groups + 1,): so many groups that bounds stay under a tenth of the data."""
    tiles = len(lib.tiles(k)) - 1
    return np.unique(np.linspace(0, tiles, min(tiles, max(1, width // 10 - 2)) + 1).astype(np.int32))


class _Forecast:
    """Whether bounds would pay, from a sample of rows.

    A full step costs K d for a row; one with bounds what it looks at, and a fixed amount.  Switching costs a step in full precision that
    keeps two scores: worth it once as much would have been saved (as in renting skis until the rents have reached the price).
    """

    FIXED, PRICE, EVERY = 6000, 0.4, 3  # measured: benchmarks/kmeans.py

    def __init__(self, problem: _Problem, k: int, seed: int) -> None:
        self.problem, self.saved = problem, 0.0
        many = min(256, problem.rows // 128)
        self.worth = isinstance(problem.lib, kernels.Native) and many >= 32 and k * problem.width > 2 * self.FIXED
        if self.worth:
            rows = np.sort(np.random.default_rng(seed).choice(problem.rows, many, replace=False))
            self.sample = _Problem(_Inside(problem.data.take(rows)), None, 1, problem.shift)

    def pays(self, step: int, before: Array, after: Array) -> bool:
        """Whether to switch after this step, which moved the centres from ``before``."""
        if not self.worth or step % self.EVERY or self.problem.filtered(len(before)):  # beside that filter they never paid
            return False
        tried, places = _Bounds(self.sample, before), np.empty(self.sample.rows, np.int32)
        for centres in (before, after):
            tried.assign(centres, places)
        # bounds loosen from step to step: what is looked at first doubles
        self.saved += self.EVERY * max(0.0, 1 - 2 * tried.looked - self.FIXED / (len(before) * self.problem.width))
        return self.saved > self.PRICE


class KMeans(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClusterMixin, BaseEstimator):
    """k-means clustering by Lloyd's iterations, exact in every step.

    Parameters and attributes follow ``sklearn.cluster.KMeans``.  X may also be a ``numpy.memmap`` or anything with ``shape``, ``dtype`` and
    slices of rows (HDF5, Zarr): it is then read piece by piece, the next one while this one is worked on.

    Args:
        n_clusters: K.
        init: "k-means++", "random", centres (K, d), or a function (X, n_clusters, random_state) to centres.
        n_init: starts, of which the best stays; "auto": 1 for k-means++ and given centres, 10 for others.
        max_iter: steps at most.
        tol: it ends when centres move less than this, relative to the data's mean variance.
        verbose: 1 prints each step's number, movement and how it was made.
        random_state: seed.
        algorithm: "auto" switches bounds on when they pay; "lloyd" never; "bounds" from the second step on.
        n_threads: None is every core.

    Attributes:
        cluster_centers_ (K, d), labels_ (n,), inertia_, n_iter_, n_features_in_.
    """

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        init: Any = "k-means++",
        n_init: int | Literal["auto"] = "auto",
        max_iter: int = 300,
        tol: float = 1e-4,
        verbose: int = 0,
        random_state: Any = None,
        algorithm: Literal["auto", "lloyd", "bounds"] = "auto",
        n_threads: int | None = None,
    ) -> None:
        self.n_clusters = n_clusters
        self.init = init
        self.n_init = n_init
        self.max_iter = max_iter
        self.tol = tol
        self.verbose = verbose
        self.random_state = random_state
        self.algorithm = algorithm
        self.n_threads = n_threads

    def fit(self, X: Any, y: Any = None, sample_weight: ArrayLike | None = None) -> KMeans:
        """Find centres of X (n, d).

        Args:
            X: finite numbers; float32 and float64 stay what they are, others become float64.
            y: ignored.
            sample_weight: (n,).

        Raises:
            ValueError: NaN or infinity, wrong shapes, fewer rows than clusters, options that do not exist.
        """
        self._check()
        data = self._data(X, reset=True)
        n = data.shape[0]
        if n < self.n_clusters:
            raise ValueError(f"n_samples={n} should be >= n_clusters={self.n_clusters}.")
        weights = None
        if sample_weight is not None:
            weights = _check_sample_weight(sample_weight, np.empty((n, 1), data.dtype), dtype=data.dtype, ensure_non_negative=True)
        problem = _Problem(data, weights, self.n_threads)
        random = check_random_state(self.random_state)
        given = not isinstance(self.init, str) and not callable(self.init)
        starts = self.n_init if self.n_init != "auto" else 1 if given or self.init == "k-means++" else 10
        tol = self.tol * problem.variance
        best: tuple[float, Array, Array, int] | None = None
        for _ in range(1 if given else int(starts)):
            centres = self._start(problem, X, random)
            found = self._lloyd(problem, centres, tol, int(random.randint(2**31 - 1)))
            if best is None or found[0] < best[0]:
                best = found
        assert best is not None
        self.inertia_, self.cluster_centers_, self.labels_, self.n_iter_ = best
        self._n_features_out = self.n_clusters
        return self

    def predict(self, X: Any) -> Array:
        """Number of the nearest centre of each row of X (n, d): (n,) int32."""
        check_is_fitted(self)
        data = self._data(X, reset=False)
        return self._labels(data)[2]

    def transform(self, X: ArrayLike) -> Array:
        """Distances of X (n, d) to the centres, (n, K)."""
        check_is_fitted(self)
        return euclidean_distances(validate_data(self, X, dtype=[np.float64, np.float32], reset=False), self.cluster_centers_)

    def score(self, X: Any, y: Any = None, sample_weight: ArrayLike | None = None) -> float:
        """Minus the inertia of X under the centres."""
        check_is_fitted(self)
        data = self._data(X, reset=False)
        weights = (
            None
            if sample_weight is None
            else _check_sample_weight(sample_weight, np.empty((data.shape[0], 1), data.dtype), dtype=data.dtype)
        )
        problem, centres, labels = self._labels(data, weights)
        return -problem.inertia(centres, labels)

    def _labels(self, data: _Inside | _Outside, weights: Array | None = None) -> tuple[_Problem, Array, Array]:
        centres, labels = self.cluster_centers_.astype(data.dtype), np.empty(data.shape[0], np.int32)
        for _, piece in data if isinstance(data, _Outside) else ():
            if not np.isfinite(piece).all():
                raise ValueError("Input X contains NaN or infinity.")
        problem = _Problem(data, weights, self.n_threads, centres.mean(0))
        problem.assign(centres, labels)
        return problem, centres, labels

    def _check(self) -> None:
        for name, least in (("n_clusters", 1), ("max_iter", 1)):
            if not (isinstance(getattr(self, name), int | np.integer) and getattr(self, name) >= least):
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be a whole number from {least} on")
        if self.n_init != "auto" and not (isinstance(self.n_init, int | np.integer) and self.n_init >= 1):
            raise ValueError(f"n_init = {self.n_init!r}: must be 'auto' or a whole number from 1 on")
        if not self.tol >= 0:
            raise ValueError(f"tol = {self.tol!r}: must not be negative")
        if self.algorithm not in ("auto", "lloyd", "bounds"):
            raise ValueError(f"algorithm = {self.algorithm!r}: accepted are 'auto', 'lloyd' and 'bounds'")
        if isinstance(self.init, str) and self.init not in ("k-means++", "random"):
            raise ValueError(f"init = {self.init!r}: accepted are 'k-means++', 'random', centres, or a function")

    def _data(self, X: Any, reset: bool) -> _Inside | _Outside:
        outside = isinstance(X, np.memmap) or not (isinstance(X, np.ndarray) or hasattr(X, "__array__") or isinstance(X, list | tuple))
        outside = outside and not scipy.sparse.issparse(X)
        if outside and hasattr(X, "shape") and hasattr(X, "dtype") and len(X.shape) == 2 and np.dtype(X.dtype).kind in "fiu" and X.shape[0]:
            if reset:
                self.n_features_in_ = X.shape[1]
            elif X.shape[1] != self.n_features_in_:
                raise ValueError(f"X has {X.shape[1]} features, but KMeans is expecting {self.n_features_in_} features as input")
            return _Outside(X, np.dtype(np.float32) if np.dtype(X.dtype) in (np.float32, np.float16) else np.dtype(np.float64))
        return _Inside(validate_data(self, X, dtype=[np.float64, np.float32], reset=reset))

    def _start(self, problem: _Problem, X: Any, random: np.random.RandomState) -> Array:
        k, dtype = self.n_clusters, problem.data.dtype
        if callable(self.init) or not isinstance(self.init, str):
            made = self.init(X, k, random_state=random) if callable(self.init) else self.init
            centres = np.array(made, dtype=dtype, order="C")
            if centres.shape != (k, problem.width):
                raise ValueError(f"init has shape {centres.shape}; must be ({k}, {problem.width})")
            if not np.isfinite(centres).all():
                raise ValueError("init contains NaN or infinity")
            return centres
        p = None if problem.weights is None else problem.weights.astype(np.float64) / problem.weights.sum(dtype=np.float64)
        if self.init == "random":
            return np.ascontiguousarray(problem.data.take(random.choice(problem.rows, k, replace=False, p=p)))
        data, weights = problem.data, problem.weights
        if isinstance(data, _Outside) and problem.rows > _SEEDS * k:
            rows = np.sort(random.choice(problem.rows, _SEEDS * k, replace=False))
            data, weights = _Inside(data.take(rows)), None if weights is None else weights[rows]
        x = data.x if isinstance(data, _Inside) else data.take(np.arange(problem.rows))
        return plus_plus(x, k, random, weights, problem.n)

    def _lloyd(self, problem: _Problem, centres: Array, tol: float, seed: int) -> tuple[float, Array, Array, int]:
        labels = np.full(problem.rows, -1, np.int32)
        native = isinstance(problem.lib, kernels.Native)
        full, bounds = _Sums(problem, len(centres)), None
        forecast = _Forecast(problem, len(centres), seed) if self.algorithm == "auto" else None
        step, settled = 0, False
        for step in range(1, self.max_iter + 1):
            if bounds:
                sums, counts, changed = bounds.assign(centres, labels)
            else:
                changed = problem.assign(centres, labels, full)
                sums, counts = full.values, full.counts
            if (counts == 0).any():
                sums, counts = problem.relocate(centres, bounds.order[labels] if bounds else labels, sums, counts)
            after = problem.average(centres, sums, counts)
            moved = float((_distance(after, centres) ** 2).sum())
            if self.verbose:
                print(f"step {step}: centres moved {moved:.6g}" + (f", bounds looked at {bounds.looked:.1%}" if bounds else ""))
            settled = changed == 0
            if settled:
                break
            if bounds and forecast and bounds.steps > 1 and bounds.looked > 0.8:
                labels[:] = bounds.order[labels]
                full, bounds = _Sums(problem, len(centres)), None
            elif not bounds and native and (forecast.pays(step, centres, after) if forecast else self.algorithm == "bounds"):
                bounds = _Bounds(problem, after)
            centres = after
            if moved <= tol:
                break
        if not settled or bounds:
            # labels are always those of the centres that are returned, by the one full step
            problem.assign(centres, labels)
        return problem.inertia(centres, labels), centres, labels, step

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def plus_plus(x: Array, k: int, random: np.random.RandomState, weights: Array | None = None, n_threads: int | None = None) -> Array:
    """Centres (k, d) by greedy k-means++: each the best of 2 + log k rows, drawn with probability as their weighted squared distance."""
    lib, threads = kernels.load(), kernels.threads(n_threads)
    n, trials = len(x), 2 + int(np.log(k))
    near = np.full(n, np.finfo(x.dtype).max / 4, x.dtype)
    centres = np.empty((k, x.shape[1]), x.dtype)
    mass = None if weights is None else weights / weights.sum(dtype=np.float64)
    chosen = int(random.choice(n, p=mass))
    for i in range(k):
        centres[i] = x[chosen]
        blocks = np.cumsum(lib.take(x, centres[i], near, weights, threads))
        if i + 1 == k:
            break
        if not blocks[-1] > 0:  # every row is a centre already
            chosen = int(random.randint(n))
            continue
        drawn = []
        for point in random.uniform(size=trials) * blocks[-1]:
            block = min(int(np.searchsorted(blocks, point, side="right")), len(blocks) - 1)
            rows = slice(block * kernels.BLOCK, (block + 1) * kernels.BLOCK)
            inner = np.cumsum(near[rows] if weights is None else near[rows] * weights[rows], dtype=np.float64)
            inner += blocks[block] - inner[-1]
            drawn.append(min(rows.start + int(np.searchsorted(inner, point, side="right")), n - 1))
        chosen = drawn[int(lib.potential(x, centres[0], np.ascontiguousarray(x[drawn]), near, weights, threads).argmin())]
    return centres


def kmeans_batched(
    x: Any,
    n_clusters: int,
    init: Any = None,
    max_iter: int = 100,
    tol: float = 1e-4,
    random_state: Any = None,
    n_threads: int | None = None,
) -> tuple[Any, Any, Any]:
    """k-means of many independent problems of one size: one call, a problem a thread.

    Args:
        x: (problems, n, d), NumPy or torch; a tensor on a GPU is worked on there.
        n_clusters, max_iter, tol, random_state, n_threads: as in `KMeans`.
        init: centres (problems, K, d); None: k-means++.

    Returns:
        Labels (problems, n) int32, centres (problems, K, d), inertia (problems,): of x's kind, on its device.

    Raises:
        ValueError: wrong shapes, NaN or infinity.
    """
    torch_like = hasattr(x, "detach")
    if torch_like and x.device.type == "cuda":
        from . import kmeans_triton

        return kmeans_triton.fit(x, n_clusters, init, max_iter, tol, random_state)
    data = np.ascontiguousarray(x.detach().numpy() if torch_like else x)
    data = data if data.dtype in (np.float32, np.float64) else data.astype(np.float64)
    if data.ndim != 3 or 0 in data.shape:
        raise ValueError(f"x has shape {data.shape}; must be (problems, n, d), none of them 0")
    if not np.isfinite(data).all():
        raise ValueError("x contains NaN or infinity")
    problems, n, d = data.shape
    if not 1 <= n_clusters <= n:
        raise ValueError(f"n_clusters = {n_clusters!r}: must be between 1 and the {n} rows of a problem")
    random, threads = check_random_state(random_state), kernels.threads(n_threads)
    if init is None:
        centres = np.stack([plus_plus(rows, n_clusters, random, None, 1) for rows in data])
    else:
        centres = np.array(init.detach().cpu().numpy() if hasattr(init, "detach") else init, dtype=data.dtype, order="C")
        if centres.shape != (problems, n_clusters, d):
            raise ValueError(f"init has shape {centres.shape}; must be {(problems, n_clusters, d)}")
    labels, inertia = np.empty((problems, n), np.int32), np.empty(problems)
    lib = kernels.load()
    if isinstance(lib, kernels.Native):
        limits = (tol * data.var(1).mean(1)).astype(data.dtype)
        lib.lloyd(data, centres, max_iter, limits, labels, inertia, np.empty(problems, np.int32), threads)
    else:
        for p, rows in enumerate(data):
            one = KMeans(n_clusters, init=centres[p], max_iter=max_iter, tol=tol, algorithm="lloyd").fit(rows)
            labels[p], centres[p], inertia[p] = one.labels_, one.cluster_centers_, one.inertia_
    if torch_like:
        import torch

        return torch.from_numpy(labels), torch.from_numpy(centres), torch.from_numpy(inertia)
    return labels, centres, inertia
