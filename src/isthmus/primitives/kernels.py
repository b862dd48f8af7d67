"""The compiled steps of k-means and nearest neighbours (``native/kernels.cpp``), and the same in NumPy where they were not built.

A wheel carries a library for each of several instruction sets; the best that this machine runs is loaded.  ``ISTHMUS_KERNELS`` names
another one: amx, avx512, avx2, base, numpy.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
LEVELS = ("base", "avx2", "avx512", "amx")
FOLDER = Path(__file__).parent / "native"
BLOCK = 4096  # rows, as in kernels.cpp
_BLOCK = 64 * 2**20  # bytes of a NumPy block of distances


def threads(n: int | None = None) -> int:
    """How many threads to use: n, or one for each core that this process may run on."""
    if n is not None:
        if n < 1:
            raise ValueError(f"n_threads = {n!r}: must be at least 1")
        return n
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _at(a: Array | None) -> ctypes.c_void_p | None:
    return None if a is None else ctypes.c_void_p(a.ctypes.data)


class Native:
    """The compiled library of one instruction set.

    Everywhere: x (n, d), float32 or float64, any strides; centres (k, d), C order, of x's type; shift (d,) is taken from both before they
    are multiplied; weights (n,) of x's type or None; sums (k, d) and counts (k,) are float64 and added to.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lib = ctypes.CDLL(str(FOLDER / f"kernels_{name}.so"))
        self.can_filter = bool(self._lib.half_products())
        for kind in ("f32", "f64"):
            getattr(self._lib, f"own_{kind}").restype = ctypes.c_double
            for name in ("assign", "bounded"):
                getattr(self._lib, f"{name}_{kind}").restype = ctypes.c_int64

    def _call(self, name: str, x: Array, *rest: Any) -> Any:
        size = x.itemsize
        if any(s % size for s in x.strides):
            x = np.ascontiguousarray(x)
        long = ctypes.c_int64
        head = _at(x), long(x.shape[0]), x.shape[1], long(x.strides[0] // size), long(x.strides[1] // size if x.shape[1] > 1 else 1)
        return getattr(self._lib, f"{name}_{'f32' if size == 4 else 'f64'}")(
            *head, *(_at(r) if isinstance(r, np.ndarray) else r for r in rest)
        )

    def assign(
        self, x: Array, shift: Array, centres: Array, labels: Array, sums: Array | None, counts: Array | None, weights: Array | None,
        filtered: bool, n: int, known: Array | None = None, moves: Array | None = None, kept: bool = False,
    ) -> tuple[int, int]:  # fmt: skip
        """Nearest centre of each row into labels (n,), int32; sums too unless None.

        known (n,), uint32: what a filtered step learns of the rows and the next one need not measure again; zeros at first.
        moves (k, 3), float64, added to: of the rows that were added to each sum, and of those that were taken from it, the sizes (weight
        times the sum of absolute values); and how many both are.  kept: labels and sums are those of the step before, and only rows whose label changes are moved.

        Returns the number of rows whose label is another than before, and of those that were scanned in full precision.
        """
        changed = np.zeros(1, np.int64)
        rest = weights, int(filtered), known, changed, n
        looked = self._call("assign", x, shift, centres, len(centres), labels, sums, counts, moves, int(kept), *rest)
        return int(changed[0]), looked

    def update(
        self, x: Array, labels: Array, sums: Array, counts: Array, weights: Array | None, n: int, moves: Array | None = None
    ) -> None:
        """Sums of the rows of each label, row by row in their labels' order."""
        self._call("update", x, labels, len(counts), sums, counts, moves, weights, n)

    def own(self, x: Array, centres: Array, labels: Array, weights: Array | None, out: Array | None, n: int) -> float:
        """Weighted sum of squared distances of rows to the centres of their labels; each of them into out (n,) unless None."""
        return self._call("own", x, centres, labels, weights, out, n)

    def take(self, x: Array, centre: Array, nearest: Array, weights: Array | None, n: int) -> Array:
        """nearest (n,) becomes min(nearest, squared distance to centre); returns weighted sums of it, for every BLOCK rows."""
        out = np.zeros(-(-len(x) // BLOCK))
        self._call("take", x, centre, nearest, weights, out, n)
        return out

    def potential(self, x: Array, shift: Array, candidates: Array, nearest: Array, weights: Array | None, n: int) -> Array:
        """Weighted sum of min(nearest, squared distance) for each candidate."""
        out = np.zeros(len(candidates))
        self._call("potential", x, shift, candidates, len(candidates), nearest, weights, out, n)
        return out

    def nearest(self, x: Array, shift: Array, memory: Array, k: int, n: int) -> tuple[Array, Array]:
        """Squared distances and numbers of the k nearest rows of memory, (n, k) each, nearest first."""
        who, far = np.empty((len(x), k), np.int64), np.empty((len(x), k), x.dtype)
        self._call("nearest", x, shift, memory, len(memory), k, who, far, n)
        return far, who

    def bounded(
        self, x: Array, shift: Array, centres: Array, edges: Array, labels: Array, upper: Array, lower: Array, moved: Array, sums: Array,
        counts: Array, moves: Array, weights: Array | None, n: int,
    ) -> tuple[int, int]:  # fmt: skip
        """A step with bounds; see the source.  Returns the rows whose label changed, and the pairs of row and group that were looked at."""
        changed = np.zeros(1, np.int64)
        rest = labels, upper, lower, moved, sums, counts, moves, weights, changed, n
        looked = self._call("bounded", x, shift, centres, len(centres), edges, len(edges) - 1, *rest)
        return int(changed[0]), looked

    def lloyd(self, x: Array, centres: Array, max_iter: int, tol: Array, labels: Array, inertia: Array, done: Array, n: int) -> None:
        """Whole fits of many small problems: x (problems, n, d) and centres (problems, k, d) in C order, tol (problems,) of their type."""
        sizes = ctypes.c_int64(x.shape[0]), ctypes.c_int64(x.shape[1]), x.shape[2]
        rest = _at(tol), _at(labels), _at(inertia), _at(done), n
        getattr(self._lib, f"lloyd_{'f32' if x.itemsize == 4 else 'f64'}")(_at(x), *sizes, _at(centres), centres.shape[1], max_iter, *rest)

    def limits(self, n: int) -> tuple[float, float]:
        """What the machine can do: multiply-adds in float32, flop/s, and reading, bytes/s."""
        repeats, data = 20_000_000, np.ones(2**26, np.float32)
        self._lib.flops_f32.restype = self._lib.read_f32.restype = ctypes.c_double
        best = [np.inf, np.inf]
        for _ in range(5):
            for i, work in enumerate(
                (
                    lambda: self._lib.flops_f32(ctypes.c_int64(repeats), n),
                    lambda: self._lib.read_f32(_at(data), ctypes.c_int64(len(data)), n),
                )
            ):
                started = time.perf_counter()
                work()
                best[i] = min(best[i], time.perf_counter() - started)
        return n * repeats * self._lib.flops_of_a_repeat() / best[0], data.nbytes / best[1]

    def tiles(self, k: int) -> Array:
        """First centre of each tile, and k: (tiles + 1,)."""
        edges = np.empty(k + 2, np.int32)
        return edges[: self._lib.tiles(k, _at(edges)) + 1]


class Plain:
    """The same in NumPy; no bounds, no filter."""

    name = "numpy"
    can_filter = False

    def _blocks(self, x: Array, k: int) -> Any:
        rows = max(1, _BLOCK // (8 * max(k, x.shape[1])))
        return (slice(i, i + rows) for i in range(0, len(x), rows))

    def assign(
        self, x: Array, shift: Array, centres: Array, labels: Array, sums: Array | None, counts: Array | None, weights: Array | None,
        filtered: bool, n: int, **kept: Any,
    ) -> tuple[int, int]:  # fmt: skip
        """As `Native.assign`; nothing is kept from step to step."""
        c, changed = centres - shift, 0
        half = (c.astype(np.float64) ** 2).sum(1) / 2
        for rows in self._blocks(x, len(c)):
            now = (half - (x[rows] - shift) @ c.T).argmin(1)
            changed += int((labels[rows] != now).sum())
            labels[rows] = now
        if sums is not None and counts is not None:
            self.update(x, labels, sums, counts, weights, n)
        return changed, len(x)

    def update(
        self, x: Array, labels: Array, sums: Array, counts: Array, weights: Array | None, n: int, moves: Array | None = None
    ) -> None:
        """As `Native.update`, without moves."""
        one = np.ones(len(x)) if weights is None else weights.astype(np.float64)
        counts += np.bincount(labels, one, len(counts))
        for j in range(x.shape[1]):
            sums[:, j] += np.bincount(labels, one * x[:, j], len(counts))

    def own(self, x: Array, centres: Array, labels: Array, weights: Array | None, out: Array | None, n: int) -> float:
        """As `Native.own`."""
        found = 0.0
        for rows in self._blocks(x, 1):
            square = ((x[rows] - centres[labels[rows]]).astype(np.float64) ** 2).sum(1)
            found += float(square.sum() if weights is None else square @ weights[rows])
            if out is not None:
                out[rows] = square
        return found

    def take(self, x: Array, centre: Array, nearest: Array, weights: Array | None, n: int) -> Array:
        """As `Native.take`."""
        for rows in self._blocks(x, 1):
            nearest[rows] = np.minimum(nearest[rows], ((x[rows] - centre) ** 2).sum(1))
        mass = nearest.astype(np.float64) if weights is None else nearest.astype(np.float64) * weights
        return np.add.reduceat(mass, np.arange(0, len(x), BLOCK))

    def potential(self, x: Array, shift: Array, candidates: Array, nearest: Array, weights: Array | None, n: int) -> Array:
        """As `Native.potential`."""
        return np.array([self.take(x, c, nearest.copy(), weights, n).sum() for c in candidates])

    def nearest(self, x: Array, shift: Array, memory: Array, k: int, n: int) -> tuple[Array, Array]:
        """As `Native.nearest`."""
        stored = memory - shift
        size, far, who = (stored**2).sum(1), [], []
        for rows in self._blocks(x, len(memory)):
            q = x[rows] - shift
            square = size - 2 * q @ stored.T
            some = np.argpartition(square, k - 1, axis=1)[:, :k]
            order = np.take_along_axis(some, np.lexsort((some, np.take_along_axis(square, some, 1)), axis=1), 1)
            far.append(np.maximum(np.take_along_axis(square, order, 1) + (q**2).sum(1, keepdims=True), 0))
            who.append(order)
        return np.concatenate(far), np.concatenate(who)


@functools.cache
def load(name: str | None = None) -> Native | Plain:
    """The library of that name; without one, what ISTHMUS_KERNELS says or the best that was built and runs here.

    Raises:
        ValueError: a name that there is not, or that was not built or does not run here.
    """
    name = name or os.environ.get("ISTHMUS_KERNELS") or None
    if name == "numpy":
        return Plain()
    if name is not None and name not in LEVELS:
        raise ValueError(f"ISTHMUS_KERNELS = {name!r}: accepted are {', '.join(LEVELS)}, numpy")
    there = available()
    if name is not None and name not in there:
        raise ValueError(f"ISTHMUS_KERNELS = {name!r}: not built or not for this machine; there are {', '.join([*there, 'numpy'])}")
    if there:
        return Native(name or there[-1])
    warnings.warn(
        "the compiled kernels were not built (no C++ compiler at installation): k-means and nearest neighbours run in NumPy, many times slower",
        RuntimeWarning,
        stacklevel=2,
    )
    return Plain()


def available() -> list[str]:
    """Names of the libraries that were built and run here, plainest first."""
    built = [name for name in LEVELS if (FOLDER / f"kernels_{name}.so").exists()]
    if "base" not in built:
        return []
    highest = ctypes.CDLL(str(FOLDER / "kernels_base.so")).level()
    return [name for name in built if LEVELS.index(name) <= highest]
