from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog
from sklearn.utils.estimator_checks import parametrize_with_checks

from isthmus.primitives import SubsetOfSignals
from isthmus.primitives.regression import _GRID, _Mixture, least_absolute


def sources(n=2000, d=5, m=400, loud=1e3, seed=0):
    r = np.random.default_rng(seed)
    x, beta = r.standard_normal((n, d)), r.standard_normal(d)
    scale = np.where(np.arange(n) < m, 1.0, loud)
    return x, x @ beta + scale * r.standard_normal(n), beta, scale


@parametrize_with_checks([SubsetOfSignals()])
def test_common_checks_of_scikit_learn(estimator, check):
    check(estimator)


def test_absolute_deviations_agree_with_the_linear_program():
    x, y, _, _ = sources(120, 4, 60, 50)
    n, d = x.shape
    cost = np.concatenate([np.zeros(d), np.ones(2 * n)])
    equal = np.column_stack([x, np.eye(n), -np.eye(n)])
    exact = linprog(cost, A_eq=equal, b_eq=y, bounds=[(None, None)] * d + [(0, None)] * 2 * n, method="highs").x[:d]
    assert np.abs(least_absolute(x, y) - exact).max() < 1e-4


@pytest.mark.parametrize("loud", [10.0, 1e3, 1e6])
def test_loud_sources_do_not_matter(loud):
    x, y, beta, scale = sources(loud=loud)
    quiet = scale == 1
    oracle = np.linalg.lstsq(x[quiet], y[quiet], rcond=None)[0]
    found = SubsetOfSignals(unit=1.0).fit(x, y)
    wrong = np.linalg.norm(found.coef_ - beta)
    assert wrong < 3 * np.linalg.norm(oracle - beta) + 0.05
    assert wrong < 0.2 * np.linalg.norm(np.linalg.lstsq(x, y, rcond=None)[0] - beta) or loud == 10
    assert found.quiet_[quiet].mean() > found.quiet_[~quiet].mean() + 0.3


def test_equal_noise_is_nearly_least_squares():
    x, y, beta, _ = sources(m=2000)
    found = SubsetOfSignals(unit=1.0, method="mixture").fit(x, y)
    plain = np.linalg.lstsq(x, y, rcond=None)[0]
    assert np.linalg.norm(found.coef_ - beta) < 1.2 * np.linalg.norm(plain - beta) + 0.01


def test_noiseless_quiet_sources_give_beta_in_the_limit():
    r = np.random.default_rng(3)
    x, beta = r.standard_normal((300, 4)), r.standard_normal(4)
    y = x @ beta + np.where(np.arange(300) < 120, 0.0, 100.0) * r.standard_normal(300)
    found = SubsetOfSignals(method="absolute", fit_intercept=False).fit(x, y)
    assert np.abs(found.coef_ - beta).max() < 1e-5


@pytest.mark.parametrize("method", ["mixture", "absolute"])
def test_equivariance(method):
    x, y, _, _ = sources(600, 3, 300)
    base = SubsetOfSignals(unit=1.0, method=method).fit(x, y).coef_
    scaled = SubsetOfSignals(unit=10.0, method=method).fit(x, 10 * y).coef_
    np.testing.assert_allclose(scaled, 10 * base, rtol=1e-4, atol=1e-4)
    shift = np.array([3.0, -1.0, 2.0])
    np.testing.assert_allclose(SubsetOfSignals(unit=1.0, method=method).fit(x, y + x @ shift).coef_, base + shift, rtol=1e-3, atol=1e-3)
    turn = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))[0]
    np.testing.assert_allclose(SubsetOfSignals(unit=1.0, method=method).fit(x @ turn, y).coef_, turn.T @ base, rtol=1e-3, atol=1e-3)


def test_standard_errors_cover():
    inside = []
    for seed in range(40):
        x, y, beta, _ = sources(800, 3, 300, 100.0, seed)
        found = SubsetOfSignals(unit=1.0, method="mixture").fit(x, y)
        inside += (np.abs(found.coef_ - beta) < 1.96 * found.std_error_).tolist()
    assert 0.85 < np.mean(inside) <= 1.0


def test_rows_of_one_source_share_its_scale():
    r = np.random.default_rng(0)
    who = np.repeat(np.arange(20), 30)
    level = np.where(np.arange(20) < 8, 1.0, 30.0)
    x = r.standard_normal((600, 3))
    y = x @ [1.0, 2.0, 3.0] + level[who] * r.standard_normal(600)
    found = SubsetOfSignals(unit=1.0).fit(x, y, source=[f"sensor {i}" for i in who])
    assert found.scale_.shape == (20,)
    names = np.unique([f"sensor {i}" for i in range(20)])
    quiet = {n for n, q in zip(names, found.quiet_, strict=True) if q > 0.5}
    assert quiet == {f"sensor {i}" for i in range(8)}


def test_the_lookup_of_many_sources_is_the_posterior():
    r = np.random.default_rng(0)
    square = (r.standard_normal(5 * _GRID) * np.where(r.random(5 * _GRID) < 0.5, 1, 100)) ** 2
    count = np.ones_like(square)
    one, other = _Mixture(1.0, 500.0, 40), _Mixture(1.0, 500.0, 40)
    fast = one.step(square, count)
    posterior = other.posterior(square, count)
    np.testing.assert_allclose(fast, posterior @ other.scale**-2.0, rtol=1e-4)
    np.testing.assert_allclose(one.weight, posterior.mean(0), rtol=1e-4, atol=1e-9)


def test_bad_input():
    x, y, _, _ = sources(50, 2, 20)
    for bad, says in (({"method": "ols"}, "method = 'ols'"), ({"unit": 0.0}, "unit = 0.0")):
        with pytest.raises(ValueError, match=says):
            SubsetOfSignals(**bad).fit(x, y)
    with pytest.raises(ValueError, match="source has 3 entries for 50 rows"):
        SubsetOfSignals().fit(x, y, source=[1, 2, 3])
    with pytest.raises(ValueError, match="NaN"):
        SubsetOfSignals().fit(x, np.where(np.arange(50) == 3, np.nan, y))
