from __future__ import annotations

import pytest
import torch

from isthmus.core.recipe import RecipeError
from isthmus.core.rounds import open_round
from isthmus.federated.fair import ADVERSARY
from isthmus.runner import make_method

from ..conftest import digits_recipe, digits_task
from ..contracts.contracts import difference, play


def method(kind: str, **options):
    return make_method(digits_recipe(**{"method.kind": kind, **{f"method.{n}": v for n, v in options.items()}}))


@pytest.mark.parametrize(("kind", "options"), [("qffl", {"q": 0.0}), ("afl", {"eta": 0.0})])
def test_without_its_parameter_it_is_fedavg(kind, options):
    _, mine, _ = play(method(kind, **options), digits_task(), rounds=3)
    _, plain, _ = play(method("fedavg"), digits_task(), rounds=3)
    assert difference(mine.shared, plain.shared) < 1e-5


def test_q_fedavg_by_hand():
    task, one = digits_task(), method("qffl", q=2.0)
    engine, server, _ = play(one, task, rounds=0)
    update = engine.exchange(open_round(one, server)).update
    step, _ = one.aggregate(update, server, {})
    lr, q, p, f = 0.3, 2.0, update.shares, update.report["loss"]
    d = {n: -t / lr for n, t in update.payload.items()}
    above = {n: sum(p[k] * f[k] ** q * t[k] for k in range(4)) for n, t in d.items()}
    below = sum(p[k] * (q * f[k] ** (q - 1) * sum(t[k].square().sum() for t in d.values()) + f[k] ** q / lr) for k in range(4))
    assert difference(step, {n: -t / below for n, t in above.items()}) < 1e-6


def test_the_adversary_prefers_who_loses_most():
    task, one = digits_task(), method("afl", eta=2.0)
    engine, server, _ = play(one, task, rounds=0)
    update = engine.exchange(open_round(one, server)).update
    _, state = one.aggregate(update, server, one.aggregate.init({}))
    weights = state[ADVERSARY].softmax(0)
    expected = update.weight * (2.0 * update.report["loss"]).exp()
    assert torch.allclose(weights, expected / expected.sum(), atol=1e-6)


@pytest.mark.parametrize(("kind", "options"), [("qffl", {"q": -1.0}), ("afl", {"eta": -1.0})])
def test_options_that_cannot_be(kind, options):
    with pytest.raises((ValueError, RecipeError), match=next(iter(options))):
        method(kind, **options)
