"""S8: what three hostile clients of ten can do to each rule, against measured values; and the rules' own known values."""

from __future__ import annotations

import pytest
import torch

from isthmus.core.rounds import RunError, close_round, screen, server_start
from isthmus.core.types import CompositionError, Server, Update
from isthmus.parts.aggregate import WeightedMean
from isthmus.parts.robust import Bulyan, GeometricMedian, Guarded, Median, MultiKrum, NormBound, TrimmedMean, distances, gram, krum_scores
from isthmus.runner import make_method, run

from ..conftest import digits_recipe, digits_task, tiny_text_task
from ..contracts.test_methods import method, task

D = 1000
ATTACKS = {
    "sign flip": lambda h: -h[:3],
    "sign flip x10": lambda h: -10 * h[:3],
    "scale x100": lambda h: 100 * h[:3],
    "a little is enough": lambda h: (h.mean(0) - 1.5 * h.std(0)).expand(3, -1),
}
# error relative to the honest mean: mean, median, trimmed mean, Krum, multi-Krum, geometric median
KNOWN = {
    "sign flip": (0.60, 0.060, 0.064, 0.091, 0.000, 0.045),
    "sign flip x10": (3.3, 0.060, 0.064, 0.091, 0.000, 0.045),
    "scale x100": (29.8, 0.061, 0.064, 0.091, 0.000, 0.045),
    "a little is enough": (0.043, 0.062, 0.063, 0.142, 0.063, 0.045),
}
RULES = (Median(0), TrimmedMean(3), MultiKrum(3, keep=1), MultiKrum(3), GeometricMedian(0))


def server(d: int = D) -> Server:
    return Server({"x": torch.zeros(d)}, {}, 0, (-1,) * 10, {"x": -2}, frozenset(), 0)


def of(x: torch.Tensor) -> Update:
    return Update({"x": x}, torch.ones(len(x)), {}, torch.arange(len(x)))


@pytest.mark.parametrize("attack", ATTACKS)
def test_s8_errors_are_within_a_tenth_of_the_measured_ones(attack):
    torch.manual_seed(0)
    honest = torch.randn(D) + 0.1 * torch.randn(7, D)
    x, truth = torch.cat([honest, ATTACKS[attack](honest)]), honest.mean(0)
    found = [WeightedMean()] + [Guarded(r) for r in RULES]
    for aggregate, known in zip(found, KNOWN[attack], strict=True):
        step, _ = aggregate(of(x), server(), {})
        assert float((step["x"] - truth).norm() / truth.norm()) <= 1.1 * known + 1e-6


def test_bulyan_needs_more_clients_and_withstands_them_too():
    torch.manual_seed(0)
    honest = torch.randn(D) + 0.1 * torch.randn(8, D)
    step, _ = Guarded(Bulyan(2))(of(torch.cat([honest, -10 * honest[:3]])), server(), {})
    assert float((step["x"] - honest.mean(0)).norm() / honest.mean(0).norm()) < 0.07


def test_known_values():
    x = torch.tensor([[1.0, 5.0], [2.0, 3.0], [9.0, 4.0], [3.0, -7.0]])
    assert Guarded(Median(0))(of(x), server(2), {})[0]["x"].tolist() == [2.5, 3.5]
    assert Guarded(TrimmedMean(1))(of(x), server(2), {})[0]["x"].tolist() == [2.5, 3.5]
    assert Guarded(TrimmedMean(0))(of(x), server(2), {})[0]["x"].tolist() == [3.75, 1.25]
    line = torch.tensor([[0.0], [1.0], [1.1], [1.3], [50.0]])
    scores = krum_scores(distances(gram(of(line), server(1))), 1)
    assert scores.argmin() == 2
    assert Guarded(MultiKrum(1, keep=1))(of(line), server(1), {})[0]["x"].item() == pytest.approx(1.1)
    assert Guarded(MultiKrum(1))(of(line), server(1), {})[0]["x"].item() == pytest.approx(0.85)
    step, _ = Guarded(NormBound(0, most=1.0))(of(torch.tensor([[3.0, 4.0], [0.3, 0.4]])), server(2), {})
    assert step["x"].tolist() == pytest.approx([0.45, 0.6])
    # the geometric median of a triangle with a wide angle is its corner there; of points on a line, the middle one
    flat = torch.tensor([[0.0, 0.0], [10.0, 0.5], [-10.0, 0.5]])
    assert Guarded(GeometricMedian(0, steps=1000))(of(flat), server(2), {})[0]["x"].norm() < 1e-2


def test_no_attackers_and_no_bound_change_nothing():
    torch.manual_seed(0)
    u = Update({"x": torch.randn(5, 8)}, torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), {}, torch.arange(5))
    plain, _ = WeightedMean()(u, server(8), {})
    for rule in (NormBound(0, most=1e9), MultiKrum(0)):
        assert torch.equal(Guarded(rule)(u, server(8), {})[0]["x"], plain["x"])


