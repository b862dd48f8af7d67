"""S10: clipping bounds, noise has the said size and source, the accountant's figures are the known ones, budgets hold."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from isthmus.core import seeds
from isthmus.core.rounds import server_start
from isthmus.core.types import CompositionError, Inbox, Server, Update
from isthmus.parts.accountant import epsilon
from isthmus.parts.aggregate import ProductSVD
from isthmus.parts.channels.privacy import CLIP, Clip, GaussianNoise
from isthmus.parts.noise import NoisyMean, NoisyProducts, rounds_of
from isthmus.runner import make_method, run

from ..conftest import digits_recipe, digits_task, tiny_text_task
from ..contracts.contracts import difference, play


def method(kind: str = "dp", **options):
    more = {k: options.pop(k) for k in list(options) if "." in k or k in ("channels", "participation", "rounds")}
    where = "method" if "+" not in kind else "method.dp"
    return make_method(digits_recipe(**{"method.kind": kind, **{f"{where}.{n}": v for n, v in options.items()}, **more}))


@pytest.mark.parametrize(
    ("fraction", "rounds", "noise", "known"),
    [(1.0, 1, 1.0, 4.3772), (1.0, 20, 2.0, 11.48), (0.01, 1000, 1.0, 1.8282), (0.1, 100, 1.0, 7.0466)],
)
def test_s10_epsilon_is_the_known_one(fraction, rounds, noise, known):
    """Values of dp-accounting's PLD accountant at delta = 1e-5; at most 0.02 above."""
    assert known - 1e-3 <= epsilon(noise, fraction, rounds, 1e-5) <= known + 0.02


def test_epsilon_grows_with_rounds_and_falls_with_noise():
    values = [epsilon(1.0, 0.5, t, 1e-5) for t in (0, 1, 2, 5, 20)]
    assert values == sorted(values)
    assert values[0] == 0
    assert epsilon(2.0, 0.5, 5, 1e-5) < values[3]
    assert epsilon(0.0, 0.5, 5, 1e-5) == float("inf")


def test_without_noise_and_with_a_loose_bound_it_is_the_plain_mean():
    t = digits_task()
    equal = replace(t, train=[rows[:40] for rows in t.train])  # everybody weighs the same
    _, a, _ = play(method(clip=1e6, noise=0.0), equal)
    _, b, _ = play(method("fedavg"), equal)
    assert difference(a.shared, b.shared) <= 1e-6


def test_a_clipped_payload_is_no_longer_than_the_bound():
    inbox = Inbox({CLIP: torch.tensor(0.5)}, 0, torch.tensor(0))
    payload = {"x": torch.randn(50), "y": torch.randn(3, 4)}
    out = Clip(2.0).encode(payload, inbox)
    assert sum(t.square().sum() for t in out.values()).sqrt() <= 2.0 + 1e-6
    small = {n: t * 1e-3 for n, t in payload.items()}
    assert all(torch.equal(Clip(2.0).encode(small, inbox)[n], small[n]) for n in small)
    adaptive = Clip(2.0).encode(payload | {CLIP: torch.zeros(())}, inbox)
    assert adaptive[CLIP].item() == -0.5
    assert sum(t.square().sum() for n, t in adaptive.items() if n != CLIP).sqrt() <= 0.5 + 1e-6
    with pytest.raises(ValueError, match="not floating"):
        Clip(1.0).encode({"count": torch.tensor([1])}, inbox)


@pytest.mark.parametrize("system", [False, True])
def test_the_noise_has_the_said_size(system):
    d, k, clip, noise = 1_000_000, 4, 3.0, 0.7
    aggregate = NoisyMean(clip=clip, noise=noise, fraction=1.0, system=system)
    server = Server({"x": torch.zeros(d)}, {}, 0, (-1,) * k, {}, frozenset(), 0)
    step, state = aggregate(Update({"x": torch.zeros(k, d)}, torch.ones(k), {}, torch.arange(k)), server, aggregate.init(server.shared))
    assert float(step["x"].std()) == pytest.approx(noise * clip / k, rel=0.02)
    assert abs(float(step["x"].mean())) < 5 * noise * clip / k / d**0.5
    assert state["dp.rounds"].item() == 1


def test_s10_deployed_noise_is_not_the_seeds():
    a, b = seeds.system_normal((1000,)), seeds.system_normal((1000,))
    assert not torch.equal(a, b)
    assert abs(float(torch.cat([a, b]).std()) - 1) < 0.1
    assert method().deployed().aggregate.system
    assert not method().aggregate.system
    one = make_method(digits_recipe(channels=[{"kind": "gaussian", "clip": 1.0, "sigma": 1.0}])).deployed()
    inbox = Inbox({}, 0, torch.tensor(0))
    x = {"x": torch.zeros(10)}
    assert not torch.equal(one.channels[-1].encode(x, inbox)["x"], one.channels[-1].encode(x, inbox)["x"])
    assert torch.equal(GaussianNoise(1.0, 1.0).encode(x, inbox)["x"], GaussianNoise(1.0, 1.0).encode(x, inbox)["x"])


