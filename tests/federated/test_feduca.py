from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
import torch

from isthmus.core.rounds import Finished
from isthmus.core.types import CompositionError
from isthmus.federated.feduca import constrained_weights
from isthmus.federated.rational import present
from isthmus.runner import make_method, run

from ..conftest import digits_recipe, digits_task
from ..contracts.contracts import difference, play


def method(kind: str = "feduca", **options):
    more = {n: options.pop(n) for n in ("channels", "participation") if n in options}
    return make_method(digits_recipe(**{"method.kind": kind, **{f"method.{n}": v for n, v in options.items()}, **more}))


def problem(seed: int, k: int = 6, hard: float = 0.1):
    g = np.random.default_rng(seed)
    x = g.normal(size=(k, 20))
    m = x @ x.T / 20
    p = g.dirichlet(np.ones(k) * 3)
    return p, m, m @ p + hard * np.abs(g.normal(size=k)) * (g.random(k) < 0.4)


@pytest.mark.parametrize("seed", range(8))
def test_the_dual_is_the_constrained_optimum(seed):
    """Against SLSQP on the primal problem, where it is feasible."""
    p, m, target = problem(seed)
    a, _, slack = constrained_weights(p, m, target, rho=1e4)
    if slack.max() > 1e-6:
        return
    kl = lambda x: float((x * np.log(np.maximum(x, 1e-12) / p)).sum())
    limits = [{"type": "eq", "fun": lambda x: x.sum() - 1}, {"type": "ineq", "fun": lambda x: m @ x - target}]
    found = scipy.optimize.minimize(
        kl, p, bounds=[(0, 1)] * len(p), constraints=limits, method="SLSQP", options={"ftol": 1e-14, "maxiter": 1000}
    )
    assert found.success
    assert kl(a) == pytest.approx(found.fun, abs=1e-5)
    np.testing.assert_allclose(a, found.x, atol=2e-3)


def test_known_values():
    p, m, _ = problem(0)
    a, multiplier, slack = constrained_weights(p, m, np.full(6, -np.inf))
    assert a is p
    a, multiplier, slack = constrained_weights(p, m, m @ p - 1.0)
    assert a is p  # nobody is behind
    assert not multiplier.any()
    a, multiplier, slack = constrained_weights(p, m, np.full(6, 100.0))
    assert slack.max() > 1  # cannot be met, and says so
    assert a.sum() == pytest.approx(1.0)
    assert (multiplier <= 10.0 + 1e-9).all()
    same = np.ones((6, 6))
    np.testing.assert_allclose(constrained_weights(p, same, np.full(6, 0.5))[0], p, atol=1e-9)
    order = np.random.default_rng(0).permutation(6)
    p, m, target = problem(3, hard=0.3)
    one, other = constrained_weights(p, m, target)[0], constrained_weights(p[order], m[np.ix_(order, order)], target[order])[0]
    np.testing.assert_allclose(one[order], other, atol=1e-5)


def test_two_clients_with_a_known_optimum():
    """Gradients e1 and e2: client 2 must win c, so a_2 = c exactly."""
    a, multiplier, slack = constrained_weights(np.array([0.9, 0.1]), np.eye(2), np.array([-1.0, 0.4]))
    assert a == pytest.approx([0.6, 0.4], abs=1e-6)
    assert multiplier[0] == 0
    assert multiplier[1] == pytest.approx(np.log(0.4 / 0.1) - np.log(0.6 / 0.9), abs=1e-4)
    assert slack.max() < 1e-6


def test_without_thresholds_it_is_fedavg_bit_for_bit():
    t = digits_task()
    for kind in ("feduca", "rational"):
        _, a, records = play(method(kind), t)
        _, b, _ = play(method("fedavg"), t)
        assert all(torch.equal(a.shared[n], b.shared[n]) for n in b.shared)
        assert records[-1].metrics["staying"] == 4


def test_clients_really_leave_and_are_not_asked_again():
    t = digits_task()
    thresholds = [1e9, 0.0, 1e9, 1e9]
    for kind in ("rational", "feduca"):
        _, server, records = play(method(kind, thresholds=thresholds, patience=2), t, rounds=5)
        assert present(server) == [0, 2, 3]
        assert [1 in r.cohort for r in records] == [True, True, False, False, False]
        assert [r.metrics["staying"] for r in records] == [4, 3, 3, 3, 3]
    # what it sends as it leaves does not count
    without = replace(t, train=[t.train[0], t.train[1], t.train[2], t.train[3]])
    _, a, _ = play(method("rational", thresholds=thresholds, patience=1), without, rounds=1)
    engine, b, _ = play(method("fedavg"), t, rounds=0)
    from isthmus.core.rounds import close_round, open_round

    outgoing = open_round(method("fedavg"), b, [0, 2, 3])
    after, _ = close_round(method("fedavg"), t, b, outgoing, engine.exchange(outgoing))
    assert difference({n: a.shared[n] for n in after.shared}, after.shared) == 0.0


