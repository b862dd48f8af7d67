"""An upper bound on a trained network's test error from k nearest neighbours in its last hidden layer, as a sum of measured terms.

For a network f trained on S, networks f_v trained without fold v, and g_v, the k-NN classifier in f_v's representation with the other
folds as memory, a union of events gives for every v

    R(f) <= P(g_v wrong) + P(f_v != g_v) + P(f != f_v):    decoder error + agreement + stability.

*Proved* (derived; the source's own form is not public): averaged over v, the sum of the three upper limits below holds with probability
1 - delta over the draw of S and U.  *Assumed*: S and the unlabelled points U are independent draws of one law; training is
deterministic (or its seed fixed before S was seen); k, the folds and all settings were fixed before.  Nothing is assumed about Lipschitz
constants, margins or norms.

With a representation that does not depend on S (a frozen encoder), nothing is trained again: decoder error comes from predicting each
point from those before it, stability is nothing.

Cross-validation plus stability, or a labelled hold-out, is at least as tight where it can be had: what this buys is the decomposition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import beta

from . import kernels

Array = NDArray[Any]


class Network(Protocol):
    """What `certify` needs of a trained model."""

    def predict(self, x: Array) -> Array:
        """Labels (n,) of x (n, ...)."""
        ...

    def represent(self, x: Array) -> Array:
        """Last hidden layer (n, h) of x (n, ...)."""
        ...


@dataclass(frozen=True)
class Term:
    """One part of the bound: what was measured, and its upper limit."""

    measured: float
    upper: float


@dataclass(frozen=True)
class Certificate:
    """``bound`` holds with probability 1 - delta; it is the sum of the terms' upper limits."""

    decoder: Term
    agreement: Term
    stability: Term
    delta: float

    @property
    def bound(self) -> float:
        """Upper limit of the test error; vacuous from 1 on."""
        return self.decoder.upper + self.agreement.upper + self.stability.upper


def nearest(memory: ArrayLike, queries: ArrayLike, k: int) -> tuple[Array, Array]:
    """The k nearest rows of memory (n, h) to each query (m, h): squared distances and numbers, both (m, k), nearest first.

    Exact, on the tiling of `KMeans`: no (m, n) matrix.
    """
    stored, asked = (np.ascontiguousarray(a, dtype=np.float32) for a in (memory, queries))
    if stored.ndim != 2 or asked.ndim != 2 or stored.shape[1] != asked.shape[1]:
        raise ValueError(f"memory {stored.shape} and queries {asked.shape} must be (n, h) and (m, h)")
    if not 1 <= k <= len(stored):
        raise ValueError(f"k = {k!r}: must be between 1 and the {len(stored)} rows of the memory")
    if not (np.isfinite(stored).all() and np.isfinite(asked).all()):
        raise ValueError("memory or queries contain NaN or infinity")
    return kernels.load().nearest(asked, stored.mean(0), stored, k, kernels.threads())


def vote(labels: Array, classes: int) -> Array:
    """Majority of each row of labels (m, k), nearest first; among equals the class of the nearest, (m,)."""
    k = labels.shape[1]
    count = np.zeros((len(labels), classes))
    for j in range(k):
        # the nearest counts a little more: that decides ties and nothing else
        np.add.at(count, (np.arange(len(labels)), labels[:, j]), 1 + 0.5 * 2.0 ** -(j + 1))
    return count.argmax(1)


def clopper_pearson(errors: int, n: int, delta: float) -> float:
    """Upper limit of a probability after ``errors`` in n independent trials."""
    return 1.0 if errors >= n else float(beta.ppf(1 - delta, errors + 1, n - errors))


def inverse_kl(mean: float, n: int, delta: float) -> float:
    """Upper limit of the expectation of independent values in [0, 1] with this mean: the largest q with n kl(mean | q) <= log(1 / delta)."""
    low, high = mean, 1.0
    for _ in range(60):
        q = (low + high) / 2
        kl = 0.0
        if mean > 0:
            kl += mean * np.log(mean / q)
        if mean < 1:
            kl += (1 - mean) * np.log((1 - mean) / max(1 - q, 1e-300))
        low, high = (q, high) if n * kl <= np.log(1 / delta) else (low, q)
    return high


def martingale(errors: int, steps: int, delta: float) -> float:
    """Upper limit of the mean conditional error of ``steps`` predictions, each made before its outcome was seen."""
    rates = np.geomspace(1e-3, 3, 32)
    return float(min(1.0, ((rates * errors + np.log(len(rates) / delta)) / (1 - np.exp(-rates))).min() / steps))


