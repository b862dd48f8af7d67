"""Linear regression from many sources of unknown, unequal noise: the subset-of-signals model.

n sources measure ``y_i = <x_i, beta> + noise`` with unknown standard deviations; at least m of them are quiet (at most ``unit``), the
others arbitrary.  Two estimators, each with what it is good at:

* **least absolute deviations** meets the rate sqrt(n d) / m for random design that is independent of the noise and of which sources are
  quiet (derived; it may fail where the quiet set depends on x, and it breaks at m about sqrt(n d));
* a **scale mixture**: an unknown distribution of scales on a log grid from ``unit`` upwards, by EM, and weighted least squares by
  each source's posterior.  Without the floor at ``unit`` it would lock on residuals that the first fit interpolates.

``method="auto"`` keeps the one that gives held-out data the higher likelihood.  The rate is that of the source's abstract; no public text of
its proof or algorithm was found.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import scipy.linalg.blas
import scipy.optimize
import scipy.sparse
from numpy.typing import ArrayLike, NDArray
from scipy.special import logsumexp
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted, check_random_state, validate_data

Array = NDArray[np.float64]
Index = NDArray[np.signedinteger[Any]]
_ROWS = 4096  # of a block: X is never copied whole
_MANY = 100_000  # rows from which on a part of them decides what only has to be decided roughly
_GRID = 8192


def gram(x: Array, weight: Array, target: Array) -> tuple[Array, Array]:
    """``X' W X`` (d, d) and ``X' W target`` (d,) for weights from 0 on, block by block."""
    d = x.shape[1]
    square, right = np.zeros((d, d), order="F"), np.zeros(d)
    for i in range(0, len(x), _ROWS):
        root = np.sqrt(weight[i : i + _ROWS])
        rows = x[i : i + _ROWS] * root[:, None]
        square = scipy.linalg.blas.dsyrk(1.0, rows.T, beta=1.0, c=square, overwrite_c=True)  # the upper half
        right += rows.T @ (target[i : i + _ROWS] * root)
    return np.triu(square) + np.triu(square, 1).T, right


def solve(square: Array, right: Array) -> Array:
    """Least-squares solution of normal equations; of minimal norm where they are singular."""
    scale = np.sqrt(np.clip(np.diag(square), 1e-300, None))
    return np.linalg.lstsq(square / scale / scale[:, None], right / scale, rcond=1e-12)[0] / scale


def least_absolute(x: Array, y: Array, max_iter: int = 200, tol: float = 1e-9, rough: bool = False) -> Array:
    """argmin_b sum_i |y_i - <x_i, b>|: exactly, as a linear program, up to 4,000 rows; else by reweighted least squares, smoothed ever less.

    ``rough``: a start for something else; of very many rows a part is enough.
    """
    n, d = x.shape
    if rough and n > _MANY:
        part = np.sort(np.random.default_rng(0).choice(n, _MANY // 2, replace=False))
        return least_absolute(x[part], y[part], tol=1e-6)
    if n <= 4000:
        cost = np.concatenate([np.zeros(d), np.ones(2 * n)])
        each = scipy.sparse.identity(n, format="csc")
        equal = scipy.sparse.hstack([scipy.sparse.csc_matrix(x), each, -each])
        size = float(np.abs(y).max()) or 1.0
        found = scipy.optimize.linprog(cost, A_eq=equal, b_eq=y / size, bounds=[(None, None)] * d + [(0, None)] * 2 * n, method="highs")
        if found.status == 0:
            return found.x[:d] * size
    b = solve(*gram(x, np.ones(n), y))
    residual = np.abs(y - x @ b)
    size = float(np.median(residual)) or float(residual.mean())
    if size == 0.0:
        return b
    eps = size
    for _ in range(max_iter):
        after = solve(*gram(x, 1 / np.maximum(residual, eps), y))
        residual = np.abs(y - x @ after)
        moved = np.linalg.norm(x[:1000] @ (after - b)) / (np.linalg.norm(x[:1000] @ after) + size)
        b = after
        if moved < tol and eps <= 1e-6 * size:
            break
        eps = max(0.7 * eps, 1e-9 * size)
    return b


def _by_source(x: Array, residual: Array, index: Index) -> Array:
    """Sum of residual times row of each source, (sources, d)."""
    products = x * residual[:, None]
    if len(products) == index.max() + 1:
        return products[np.argsort(index, kind="stable")] if (np.diff(index) != 1).any() else products
    order = np.argsort(index, kind="stable")
    return np.add.reduceat(products[order], np.searchsorted(index[order], np.arange(index.max() + 1)))


def _sum(index: Index, values: Array | None = None) -> Array:
    """Sum of the values (or number of rows) of each source."""
    return np.asarray(np.bincount(index, values), dtype=np.float64)


class _Mixture:
    """Scales on a log grid with weights; what it says depends on a source's residuals through their square sum and number alone."""

    def __init__(self, low: float, high: float, scales: int) -> None:
        self.scale = np.geomspace(low, max(high, 2 * low), scales)
        self.weight = np.full(scales, 1 / scales)

    def joint(self, square: Array, count: Array) -> Array:
        """log p(residuals, scale j) (n, scales)."""
        log = np.log(self.scale)
        return -0.5 * square[:, None] / self.scale**2 - count[:, None] * (log + 0.5 * np.log(2 * np.pi)) + np.log(self.weight + 1e-300)

    def posterior(self, square: Array, count: Array) -> Array:
        """(n, scales), rows sum to one."""
        log = self.joint(square, count)
        return np.exp(log - logsumexp(log, axis=1, keepdims=True))

    def step(self, square: Array, count: Array) -> Array:
        """One EM update of the weights; returns each source's expected precision E[1 / scale^2], (n,).

        Many sources of one row each are looked up on a fine grid of |residual| (relative error about 1e-6).
        """
        if len(square) > 4 * _GRID and count.max() == 1:
            size = 0.5 * np.log(np.maximum(square, (1e-3 * self.scale[0]) ** 2))
            grid = np.linspace(size.min(), size.max() + 1e-12, _GRID)
            posterior = self.posterior(np.exp(2 * grid), np.ones(_GRID))
            place = (size - grid[0]) / (grid[1] - grid[0])
            left = np.minimum(place.astype(np.int64), _GRID - 2)
            part = place - left
            many = np.bincount(left, 1 - part, _GRID) + np.bincount(left + 1, part, _GRID)
            self.weight = many @ posterior / len(square)
            table = posterior @ self.scale**-2.0
            return table[left] * (1 - part) + table[left + 1] * part
        posterior = self.posterior(square, count)
        self.weight = posterior.mean(0)
        return posterior @ self.scale**-2.0

    def density(self, square: Array, count: Array) -> float:
        """Mean log likelihood of a source."""
        return float(np.mean(logsumexp(self.joint(square, count), axis=1)))