def test_when_all_have_left_the_run_is_over():
    with pytest.raises(Finished, match="all clients have left"):
        play(method("rational", thresholds=[0.0], patience=1), digits_task(), rounds=3)


@pytest.mark.parametrize("rule", ["primal_dual", "projection"])
def test_a_client_that_is_behind_gains_weight(rule):
    t, options = digits_task(), {"thresholds": [0.1, 1e9, 1e9, 1e9], "patience": 100, "rule": rule}
    _, _, records = play(method("feduca", **options), t, rounds=2)
    assert records[0].metrics["multiplier"] > 0
    _, plain, _ = play(method("fedavg"), t, rounds=3)
    _, kept, _ = play(method("feduca", **options), t, rounds=3)
    mine = lambda s: float(t.score({n: s.shared[n] for n in plain.shared}, t.train[0])["loss"].mean())
    assert mine(kept) < mine(plain)


def test_multipliers_of_satisfied_clients_decay_to_zero():
    from isthmus.federated.feduca import MULTIPLIERS, UtilityConstrained
    from isthmus.federated.rational import SURPLUS

    t, one = digits_task(), method("feduca", patience=100)
    engine, start, _ = play(one, t, rounds=0)
    from isthmus.core.rounds import open_round

    update = engine.exchange(open_round(one, start)).update
    rule, state = UtilityConstrained(0.3), {MULTIPLIERS: torch.tensor([3.0, 0.5, 0.0, 0.0])}
    told = torch.tensor([1.0, 1.0, 1.0, -2.0])
    update = replace(update, payload=update.payload | {SURPLUS: told})
    seen = []
    for _ in range(3):
        _, state = rule(update, start, state)
        seen.append(state[MULTIPLIERS].tolist())
    assert seen == [[2.0, 0.0, 0.0, 2.0], [1.0, 0.0, 0.0, 4.0], [0.0, 0.0, 0.0, 6.0]]


def test_draws_are_unbiased():
    from isthmus.core.rounds import open_round, server_start
    from isthmus.federated.feduca import UtilityConstrained

    t, one = digits_task(), method("feduca", thresholds=[0.5], patience=100)
    engine, start, _ = play(one, t, rounds=0)
    replies = engine.exchange(open_round(one, server_start(one, t, 0)))
    rule = UtilityConstrained(0.3)
    empty = rule.init(start.shared)
    mean, _ = rule(replies.update, start, empty)
    drawn = [replace(rule, draw=2)(replies.update, replace(start, round=r), empty)[0]["head.bias"] for r in range(400)]
    spread = torch.stack(drawn).std(0) / 400**0.5
    assert ((torch.stack(drawn).mean(0) - mean["head.bias"]).abs() <= 4.5 * spread + 1e-7).all()


def test_what_cannot_be_is_refused():
    for wrong in ({"gap": 0.0}, {"rho": 0.0}, {"draw": 0}, {"patience": 0}):
        with pytest.raises(ValueError, match="must be"):
            method("feduca", **wrong)
    with pytest.raises(CompositionError, match="3 thresholds"):
        play(method("feduca", thresholds=[1.0, 2.0, 3.0]), digits_task())
    for kind in ("flexlora+feduca", "scaffold+feduca"):
        with pytest.raises(CompositionError):
            method(kind)
    with pytest.raises(CompositionError, match="individual"):
        method("feduca", channels=[{"kind": "secure_sum"}])


def test_a_run_that_ends_between_two_evaluations_is_evaluated_where_it_ended(tmp_path):
    changes = {"method.kind": "fedavg+rational", "method.rational": {"thresholds": [0.0], "patience": 2}, "rounds": 9, "evaluate.every": 9}
    result = run(digits_recipe(**changes), tmp_path / "run")
    assert len(result.line.rows) == 2
    assert not result.line.rows[-1]["evaluation"]
    assert 0 < result.document["accuracy_global"] < 1
    assert result.document["staying"] == 0