def test_products_have_the_lengths_of_products():
    t = tiny_text_task()
    one = method("fedavg", channels=[])
    start = server_start(one, t, 0)
    torch.manual_seed(0)
    payload = {n: 0.1 * torch.randn(4, *s.shape) for n, s in start.shared.items()}
    update = Update(payload, torch.ones(4), {}, torch.arange(4))
    found = gram(update, start, "products")
    dense = torch.zeros(4, 0)
    for n in [n.removesuffix(".lora_a") for n in start.shared if n.endswith(".lora_a")]:
        a, b = start.shared[n + ".lora_a"], start.shared[n + ".lora_b"]
        change = (b + payload[n + ".lora_b"]) @ (a + payload[n + ".lora_a"]) - b @ a
        dense = torch.cat([dense, change.reshape(4, -1)], 1)
    dense = torch.cat([dense, *(p.reshape(4, -1) for n, p in payload.items() if "lora" not in n)], 1)
    torch.testing.assert_close(found.float(), dense @ dense.mT, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", ["norm_bound", "krum", "multi_krum", "bulyan", "median", "trimmed_mean", "geometric_median"])
@pytest.mark.parametrize("base", ["fedavg", "flexlora", "flora", "hetlora", "fedex_lora"])
@pytest.mark.parametrize("space", ["factors", "products"])
def test_every_rule_stands_before_every_aggregate(rule, base, space):
    from ..contracts.contracts import play

    one = make_method(
        digits_recipe(**{"method.kind": f"{base}+{rule}", f"method.{rule}": {"space": space} | ({"attackers": 0} if rule in FEW else {})})
    )
    _, after, _ = play(one, task("lora"), rounds=2)
    assert all(torch.isfinite(t).all() for t in after.shared.values())


FEW = ("krum", "multi_krum", "bulyan", "trimmed_mean")


def test_too_many_attackers_are_refused_before_the_first_round():
    with pytest.raises(CompositionError, match="need 7 clients a round; there are 4"):
        server_start(method("multi_krum", **{"method.attackers": 2}), digits_task(), 0)
    with pytest.raises(CompositionError, match="there are 2"):
        server_start(method("median", participation=0.5, **{"method.kind": "trimmed_mean", "method.attackers": 1}), digits_task(), 0)
    with pytest.raises(ValueError, match="at least 0"):
        MultiKrum(-1)


def test_what_a_rule_would_break_is_refused():
    for kind, match in (("frank_lora+median", "do not mean the same"), ("fedavg+dp+median", "noise of dp"), ("fedavg+krum", None)):
        if match is None:
            with pytest.raises(CompositionError, match="individual"):
                method(kind, channels=[{"kind": "secure_sum"}])
        else:
            with pytest.raises(CompositionError, match=match):
                make_method(digits_recipe(**{"method.kind": kind}))


def test_when_too_few_answer_the_run_stops_with_a_reason():
    with pytest.raises(RunError, match="needs 3"):
        Guarded(TrimmedMean(1))(of(torch.randn(2, 3)), server(3), {})


def test_s4_claims_and_values_beyond_the_limits_are_refused():
    from isthmus.core.rounds import Limits

    x = torch.randn(8, 3)
    x[1, 0], x[2, 1], x[3, 2] = float("nan"), float("inf"), 1e4
    weight = torch.tensor([10.0, 10, 10, 10, float("nan"), float("inf"), 0, -1])
    bad = screen(Update({"x": x}, weight, {}, torch.arange(8)), Limits(entry=100.0))
    assert sorted(bad) == [1, 2, 3, 4, 5, 6, 7]
    assert "beyond 100" in bad[3]
    assert screen(Update({"x": torch.zeros(2, 3)}, torch.tensor([5.0, 1e15]), {}, torch.arange(2)), Limits(weight=1e6)) == {
        1: "example count 999999986991104.0"
    }


def test_a_refused_update_leaves_exactly_what_the_others_make():
    from dataclasses import replace

    from isthmus.core.rounds import open_round

    from ..contracts.contracts import engine

    one, t = method("fedavg"), digits_task()
    start, simulator = server_start(one, t, 0), engine(method("fedavg"), digits_task())
    outgoing = open_round(one, start)
    replies = simulator.exchange(outgoing)
    poisoned = {n: x.clone() for n, x in replies.update.payload.items()}
    poisoned["head.weight"][2, 0, 0] = float("nan")
    after, record = close_round(one, t, start, outgoing, replace(replies, update=replace(replies.update, payload=poisoned)))
    others = replace(replies, update=replies.update.take(torch.tensor([0, 1, 3])))
    expected, _ = close_round(one, t, start, outgoing, others)
    assert all(torch.equal(after.shared[n], expected.shared[n]) for n in after.shared)
    assert "non-finite" in record.missing[2]


@pytest.mark.parametrize(
    ("kind", "options"), [("median", {}), ("trimmed_mean", {"attackers": 3}), ("multi_krum", {"attackers": 3}), ("geometric_median", {})]
)
def test_s8_accuracy_under_attack(kind, options, tmp_path):
    """Three of ten clients flip the sign of ten times what they learned."""
    settings = {
        "data.limit": 1797,
        "partition": {"kind": "iid", "clients": 10},
        "model.width": 64,
        "rounds": 40,
        "train": {"optimiser": "sgd", "lr": 0.1, "epochs": 2},
        "evaluate.references": False,
    }
    attack = {"channels": [{"kind": "attack", "clients": [1, 4, 7], "what": "sign_flip", "factor": 10.0}]}
    clean = run(digits_recipe(**settings), tmp_path / "clean").document["accuracy_global"]
    try:
        broken = run(digits_recipe(**settings, **attack), tmp_path / "mean").document["accuracy_global"]
    except RunError:
        broken = 0.0
    kept = run(
        digits_recipe(**settings, **attack, **{"method.kind": kind}, **{f"method.{n}": v for n, v in options.items()}), tmp_path / "kept"
    )
    assert broken < clean - 0.3
    assert kept.document["accuracy_global"] >= clean - 0.03
