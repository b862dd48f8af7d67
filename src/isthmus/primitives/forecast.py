"""Linear forecasting of low rank: reduced-rank regression, and filter banks whose size is their rank.

A forecast from the last L values of a channel is a matrix (L, H).  Here it is a *filter bank*: C filters of length l slide over the past in
steps of s (analysis), and their R = C (1 + floor((L - l) / s)) outputs are mixed into the horizon (synthesis).  R bounds the rank of the
map; a forecast takes R (l + H) multiply-adds, a dense map L H.  With l = L it is reduced-rank regression and has a closed form; else filters
and synthesis are found in turns, each in closed form.

Everything is computed from *moments* X'X, X'Y, Y'Y and a count.  They add up: silos that share sums of moments fit what pooled data
would, exactly, in one round.

The past's mean is taken away and given back (reversible instance normalisation).  For a linear map the division by the standard
deviation, which usually goes with it, cancels.

*Derived*: no public text of the source was found.  The closed form is classical (Izenman 1975), its ridge version follows from
whitening with X'X + ridge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import scipy.linalg
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted

Array = NDArray[np.float64]
Centre = Literal["mean", "last", "none"]
_ROWS = 16384
RIDGES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


def windows(series: ArrayLike, lookback: int, horizon: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Every window of a series (T, channels), without a copy: pasts (n, channels, lookback) and futures (n, channels, horizon).

    Raises:
        ValueError: where the series is too short.
    """
    series = np.asarray(series)
    series = series[:, None] if series.ndim == 1 else series
    if series.ndim != 2 or len(series) < lookback + horizon or lookback < 1 or horizon < 1:
        raise ValueError(f"series {series.shape}: needs (T, channels) with T of at least lookback + horizon = {lookback + horizon}")
    seen = sliding_window_view(series, lookback + horizon, axis=0)
    return seen[..., :lookback], seen[..., lookback:]


def centre_of(past: NDArray[Any], kind: Centre) -> Array:
    """What is taken away before and given back after, (..., 1)."""
    if kind == "mean":
        return past.mean(-1, keepdims=True, dtype=np.float64)
    return past[..., -1:].astype(np.float64) * (kind == "last")


@dataclass(frozen=True)
class Moments:
    """X'X (L, L), X'Y (L, H), the diagonal of Y'Y (H,) and the number of rows; sums over silos are those of their union."""

    xx: Array
    xy: Array
    yy: Array
    n: int

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.xx + other.xx, self.xy + other.xy, self.yy + other.yy, self.n + other.n)

    def error(self, matrix: Array) -> float:
        """Mean squared error of the linear map (L, H)."""
        return float((self.yy.sum() - 2 * (matrix * self.xy).sum() + (matrix * (self.xx @ matrix)).sum()) / (self.n * len(self.yy)))