def test_the_ledger_has_epsilon_and_it_survives_a_restart(tmp_path):
    recipe = digits_recipe(**{"method.kind": "dp", "method.noise": 2.0, "rounds": 3, "participation": 0.5, "evaluate.references": False})
    run(recipe, tmp_path / "a")
    run(recipe.updated({"rounds": 5}), tmp_path / "a", resume=True)
    spent = [json.loads(x)["metrics"]["epsilon"] for x in (tmp_path / "a" / "ledger.jsonl").read_text().splitlines()]
    assert spent == pytest.approx([epsilon(2.0, 0.5, t, 1e-5) for t in range(1, 6)])
    assert spent == sorted(spent)


def test_s10_a_run_ends_before_it_exceeds_its_budget(tmp_path, capsys):
    recipe = digits_recipe(**{"method.kind": "dp", "method.noise": 2.0, "method.budget": 6.0, "rounds": 30, "evaluate.references": False})
    result = run(recipe, tmp_path / "a")
    last = result.line.rows[-1]["metrics"]["epsilon"]
    assert last <= 6.0 < epsilon(2.0, 1.0, len(result.line.rows) + 1, 1e-5)
    assert "privacy" in capsys.readouterr().err
    again = run(recipe, tmp_path / "a", resume=True)
    assert len(again.line.rows) == len(result.line.rows)
    with pytest.raises(ValueError, match="raise noise"):
        run(recipe.updated({"method.budget": 0.1}), tmp_path / "b")


def test_the_bound_follows_the_quantile():
    t = digits_task()
    one = method(clip=50.0, noise=0.01, quantile=0.5)
    _, server, records = play(one, t, rounds=40)
    _, low, _ = play(method(clip=1e-4, noise=0.01, quantile=0.5), t, rounds=40)
    assert float(low.shared[CLIP]) > 1e-4
    assert float(server.shared[CLIP]) < 50 * 0.5
    assert records[-1].metrics["clip"] == pytest.approx(float(server.shared[CLIP]))
    assert rounds_of(server) == 40


def test_the_noise_of_mean_and_count_together_cost_what_is_said():
    above, count = NoisyMean(noise=1.3, quantile=0.5).split(100.0)
    assert above**-2 + (2 * count) ** -2 == pytest.approx(1.3**-2)


def test_secure_sums_go_with_it():
    one = method(noise=0.5, **{"channels": [{"kind": "secure_sum"}]})
    _, a, _ = play(one, digits_task())
    _, b, _ = play(method(noise=0.5), digits_task())
    assert difference(a.shared, b.shared) <= 1e-5
    assert rounds_of(a) == 3


def test_noise_on_products_is_what_it_says_and_noise_on_factors_is_not():
    """The error of a mean product: sigma sqrt(out in) where noise goes to the product; where it goes to the factors, factors multiply it."""
    t = tiny_text_task()
    flex = make_method(digits_recipe(**{"method.kind": "flexlora+dp", "method.dp": {"clip": 1.0, "noise": 1.0}}))
    assert isinstance(flex.aggregate, NoisyProducts)
    start = server_start(flex, t, 0)
    torch.manual_seed(0)
    grown = replace(start, shared={n: x + 0.3 * torch.randn_like(x) for n, x in start.shared.items()})
    payload = {n: torch.zeros(4, *s.shape) for n, s in grown.shared.items()}
    update = Update(payload, torch.ones(4), {}, torch.arange(4))
    sigma = 1.0 / 4
    layer = next(n.removesuffix(".lora_a") for n in grown.shared if n.endswith(".lora_a"))
    a, b = grown.shared[layer + ".lora_a"], grown.shared[layer + ".lora_b"]
    full = replace(flex.aggregate, base=ProductSVD())
    step, _ = full(update, grown, full.init(grown.shared))
    new_a, new_b = a + step[layer + ".lora_a"], b + step[layer + ".lora_b"]
    on_product = float((new_b @ new_a - b @ a).norm())
    rank_noise = sigma * (a.shape[1] ** 0.5 + b.shape[0] ** 0.5) * a.shape[0] ** 0.5  # what of the noise a matrix of this rank can hold
    assert on_product < 1.5 * rank_noise
    factors = NoisyMean(clip=1.0, noise=1.0)
    noisy, _ = factors(update, grown, factors.init(grown.shared))
    on_factors = float(((b + noisy[layer + ".lora_b"]) @ (a + noisy[layer + ".lora_a"]) - b @ a).norm())
    assert on_factors == pytest.approx(float((b.norm() ** 2 * a.shape[1] + a.norm() ** 2 * b.shape[0]).sqrt() * sigma), rel=0.6)
    assert on_factors > on_product


def test_what_would_break_the_promise_is_refused():
    for kind in ("scaffold+dp", "dp+scaffold", "dp+rational", "dp+fbfs", "hetlora+dp", "fedavg+dp+flexlora", "fedibs+dp", "dp+fedibs"):
        with pytest.raises(CompositionError):
            make_method(digits_recipe(**{"method.kind": kind}))
    with pytest.raises(CompositionError, match="unbound"):
        method(**{"channels": [{"kind": "topk", "fraction": 0.5}]})
    for wrong in ({"clip": 0.0}, {"noise": -1.0}, {"delta": 0.0}, {"quantile": 1.0}):
        with pytest.raises(ValueError, match="dp:"):
            method(**wrong)
