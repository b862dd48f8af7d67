"""Rounds over messages end where the simulator's do, for every method: parameters, participation, bytes."""

from __future__ import annotations

import pytest

from isthmus.engines.evaluate import evaluate
from isthmus.parts.channels.quantise import Int8
from isthmus.parts.channels.sparse import TopK

from ..contracts import contracts
from ..contracts.contracts import difference
from ..contracts.test_methods import PAIRS, method, task
from .field import play


def same(one, over, records, expected) -> None:
    assert difference(over.shared, one.shared) <= 1e-6
    assert over.seen == one.seen
    for a, b in zip(records, expected, strict=True):
        assert (a.up, a.down, a.cohort, a.missing) == (b.up, b.down, b.cohort, b.missing)
        assert set(a.metrics) == set(b.metrics)
        for n, value in b.metrics.items():
            assert a.metrics[n] == pytest.approx(value, rel=2e-3, abs=1e-5), n


@pytest.mark.parametrize(("kind", "name"), [p for p in PAIRS if p[0] != "local"])
def test_messages_end_where_the_simulator_does(kind, name, tmp_path):
    fraction = 0.5 if name == "lora" else 1.0
    one = method(kind, participation=fraction)
    simulator, server, expected = contracts.play(one, task(name), way="loop")
    engine, over, records = play(one, task(name), tmp_path)
    same(server, over, records, expected)
    a, b = engine.evaluate(over), evaluate(simulator, server)
    if one.private:
        assert a is None  # no metric leaves
        return
    for x, y in ((a.overall, b.overall), (a.personal, b.personal)):
        assert set(x) == set(y)
        assert all(x[n] == pytest.approx(y[n], abs=2e-2 if n == "accuracy" else 1e-3) for n in x)


@pytest.mark.parametrize("channel", [Int8(), TopK(0.3)], ids=lambda c: c.name)
@pytest.mark.parametrize(("kind", "name"), [("fedavg", "ranks"), ("flora", "ranks"), ("fedavg", "digits")])
def test_channels_travel(kind, name, channel, tmp_path):
    from dataclasses import replace

    one = replace(method(kind), channels=(channel,))
    _, server, expected = contracts.play(one, task(name), way="loop")
    _, over, records = play(one, task(name), tmp_path)
    same(server, over, records, expected)


def test_metrics_that_cannot_be_are_left_out():
    from isthmus.engines.remote import _alike, _sums

    good = {"accuracy": 3.0, "of.places": [1.0, 2.0], "weight": 4.0}
    assert set(_sums(good)) == set(good)
    for bad in (
        [],
        {"accuracy": [1.0]},
        {"of.places": 1.0},
        {"accuracy": float("nan")},
        {"of.places": [True]},
        {"of.places": [0.0] * 5000},
        {"accuracy": "1"},
    ):
        assert not _sums(bad)
    rows = [_sums(good), _sums(good), _sums(good | {"of.places": [1.0]})]
    assert _alike(rows) == rows[:2]
