"""Worked by hand, or identities that the papers state."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isthmus.core.rounds import open_round, server_round, server_start
from isthmus.core.types import Server, Update
from isthmus.engines.simulator import Simulator
from isthmus.federated import ffa_lora, flexlora, flora, hetlora, rolora, scaffold
from isthmus.federated.fedavg import plain
from isthmus.parts.aggregate import ByNorm, CohortMean, IntoBase, ProductSVD, WeightedMean
from isthmus.parts.apply import Adaptive
from isthmus.parts.factors import trained
from isthmus.parts.observe import AggregationError
from isthmus.parts.work import LocalTraining

from ..conftest import digits_task, tiny_text_task
from ..contracts.contracts import play

SGD = LocalTraining("sgd", 0.3)


def server_of(shared, round=0, clients=3):
    return Server(shared, {}, round, (-1,) * clients, dict.fromkeys(shared, -2), frozenset(), 0)


def update_of(payload, weight=(1.0, 2.0, 3.0), rank=None):
    return Update(payload, torch.tensor(weight), {}, torch.arange(len(weight)), rank)


def factors(k=3, out=5, r=2, width=7):
    g = torch.Generator().manual_seed(0)
    shared = {"x.lora_a": torch.randn(r, width, generator=g), "x.lora_b": torch.randn(out, r, generator=g)}
    payload = {n: torch.randn(k, *t.shape, generator=g) for n, t in shared.items()}
    return server_of(shared), update_of(payload)


def mean_product(server, update):
    b, a = server.shared["x.lora_b"] + update.payload["x.lora_b"], server.shared["x.lora_a"] + update.payload["x.lora_a"]
    return torch.einsum("k,kor,kri->oi", update.shares, b, a)


def test_fedavg_by_hand():
    step, _ = WeightedMean()(update_of({"w": torch.tensor([[6.0], [0.0], [2.0]])}), server_of({"w": torch.zeros(1)}), {})
    assert step["w"].item() == pytest.approx((1 * 6 + 2 * 0 + 3 * 2) / 6)


def test_one_client_of_fedavg_is_plain_training():
    task = digits_task().pooled()
    _, server, _ = play(plain(SGD), task, rounds=1)
    engine, local, _ = play(replace(plain(SGD), share=replace(plain().share, patterns=())), task, rounds=1)
    for n, t in server.shared.items():
        torch.testing.assert_close(t, engine.personal_params(local, 0)[n])


def test_scaffold_control_variates_by_hand():
    step, _ = CohortMean()(update_of({"control.w": torch.tensor([[3.0], [1.0], [2.0]])}), server_of({}, clients=6), {})
    assert step["control.w"].item() == pytest.approx(1.0)  # sum 6 over 6 clients, 3 of which took part


def test_scaffold_keeps_the_server_variate_at_the_mean_of_the_clients():
    engine, server, _ = play(scaffold.scaffold(plain(SGD)), digits_task(), rounds=3)
    for n, c in server.shared.items():
        if n.startswith("control."):
            own = engine.state()[f"scaffold/{n.removeprefix('control.')}"]
            torch.testing.assert_close(own.mean(0), c, rtol=1e-4, atol=1e-6)


def test_the_first_round_of_scaffold_is_fedavg():
    task = digits_task()
    _, a, _ = play(scaffold.scaffold(plain(SGD)), task, rounds=1)
    _, b, _ = play(plain(SGD), task, rounds=1)
    assert all(torch.allclose(a.shared[n], b.shared[n], atol=1e-7) for n in b.shared)


@pytest.mark.parametrize("rule", ["adam", "yogi"])
def test_server_optimisers_by_hand(rule):
    part = Adaptive(rule, lr=0.1, betas=(0.9, 0.99), tau=0.01)
    server = server_of({"w": torch.tensor([1.0])})
    state, x, m, v = part.init(server.shared), 1.0, 0.0, 0.01**2
    for d in (0.5, -0.2):
        changed, state = part(replace(server, shared={"w": torch.tensor([x])}), {"w": torch.tensor([d])}, state)
        m = 0.9 * m + 0.1 * d
        v = 0.99 * v + 0.01 * d * d if rule == "adam" else v - 0.01 * d * d * (1 if v > d * d else -1)
        x += 0.1 * m / (v**0.5 + 0.01)
        assert changed["w"].item() == pytest.approx(x, rel=1e-5)


def test_flora_stacks_exactly_and_starts_afresh():
    server, update = factors()
    step, state = IntoBase()(update, server, {})
    torch.testing.assert_close(step["x.delta"], mean_product(server, update))
    assert state["x.stack_b"].shape == (5, 6)


def test_the_rank_of_flora_does_not_grow_and_the_merged_base_is_kept():
    task = tiny_text_task()
    method = flora.flora(plain(SGD))
    engine, server, records = play(method, task, rounds=4)
    assert all(t.shape[0] == 4 for n, t in server.shared.items() if n.endswith("lora_a"))
    assert all(not t.any() for n, t in server.shared.items() if n.endswith("lora_b"))
    assert any(t.any() for n, t in server.shared.items() if n.endswith("delta"))
    assert len({tuple(r.up.values()) for r in records}) == 1
    params = engine.global_params(server)
    rows = task.rows(0, "test")
    with_base = task.score(params, rows)["loss"]
    without = task.score({n: t for n, t in params.items() if not n.endswith("delta")}, rows)["loss"]
    assert not torch.allclose(with_base, without)


def test_fedex_adds_what_averaging_lost():
    server, update = factors()
    step, state = IntoBase(residual=True)(update, server, {})
    averaged = (server.shared["x.lora_b"] + step["x.lora_b"]) @ (server.shared["x.lora_a"] + step["x.lora_a"])
    torch.testing.assert_close(averaged + step["x.delta"], mean_product(server, update))
    assert state["x.stack_a"].shape == ((3 + 1) * 2, 7)


def test_flexlora_is_the_best_approximation_of_the_mean_product():
    server, update = factors()
    step, _ = ProductSVD()(update, server, {})
    got = (server.shared["x.lora_b"] + step["x.lora_b"]) @ (server.shared["x.lora_a"] + step["x.lora_a"])
    target = mean_product(server, update)
    lost = torch.linalg.svdvals(target)[2:].square().sum().sqrt()
    torch.testing.assert_close(torch.linalg.matrix_norm(got - target), lost, rtol=1e-4, atol=1e-5)


def test_hetlora_weighs_by_the_norm_of_the_product():
    server, update = factors()
    step, _ = ByNorm()(update, server, {})
    b, a = trained(update, server, "x")
    w = torch.linalg.matrix_norm(b @ a)
    expected = torch.einsum("k,kri->ri", w / w.sum(), a)
    torch.testing.assert_close(server.shared["x.lora_a"] + step["x.lora_a"], expected)


def test_unequal_ranks_are_zero_beyond_their_own():
    server, update = factors()
    rank = torch.tensor([1, 2, 1])
    payload = {n: t.clone() for n, t in update.payload.items()}
    payload["x.lora_a"][0, 1:] = payload["x.lora_a"][2, 1:] = 0
    payload["x.lora_b"][0, :, 1:] = payload["x.lora_b"][2, :, 1:] = 0
    update = replace(update, payload=payload, rank=rank)
    b, a = trained(update, server, "x")
    assert not b[0, :, 1:].any()
    assert not a[2, 1:].any()
    step, state = IntoBase()(update, server, {})
    torch.testing.assert_close(step["x.delta"], torch.einsum("k,kor,kri->oi", update.shares, b, a))
    assert state["x.stack_b"].shape == (5, 4)  # 1 + 2 + 1: padding does not travel


def test_hetlora_prunes_ranks_and_never_below_one():
    task = tiny_text_task()
    engine, _, _ = play(hetlora.hetlora(plain(SGD), keep=0.5, penalty=0.5, prune=True), task, rounds=6)
    ranks = engine.state()["rank"]
    assert (ranks >= 1).all()
    assert (ranks < 4).any()


def test_one_common_factor_makes_averaging_exact():
    for method in (ffa_lora.ffa_lora(plain(SGD)), rolora.rolora(plain(SGD))):
        _, _, records = play(method, tiny_text_task(), rounds=4)
        assert all(r.metrics.get("aggregation_error", 0.0) < 1e-6 for r in records)
    _, _, records = play(plain(SGD), tiny_text_task(), rounds=4)
    assert records[-1].metrics["aggregation_error"] > 1e-5


def test_the_aggregation_error_is_the_weighted_covariance():
    server, update = factors()
    b, a = trained(update, server, "x")
    w = update.shares
    mean_b, mean_a = torch.einsum("k,kor->or", w, b), torch.einsum("k,kri->ri", w, a)
    covariance = torch.einsum("k,kor,kri->oi", w, b - mean_b, a - mean_a)
    expected = torch.linalg.matrix_norm(covariance) / torch.linalg.matrix_norm(mean_product(server, update))
    assert AggregationError()(update, server, server)["aggregation_error"] == pytest.approx(float(expected), rel=1e-4)


def test_ffa_never_moves_or_sends_a():
    task = tiny_text_task()
    method = ffa_lora.ffa_lora(plain(SGD))
    engine, server, _ = play(method, task, rounds=2)
    start = task.init(0)
    assert all(
        torch.equal(engine.state()[f"kept/{n}"], t.expand_as(engine.state()[f"kept/{n}"])) for n, t in start.items() if n.endswith("lora_a")
    )
    assert not any(n.endswith("lora_a") for n in server.shared)


def test_rolora_takes_turns_and_halves_the_uplink():
    task = tiny_text_task()
    method = rolora.rolora(plain(SGD))
    engine, server = Simulator(method, task), server_start(method, task, 0)
    names = []
    for _ in range(2):
        names.append(set(engine.exchange(open_round(method, server)).update.payload))
        server, _ = server_round(method, task, server, engine)
    assert not any(n.endswith("lora_a") for n in names[0])
    assert not any(n.endswith("lora_b") for n in names[1])
    assert all("head.weight" in n for n in names)


def test_flexlora_of_one_client_keeps_its_product():
    task = tiny_text_task(clients=1)
    _, a, _ = play(flexlora.flexlora(plain(SGD)), task, rounds=1)
    _, b, _ = play(plain(SGD), task, rounds=1)
    for n in a.shared:
        if n.endswith("lora_b"):
            m = n.replace("lora_b", "lora_a")
            torch.testing.assert_close(a.shared[n] @ a.shared[m], b.shared[n] @ b.shared[m], rtol=1e-4, atol=1e-6)


def test_fedex_of_equal_clients_is_fedavg():
    server, update = factors()
    same = replace(update, payload={n: t[:1].expand_as(t) for n, t in update.payload.items()})
    step, _ = IntoBase(residual=True)(same, server, {})
    assert float(step["x.delta"].abs().max()) < 1e-5
