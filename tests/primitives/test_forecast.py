import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from isthmus.primitives import FilterBank, rank_report
from isthmus.primitives.forecast import Moments, dense, moments, reduced_rank, windows
from isthmus.primitives.forecast_net import FilterBankNet, errors, train

L, H = 40, 12


def data(matrix, noise=0.1, n=3000, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, 1, len(matrix)))
    y = x @ matrix + noise * random.normal(size=(n, 1, matrix.shape[1]))
    return (x[:2000], y[:2000]), (x[2000:], y[2000:])


def of_rank(rank, seed=1):
    random = np.random.default_rng(seed)
    return random.normal(size=(L, rank)) @ random.normal(size=(rank, H))


def test_error_falls_to_the_noise_at_the_rank_and_not_before():
    (x, y), (u, v) = data(of_rank(5))
    report = rank_report(moments(x, y, "none"), moments(u, v, "none"), range(1, 9), 1e-8)
    assert all(e > 5 * 0.01 for e in report["test"][:4])
    np.testing.assert_allclose(report["test"][4:], 0.01, rtol=0.1)
    assert report["energy"][4] == pytest.approx(1, abs=1e-3)


def test_full_rank_is_the_linear_model():
    (x, y), _ = data(np.random.default_rng(0).normal(size=(L, H)), 1.0)
    m = moments(x, y, "none")
    bank = FilterBank(L, ridge=1e-12, centre="none").fit(x, y)
    ordinary = np.linalg.lstsq(x[:, 0], y[:, 0], rcond=None)[0]
    np.testing.assert_allclose(bank.matrix_, ordinary, atol=1e-8)
    np.testing.assert_allclose(dense(m, 1e-12), ordinary, atol=1e-8)


def test_on_whitened_data_reduced_rank_is_the_truncated_svd():
    (x, y), _ = data(of_rank(8), 1.0)
    white = np.linalg.qr(x[:, 0])[0][:, None]
    m = moments(white, y, "none")
    for rank in (1, 3, 6):
        left, right = reduced_rank(m, rank, 0.0)
        u, s, vt = np.linalg.svd(white[:, 0].T @ y[:, 0], full_matrices=False)
        np.testing.assert_allclose(left @ right, u[:, :rank] * s[:rank] @ vt[:rank], atol=1e-8)


def test_a_bank_finds_the_bank_that_made_the_data():
    random = np.random.default_rng(0)
    true = FilterBank(2, 8, 8)
    true.analysis_, true.synthesis_ = random.normal(size=(2, 8)), random.normal(size=(10, H))
    true.lookback_, true.horizon_, true.centre = L, H, "none"
    x = random.normal(size=(3000, 1, L))
    y = true.predict(x) + 0.1 * random.normal(size=(3000, 1, H))
    found = FilterBank(2, 8, 8, ridge=1e-8, centre="none").fit(x[:2000], y[:2000])
    assert found.rank_ == 10
    assert found.multiply_adds_ == 10 * (8 + H)
    assert ((found.predict(x[2000:]) - y[2000:]) ** 2).mean() == pytest.approx(0.01, rel=0.05)
    # one filter fewer cannot
    fewer = FilterBank(1, 8, 8, ridge=1e-8, centre="none").fit(x[:2000], y[:2000])
    assert ((fewer.predict(x[2000:]) - y[2000:]) ** 2).mean() > 1


@pytest.mark.parametrize(("filters", "length", "stride"), [(3, None, None), (3, 10, 5), (2, 16, 12), (5, 40, 1), (4, 7, 3)])
@pytest.mark.parametrize("centre", ["mean", "last", "none"])
def test_prediction_is_the_matrix(filters, length, stride, centre):
    series = np.random.default_rng(0).normal(size=(600, 3)).cumsum(0)
    past, future = windows(series, L, H)
    m = FilterBank(filters, length, stride, centre=centre, max_iter=4).fit(past, future)
    middle = {"mean": past.mean(-1, keepdims=True), "last": past[..., -1:], "none": 0}[centre]
    np.testing.assert_allclose(m.predict(past), (past - middle) @ m.matrix_ + middle, atol=1e-8)
    assert np.linalg.matrix_rank(m.matrix_) <= m.rank_
    # what is added to the past is added to the forecast
    if centre != "none":
        np.testing.assert_allclose(m.predict(past + 7), m.predict(past) + 7, atol=1e-8)


def test_moments_of_silos_add_up_to_those_of_their_union():
    series = np.random.default_rng(0).normal(size=(900, 2)).cumsum(0)
    past, future = windows(series, L, H)
    parts = [moments(past[i::3], future[i::3]) for i in range(3)]
    together, whole = parts[0] + parts[1] + parts[2], moments(past, future)
    np.testing.assert_allclose(together.xx, whole.xx)
    assert together.n == whole.n
    federated, pooled = FilterBank(4, ridge=1e-3).fit_moments(together), FilterBank(4, ridge=1e-3).fit(past, future)
    np.testing.assert_allclose(federated.matrix_, pooled.matrix_, atol=1e-9)
    gap = (pooled.predict(past) - future) ** 2
    assert whole.error(pooled.matrix_) == pytest.approx(gap.mean())


