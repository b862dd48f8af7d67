from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import NearestNeighbors

from isthmus.primitives import certify, certify_frozen
from isthmus.primitives.certificate import clopper_pearson, inverse_kl, martingale, nearest, vote


def digits(seed: int, labels=None):
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = x[order] / 16, y[order] if labels is None else labels
    return x[:900], y[:900], x[900:1300], x[1300:], y[1300:]


def test_nearest_are_those_of_scikit_learn():
    r = np.random.default_rng(0)
    memory, queries = r.standard_normal((500, 20)) + 1000, r.standard_normal((70, 20)) + 1000
    far, who = nearest(memory, queries, 5)
    expected, index = NearestNeighbors(n_neighbors=5).fit(memory - 1000).kneighbors(queries - 1000)
    assert (who == index).mean() > 0.99
    np.testing.assert_allclose(np.sqrt(far), expected, rtol=1e-3)


def test_vote_takes_the_majority_and_the_nearest_among_equals():
    assert vote(np.array([[0, 1, 1], [2, 1, 0], [1, 2, 2]]), 3).tolist() == [1, 2, 2]
    assert vote(np.array([[2, 0, 0, 2]]), 3).tolist() == [2]


def test_limits_hold_as_often_as_they_promise():
    r = np.random.default_rng(0)
    for p in (0.01, 0.1, 0.4):
        draws = r.binomial(200, p, 2000)
        for limit in (
            lambda e: clopper_pearson(int(e), 200, 0.05),
            lambda e: inverse_kl(e / 200, 200, 0.05),
            lambda e: martingale(int(e), 200, 0.05),
        ):
            found = {e: limit(e) for e in np.unique(draws)}
            assert np.mean([found[e] >= p for e in draws]) > 0.94
    assert clopper_pearson(0, 100, 0.05) == pytest.approx(1 - 0.05 ** (1 / 100))
    assert inverse_kl(0.0, 100, 0.05) == pytest.approx(1 - 0.05 ** (1 / 100), rel=1e-6)


def test_a_frozen_representation_is_certified_and_the_bound_holds():
    held = []
    for seed in range(6):
        x, y, u, test, truth = digits(seed)
        model = LogisticRegression(max_iter=300).fit(x, y)
        found = certify_frozen(x, y, u, model.predict(u))
        assert found.bound < 0.25
        assert found.bound == pytest.approx(found.decoder.upper + found.agreement.upper + found.stability.upper)
        held.append(found.bound >= (model.predict(test) != truth).mean())
    assert all(held)


class Linear:
    """A network of one layer: what it represents is what its readout sees."""

    def __init__(self, x, y):
        self.model = LogisticRegression(max_iter=100).fit(x, y)

    def predict(self, x):
        return self.model.predict(x)

    def represent(self, x):
        return x


def test_a_trained_network_is_certified_by_fits_without_each_fold():
    x, y, u, test, truth = digits(0)
    fits = []
    found = certify(lambda a, b: fits.append(len(a)) or Linear(a, b), x, y, u, folds=3)
    assert fits == [900, 600, 600, 600]
    assert 0 < found.stability.measured < found.stability.upper
    assert (Linear(x, y).predict(test) != truth).mean() <= found.bound < 0.3


def test_labels_without_meaning_drive_it_to_nothing():
    shuffled = np.random.default_rng(1).integers(0, 10, 1797)
    x, y, u, _, _ = digits(0, shuffled)
    assert certify_frozen(x, y, u, Linear(x, y).predict(u)).bound > 1


def test_bad_input():
    x, y, u, _, _ = digits(0)
    with pytest.raises(ValueError, match="folds = 1"):
        certify(Linear, x, y, u, folds=1)
    with pytest.raises(ValueError, match="delta = 2"):
        certify_frozen(x, y, u, y[:400], delta=2)
    with pytest.raises(ValueError, match="predicted has 5 labels for 400"):
        certify_frozen(x, y, u, y[:5])
    with pytest.raises(ValueError, match="at least one point"):
        certify_frozen(x, y, u[:0], y[:0])
    with pytest.raises(ValueError, match="k = 0"):
        nearest(x, u, 0)