class SubsetOfSignals(RegressorMixin, BaseEstimator):
    """Linear regression when most sources may be arbitrarily noisy.

    Args:
        unit: standard deviation up to which a source counts as quiet; None takes it from the data (the scale that the quietest tenth
            of residuals of a first fit has).
        method: "auto" (held-out likelihood decides), "mixture" or "absolute".
        fit_intercept: whether to centre.
        scales: points of the grid of scales.
        max_iter, tol: of EM, which ends when coefficients move by less than ``tol`` standard errors.
        random_state: of the held-out split.

    Attributes:
        coef_ (d,), intercept_, std_error_ (d,): estimates and their standard errors.
        scale_ (sources,): posterior mean scale of each source.
        quiet_ (sources,): posterior probability that its scale is at most twice the unit.
        unit_, method_, n_iter_, n_features_in_.
    """

    def __init__(
        self,
        unit: float | None = None,
        method: Literal["auto", "mixture", "absolute"] = "auto",
        fit_intercept: bool = True,
        scales: int = 40,
        max_iter: int = 200,
        tol: float = 1e-3,
        random_state: int | None = 0,
    ) -> None:
        self.unit = unit
        self.method = method
        self.fit_intercept = fit_intercept
        self.scales = scales
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike, source: ArrayLike | None = None) -> SubsetOfSignals:
        """Estimate from X (n, d) and y (n,).

        Args:
            X, y: finite numbers.
            source: which source each row is from (n,), any hashable; rows of a source share its scale.  None: a source a row.

        Raises:
            ValueError: wrong options, shapes, NaN or infinity.
        """
        if self.method not in ("auto", "mixture", "absolute"):
            raise ValueError(f"method = {self.method!r}: accepted are 'auto', 'mixture' and 'absolute'")
        if self.unit is not None and not self.unit > 0:
            raise ValueError(f"unit = {self.unit!r}: must be above 0")
        x, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2)
        y = np.asarray(y, dtype=np.float64)
        index = np.arange(len(y)) if source is None else np.unique(np.asarray(source), return_inverse=True)[1].reshape(-1)
        if len(index) != len(y):
            raise ValueError(f"source has {len(index)} entries for {len(y)} rows")
        wide = np.column_stack([x, np.ones(len(x))]) if self.fit_intercept else x
        methods = ("mixture", "absolute") if self.method == "auto" else (self.method,)
        self.method_ = methods[0] if len(methods) == 1 else self._choose(wide, y, index)
        b = least_absolute(wide, y, rough=self.method_ == "mixture")
        self.unit_ = self._unit(np.abs(y - wide @ b), wide.shape[1])
        b, mixture, self.n_iter_ = self._estimate(wide, y, index, b, self.method_)
        self._describe(wide, y, index, b, mixture)
        return self

    def predict(self, X: ArrayLike) -> Array:
        """<x, coef_> + intercept_ of X (n, d), (n,)."""
        check_is_fitted(self)
        return validate_data(self, X, dtype=np.float64, reset=False) @ self.coef_ + self.intercept_

    def _unit(self, residual: Array, width: int) -> float:
        if self.unit is not None:
            return float(self.unit)
        # the first fit interpolates as many residuals as it has coefficients; of the others a tenth are the quietest
        kept = np.sort(residual)[width:] if len(residual) > 2 * width else np.sort(residual)
        tenth = kept[: max(1, len(kept) // 10)]
        # |N(0, s)| restricted to its quietest share is nearly uniform, so this is generous: a floor, not an estimate
        return float(max(tenth.max(), 1e-12 * (1 + residual.max()), 1e-300))

    def _estimate(self, x: Array, y: Array, index: Index, b: Array, method: str) -> tuple[Array, _Mixture, int]:
        """Coefficients by one method, with the mixture that describes its residuals."""
        count = _sum(index)
        square = _sum(index, (y - x @ b) ** 2)
        mixture = _Mixture(self.unit_, 1.5 * float(np.sqrt(square.max())), self.scales)
        done = 0
        for done in range(1, self.max_iter + 1):
            for _ in range(3):  # the weights move slowly, and a step of theirs is cheap
                precision = mixture.step(square, count)
            if method == "absolute":
                if done >= 17:
                    break
                continue
            information, right = gram(x, precision[index], y)
            after = solve(information, right)
            change = after - b
            moved = float(np.sqrt(np.clip(change @ information @ change, 0, None) / len(b)))  # in standard errors
            b, square = after, _sum(index, (y - x @ after) ** 2)
            if moved < self.tol:
                break
        return b, mixture, done

    def _choose(self, x: Array, y: Array, index: Index) -> str:
        """The method whose coefficients give a held-out fifth of the sources the higher likelihood."""
        sources = int(index.max()) + 1
        order = check_random_state(self.random_state).permutation(sources)
        if len(index) > _MANY:  # a part of the sources decides
            order = order[: max(5, sources * _MANY // len(index))]
        fold = np.full(sources, -1)
        fold[order] = 0
        fold[order[: max(1, len(order) // 5)]] = 1
        out, train = fold[index] == 1, fold[index] == 0
        if train.sum() < 2 * x.shape[1]:
            return "absolute"
        again = np.unique(index[train], return_inverse=True)[1].reshape(-1)
        start = least_absolute(x[train], y[train])
        self.unit_ = self._unit(np.abs(y[train] - x[train] @ start), x.shape[1])
        score = {}
        for method in ("mixture", "absolute"):
            b, mixture, _ = self._estimate(x[train], y[train], again, start, method)
            there = np.unique(index[out], return_inverse=True)[1].reshape(-1)
            score[method] = mixture.density(_sum(there, (y[out] - x[out] @ b) ** 2), _sum(there))
        return max(score, key=lambda m: score[m])

    def _describe(self, x: Array, y: Array, index: Index, b: Array, mixture: _Mixture) -> None:
        residual = y - x @ b
        posterior = mixture.posterior(_sum(index, residual**2), _sum(index))
        self.scale_ = posterior @ mixture.scale
        self.quiet_ = posterior[:, mixture.scale <= 2 * self.unit_].sum(1)
        one = np.zeros(len(y))
        if self.method_ == "mixture":
            # a source's weight depends on its own residuals: the score's slope is the expected precision less what the precision varies
            precision = posterior @ mixture.scale**-2.0
            varies = np.clip(posterior @ mixture.scale**-4.0 - precision**2, 0, None)
            scores = _by_source(x, residual, index)
            bread = gram(x, precision[index], one)[0]
            slope = bread - gram(scores, varies, np.zeros(len(scores)))[0]
            meat = gram(scores, precision**2, np.zeros(len(scores)))[0]
            if np.linalg.eigvalsh(slope)[0] > 0:
                bread = slope
        else:
            # the slope of E sign(residual) in b is twice each source's density at 0
            density = (posterior / mixture.scale).sum(1)[index] / np.sqrt(2 * np.pi)
            bread, meat = gram(x, 2 * density, one)[0], gram(x, np.ones(len(y)), one)[0]
        inverse = np.linalg.pinv(bread, hermitian=True)
        error = np.sqrt(np.clip(np.diag(inverse @ meat @ inverse), 0, None))
        d = x.shape[1] - self.fit_intercept
        self.coef_, self.std_error_ = b[:d], error[:d]
        self.intercept_ = float(b[d]) if self.fit_intercept else 0.0

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True  # the common checks fit noise
        return tags