def test_the_ridge_is_chosen_on_the_validation_part():
    (x, y), (u, v) = data(of_rank(4), 20.0, 2100)
    m = FilterBank(12, centre="none").fit(x[:60], y[:60], validation=(u, v))
    held = moments(u, v, "none")
    for ridge in (1e-6, 1e-3):
        other = FilterBank(12, ridge=ridge, centre="none").fit(x[:60], y[:60])
        assert held.error(m.matrix_) <= held.error(other.matrix_) + 1e-12
    assert m.ridge_ == 1e-1  # so few rows, so much noise
    assert FilterBank(12, centre="none").fit(x, y).ridge_ in (1e-2, 1e-1, 1e-3)


def test_windows_are_views_in_order():
    series = np.arange(20.0).reshape(10, 2)
    past, future = windows(series, 3, 2)
    assert past.shape == (6, 2, 3)
    assert np.shares_memory(past, series)
    np.testing.assert_array_equal(past[1, 0], [2, 4, 6])
    np.testing.assert_array_equal(future[1, 0], [8, 10])
    with pytest.raises(ValueError, match="at least lookback \\+ horizon = 11"):
        windows(series, 9, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"filters": 0}, "filters = 0"), ({"filters": 41}, "between 1 and the lookback 40"), ({"length": 41}, "length = 41"), ({"stride": 0}, "stride = 0"), ({"centre": "median"}, "centre = 'median'")],
)  # fmt: skip
def test_bad_options(change, message):
    (x, y), _ = data(of_rank(2), n=2100)
    with pytest.raises(ValueError, match=message):
        FilterBank(**({"ridge": 1e-3} | change)).fit(x, y)


def test_bad_input():
    (x, y), _ = data(of_rank(2), n=2100)
    with pytest.raises(ValueError, match="must be \\(n, channels, lookback\\)"):
        FilterBank(2).fit(x[:, 0], y)
    broken = x.copy()
    broken[1999, 0, 3] = np.nan
    with pytest.raises(ValueError, match="X contains NaN"):
        FilterBank(2).fit(broken, y)
    with pytest.raises(ValueError, match="needs validation moments"):
        FilterBank(2).fit_moments(moments(x, y))
    with pytest.raises(NotFittedError):
        FilterBank(2).predict(x)
    with pytest.raises(ValueError, match="must be \\(n, channels, 40\\)"):
        FilterBank(2, ridge=1.0).fit(x, y).predict(x[..., :30])
    assert clone(FilterBank(3, 4, 5)).get_params()["stride"] == 5


def test_moments_are_frozen_numbers():
    m = Moments(np.eye(2), np.ones((2, 1)), np.ones(1), 3)
    assert m.error(np.zeros((2, 1))) == pytest.approx(1 / 3)


def test_a_network_of_one_bank_is_a_bank():
    net = FilterBankNet(L, H, [(3, 10, 5)])
    past = torch.randn(4, L) + 3
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn_like(p))
        net.banks[0].bias.zero_()
        net.synthesis.bias.zero_()
        bank = FilterBank(3, 10, 5, centre="mean")
        bank.analysis_, bank.synthesis_ = net.banks[0].weight[:, 0].double().numpy(), net.synthesis.weight.T.double().numpy()
        bank.lookback_, bank.horizon_ = L, H
        np.testing.assert_allclose(net(past).numpy(), bank.predict(past[:, None].double().numpy())[:, 0], atol=1e-3)
    assert net.multiply_adds == 3 * 7 * 10 + 21 * H
    deep = FilterBankNet(L, H, [(3, 10, 5), (4, 3, 2)])
    assert deep(past).shape == (4, H)
    assert deep.multiply_adds == 3 * 7 * 10 + 4 * 3 * 3 * 3 + 12 * H
    conv = torch.nn.functional.conv1d(past[:, None], net.banks[0].weight, stride=5)
    torch.testing.assert_close(net.banks[0](past[:, None]), conv)
    with pytest.raises(ValueError, match="at most the 7 positions"):
        FilterBankNet(L, H, [(3, 10, 5), (4, 8, 2)])


def test_training_comes_near_the_closed_form():
    (x, y), held = data(of_rank(3), 0.5)
    centred = x - x.mean(-1, keepdims=True)
    target = y - x.mean(-1, keepdims=True)
    best = FilterBank(4, ridge=1e-8).fit(x, target + x.mean(-1, keepdims=True)).matrix_
    torch.manual_seed(0)
    net = FilterBankNet(L, H, [(4, L, 1)])
    found, passes = train(net, x, y, held, lr=1e-2, epochs=60, size=64, patience=10)
    assert 1 <= passes <= 60
    assert errors(net, *held)[0] == pytest.approx(found, rel=1e-5)
    closed = ((centred[:, 0] @ best + x.mean(-1) - y[:, 0]) ** 2).mean()
    assert found < 3 * closed