def _labels(y: ArrayLike, delta: float, unlabelled: int) -> tuple[Array, Array]:
    if not 0 < delta < 1:
        raise ValueError(f"delta = {delta!r}: must be between 0 and 1")
    if not unlabelled:
        raise ValueError("unlabelled: needs at least one point that is independent of the training set")
    names, numbers = np.unique(np.asarray(y), return_inverse=True)
    return names, numbers.reshape(-1)


def certify(
    fit: Callable[[Array, Array], Network],
    x: ArrayLike,
    y: ArrayLike,
    unlabelled: ArrayLike,
    k: int = 3,
    folds: int = 4,
    delta: float = 0.05,
    seed: int = 0,
) -> Certificate:
    """The bound for ``fit(x, y)``, with as many further fits as there are folds.

    Args:
        fit: training, deterministic.
        x, y: training set (n, ...), (n,).
        unlabelled: further points (u, ...), independent of the training set.
        k: neighbours.
        folds: 2 or more; each is left out once.
        delta: the bound fails with at most this probability.
        seed: of the folds.

    Raises:
        ValueError: for sizes that do not fit.
    """
    x, unlabelled = np.asarray(x), np.asarray(unlabelled)
    names, y = _labels(y, delta, len(unlabelled))
    if not 2 <= folds <= len(x) // 2:
        raise ValueError(f"folds = {folds!r}: must be between 2 and {len(x) // 2}")
    whole = fit(x, names[y]).predict(unlabelled)
    parts = np.array_split(np.random.default_rng(seed).permutation(len(x)), folds)
    wrong, limits = [], []
    differs, moved = np.zeros(len(unlabelled)), np.zeros(len(unlabelled))
    for part in parts:
        rest = np.setdiff1d(np.arange(len(x)), part)
        model = fit(x[rest], names[y[rest]])
        memory = model.represent(x[rest])
        decoded = lambda at, m=memory, r=rest, f=model: vote(y[r][nearest(m, f.represent(at), k)[1]], len(names))  # noqa: E731
        errors = int((decoded(x[part]) != y[part]).sum())
        wrong.append(errors / len(part))
        limits.append(clopper_pearson(errors, len(part), delta / (3 * folds)))
        own = model.predict(unlabelled)
        differs += names[decoded(unlabelled)] != own
        moved += whole != own
    agreement, stability = float((differs / folds).mean()), float((moved / folds).mean())
    return Certificate(
        Term(float(np.mean(wrong)), float(np.mean(limits))),
        Term(agreement, inverse_kl(agreement, len(unlabelled), delta / 3)),
        Term(stability, inverse_kl(stability, len(unlabelled), delta / 3)),
        delta,
    )


def certify_frozen(
    features: ArrayLike,
    y: ArrayLike,
    unlabelled: ArrayLike,
    predicted: ArrayLike,
    k: int = 3,
    delta: float = 0.05,
    first: float = 0.5,
    stages: int = 16,
) -> Certificate:
    """The bound for a classifier on a representation that does not depend on the training set.

    Args:
        features, y: training set as represented (n, h), (n,), in random order.
        unlabelled: further points as represented (u, h), independent of the training set.
        predicted: the classifier's labels of these (u,).
        k, delta: as in `certify`.
        first: share of the training set that is memory from the start.
        stages: the rest is predicted in so many blocks, each from all that stands before it.

    Raises:
        ValueError: for sizes that do not fit.
    """
    features, unlabelled, predicted = np.asarray(features), np.asarray(unlabelled), np.asarray(predicted)
    names, y = _labels(y, delta, len(unlabelled))
    n, start = len(y), int(first * len(y))
    if len(predicted) != len(unlabelled):
        raise ValueError(f"predicted has {len(predicted)} labels for {len(unlabelled)} unlabelled points")
    if not k <= start < n:
        raise ValueError(f"first = {first!r}: leaves {start} of {n} points as memory; must be at least k = {k} and fewer than all")
    edges = np.unique(np.linspace(start, n, stages + 1).astype(int))
    errors, differs = 0, np.zeros(len(unlabelled))
    for low, high in pairwise(edges.tolist()):
        decoded = vote(y[:low][nearest(features[:low], np.concatenate([features[low:high], unlabelled]), k)[1]], len(names))
        errors += int((decoded[: high - low] != y[low:high]).sum())
        differs += (high - low) / (n - start) * (names[decoded[high - low :]] != predicted)
    agreement = float(differs.mean())
    decoder = Term(errors / (n - start), martingale(errors, n - start, delta / 2))
    return Certificate(decoder, Term(agreement, inverse_kl(agreement, len(unlabelled), delta / 2)), Term(0.0, 0.0), delta)