def _blocks(past: NDArray[Any], future: NDArray[Any], kind: Centre) -> Iterator[tuple[Array, Array]]:
    step = max(1, _ROWS // past.shape[1])
    for i in range(0, len(past), step):
        x, y = past[i : i + step], future[i : i + step]
        middle = centre_of(x, kind)
        yield (x - middle).reshape(-1, x.shape[-1]), (y - middle).reshape(-1, y.shape[-1])


def moments(past: NDArray[Any], future: NDArray[Any], kind: Centre = "mean") -> Moments:
    """Moments of pasts (n, channels, L) and futures (n, channels, H), each channel a row."""
    xx, xy = np.zeros((past.shape[-1],) * 2), np.zeros((past.shape[-1], future.shape[-1]))
    yy = np.zeros(future.shape[-1])
    for x, y in _blocks(past, future, kind):
        xx += x.T @ x
        xy += x.T @ y
        yy += (y * y).sum(0)
    return Moments(xx, xy, yy, past.shape[0] * past.shape[1])


def _penalised(m: Moments, ridge: float) -> Array:
    """X'X with a ridge relative to the data's mean power."""
    return m.xx + ridge * np.trace(m.xx) / len(m.xx) * np.eye(len(m.xx))


def dense(m: Moments, ridge: float) -> Array:
    """The full-rank map (L, H) of ridge regression."""
    return scipy.linalg.solve(_penalised(m, ridge), m.xy, assume_a="pos")


def reduced_rank(m: Moments, rank: int, ridge: float) -> tuple[Array, Array]:
    """The best map of that rank as factors (L, rank), (rank, H): the dense one, projected on the leading directions of its fitted values."""
    full = dense(m, ridge)
    fitted = full.T @ _penalised(m, ridge) @ full
    leading = np.linalg.eigh(fitted)[1][:, ::-1][:, :rank]
    return full @ leading, leading.T


def rank_report(train: Moments, test: Moments, ranks: Sequence[int] | None = None, ridge: float = 1e-4) -> dict[str, list[float]]:
    """Error against rank: what the series' intrinsic rank is.  ``rank``, ``train``, ``test`` (mean squared errors), ``energy`` (share of fitted
    variance).
    """
    full = dense(train, ridge)
    values, vectors = np.linalg.eigh(full.T @ _penalised(train, ridge) @ full)
    values, vectors = values[::-1].clip(0), vectors[:, ::-1]
    most = min(full.shape)
    chosen = [r for r in (ranks or (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, most)) if r <= most]
    out: dict[str, list[float]] = {"rank": [float(r) for r in chosen], "train": [], "test": [], "energy": []}
    for r in chosen:
        matrix = full @ vectors[:, :r] @ vectors[:, :r].T
        out["train"].append(train.error(matrix))
        out["test"].append(test.error(matrix))
        out["energy"].append(float(values[:r].sum() / values.sum()) if values.sum() else 1.0)
    return out


class FilterBank(RegressorMixin, BaseEstimator):
    """A linear forecaster of chosen rank, one map for all channels.

    Args:
        filters: C.  With one position (length None) this is the rank.
        length: l, of a filter; None: the whole lookback.
        stride: s, between its positions; None: the length, so that positions do not overlap.
        ridge: penalty relative to the data's mean power; None: the best of `RIDGES` on the validation part.
        centre: what is taken away before and given back after: the past's "mean", its "last" value, or "none".
        max_iter, tol: of the turns between filters and synthesis.

    Attributes:
        analysis_ (C, l), synthesis_ (R, H): filters, and how their outputs are mixed; outputs are ordered (filter, position).
        matrix_ (L, H): the whole map.
        rank_: R.  multiply_adds_: for one forecast of one channel.  parameters_: numbers that were fitted.
        ridge_, n_iter_, lookback_, horizon_.
    """

    def __init__(
        self,
        filters: int = 12,
        length: int | None = None,
        stride: int | None = None,
        ridge: float | None = None,
        centre: Centre = "mean",
        max_iter: int = 30,
        tol: float = 1e-5,
    ) -> None:
        self.filters = filters
        self.length = length
        self.stride = stride
        self.ridge = ridge
        self.centre = centre
        self.max_iter = max_iter
        self.tol = tol

    def fit(self, X: ArrayLike, Y: ArrayLike, validation: tuple[ArrayLike, ArrayLike] | None = None) -> FilterBank:
        """Fit to pasts X (n, channels, L) and futures Y (n, channels, H), in the order of time.

        Args:
            X, Y: as `windows` makes them.
            validation: pasts and futures that choose the ridge; None: the last fifth.

        Raises:
            ValueError: wrong shapes or options, NaN or infinity.
        """
        past, future = self._checked(X, Y)
        if validation is not None:
            held = moments(*self._checked(*validation), self.centre)
            return self.fit_moments(moments(past, future, self.centre), held)
        if self.ridge is not None:
            return self.fit_moments(moments(past, future, self.centre))
        cut = max(1, len(past) - len(past) // 5)
        fit, held = moments(past[:cut], future[:cut], self.centre), moments(past[cut:], future[cut:], self.centre)
        return self.fit_moments(fit, held if held.n else fit)

    def fit_moments(self, train: Moments, validation: Moments | None = None) -> FilterBank:
        """Fit from moments of silos, added up; the ridge is chosen on those of ``validation``.

        Raises:
            ValueError: wrong options, or no validation to choose the ridge on.
        """
        if self.ridge is None and validation is None:
            raise ValueError("ridge = None: needs validation moments to choose it on")
        length, stride = self._sizes(len(train.xx))
        tried = [(self._solve(train, length, stride, r), r) for r in (RIDGES if self.ridge is None else (self.ridge,))]
        score = lambda found: (validation or train).error(_map(found[0][0], found[0][1], stride, len(train.xx)))  # noqa: E731
        (self.analysis_, self.synthesis_, self.n_iter_), self.ridge_ = min(tried, key=score)
        self.lookback_, self.horizon_ = train.xy.shape
        self.matrix_ = _map(self.analysis_, self.synthesis_, stride, self.lookback_)
        self.rank_ = len(self.synthesis_)
        self.multiply_adds_ = self.rank_ * (length + self.horizon_)
        self.parameters_ = self.analysis_.size + self.synthesis_.size
        return self

    def predict(self, X: ArrayLike) -> Array:
        """Forecasts (n, channels, H) from pasts (n, channels, L)."""
        check_is_fitted(self)
        past = np.asarray(X)
        if past.ndim != 3 or past.shape[-1] != self.lookback_:
            raise ValueError(f"X has shape {past.shape}; must be (n, channels, {self.lookback_})")
        middle = centre_of(past, self.centre)
        length, stride = self._sizes(self.lookback_)
        seen = sliding_window_view(past - middle, length, axis=-1)[..., ::stride, :]  # (n, channels, positions, l)
        outputs = np.einsum("ncpl,fl->ncfp", seen, self.analysis_, optimize=True)
        return outputs.reshape(*past.shape[:2], -1) @ self.synthesis_ + middle

    def _sizes(self, lookback: int) -> tuple[int, int]:
        length = lookback if self.length is None else self.length
        stride = length if self.stride is None else self.stride
        if not 1 <= self.filters <= lookback:
            raise ValueError(f"filters = {self.filters!r}: must be between 1 and the lookback {lookback}")
        if not 1 <= length <= lookback:
            raise ValueError(f"length = {length!r}: must be between 1 and the lookback {lookback}")
        if stride < 1:
            raise ValueError(f"stride = {stride!r}: must be at least 1")
        if self.centre not in ("mean", "last", "none"):
            raise ValueError(f"centre = {self.centre!r}: accepted are 'mean', 'last' and 'none'")
        return length, stride

    def _checked(self, X: ArrayLike, Y: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
        past, future = np.asarray(X), np.asarray(Y)
        if past.ndim != 3 or future.ndim != 3 or past.shape[:2] != future.shape[:2] or 0 in past.shape or 0 in future.shape:
            raise ValueError(f"X {past.shape} and Y {future.shape} must be (n, channels, lookback) and (n, channels, horizon)")
        for name, values in (("X", past), ("Y", future)):
            step = max(1, _ROWS // values.shape[1])
            if any(not np.isfinite(values[i : i + step]).all() for i in range(0, len(values), step)):
                raise ValueError(f"{name} contains NaN or infinity")
        return past, future

    def _solve(self, m: Moments, length: int, stride: int, ridge: float) -> tuple[Array, Array, int]:
        """Filters (C, l), synthesis (R, H), turns."""
        lookback = len(m.xx)
        places = np.arange(0, lookback - length + 1, stride)[:, None] + np.arange(length)  # (positions, l)
        count, many = len(places), self.filters
        if length == lookback:
            left, right = reduced_rank(m, min(many, m.xy.shape[1]), ridge)
            return left.T.copy(), right, 0
        gram = _penalised(m, ridge)
        # a start: what the reduced-rank map looks for at any position
        left, _ = reduced_rank(m, min(max(many, 8), m.xy.shape[1]), ridge)
        filters = np.linalg.svd(np.concatenate([left[p] for p in places], 1), full_matrices=False)[0][:, :many].T
        if len(filters) < many:
            filters = np.concatenate([filters, np.random.default_rng(0).normal(size=(many - len(filters), length))])
        local, cross = gram[places[:, None, :, None], places[None, :, None, :]], m.xy[places]  # (p, q, l, l), (p, l, H)
        before = np.inf
        for turn in range(1, self.max_iter + 1):
            spread = _spread(filters, places, lookback)
            inner = spread.T @ gram @ spread
            synthesis = scipy.linalg.solve(
                inner + 1e-10 * np.trace(inner) / len(inner) * np.eye(len(inner)), spread.T @ m.xy, assume_a="pos"
            )
            loss = -float((synthesis * (spread.T @ m.xy)).sum())  # penalised squares, but for a constant
            if turn == self.max_iter or before - loss < self.tol * abs(loss):
                break
            before = loss
            mixed = synthesis.reshape(many, count, -1)
            weights = np.einsum("cph,dqh->cpdq", mixed, mixed, optimize=True)
            square = np.einsum("pqij,cpdq->cidj", local, weights, optimize=True).reshape(many * length, -1)
            right = np.einsum("pih,cph->ci", cross, mixed, optimize=True).reshape(-1)
            filters = scipy.linalg.solve(square + 1e-9 * np.trace(square) / len(square) * np.eye(len(square)), right, assume_a="pos")
            filters = filters.reshape(many, length)
            filters /= np.linalg.norm(filters, axis=1, keepdims=True).clip(1e-300)
        return filters, synthesis, turn


def _spread(filters: Array, places: NDArray[Any], lookback: int) -> Array:
    """The analysis as a matrix (lookback, R)."""
    out = np.zeros((lookback, len(filters), len(places)))
    for p, at in enumerate(places):
        out[at, :, p] = filters.T
    return out.reshape(lookback, -1)


def _map(filters: Array, synthesis: Array, stride: int, lookback: int) -> Array:
    places = np.arange(0, lookback - filters.shape[1] + 1, stride)[:, None] + np.arange(filters.shape[1])
    return _spread(filters, places, lookback) @ synthesis
