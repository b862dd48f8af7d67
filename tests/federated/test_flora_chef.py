from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isthmus.core.rounds import close_round, open_round, server_start
from isthmus.core.types import CompositionError
from isthmus.federated.fedavg import plain
from isthmus.federated.ffa_lora import ffa_lora
from isthmus.federated.flexlora import flexlora
from isthmus.federated.flora_chef import Fire, flfire, flora_chef, flsauce, spread_weights, stable_weights
from isthmus.federated.rolora import rolora
from isthmus.parts.aggregate import mean_product
from isthmus.parts.work import LocalTraining

from ..conftest import tiny_text_task
from ..contracts.contracts import difference, engine, play

BASE = plain(LocalTraining("sgd", 0.3))
SHARES = torch.tensor([0.1, 0.2, 0.3, 0.4])


def test_alternating_with_ordinary_weights_is_rolora_bit_for_bit():
    task = tiny_text_task()
    _, ours, _ = play(flora_chef(BASE, rule="alternate", diversity=0.0, stability=0.0), task, rounds=4)
    _, theirs, _ = play(rolora(BASE), task, rounds=4)
    assert difference(ours.shared, theirs.shared) == 0.0


@pytest.mark.parametrize("weigh", [spread_weights, stable_weights])
def test_weights_sum_to_one_follow_the_clients_and_are_equal_for_identical_ones(weigh):
    flat = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    w = weigh(flat, SHARES, 2.0)
    assert float(w.sum()) == pytest.approx(1, abs=1e-6)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(weigh(flat[order], SHARES[order], 2.0), w[order])
    same = flat[:1].expand(4, -1)
    torch.testing.assert_close(weigh(same, torch.full((4,), 0.25), 2.0), torch.full((4,), 0.25))
    torch.testing.assert_close(weigh(flat, SHARES, 0.0), SHARES)


def test_an_outlier_of_ten_times_the_length_counts_less_by_the_formula():
    flat = torch.eye(4) * torch.tensor([1.0, 1.1, 0.9, 10.0])[:, None]
    w = stable_weights(flat, torch.full((4,), 0.25), 0.5)
    # torch's median of four is the lower middle: 1.0; deviations 0, 0.1, 0.1, 9.0, their median 0.1
    raw = torch.exp(-0.5 * torch.tensor([0.0, 1.0, 1.0, 90.0]))
    torch.testing.assert_close(w, raw / raw.sum(), rtol=1e-4, atol=1e-7)


def test_near_copies_do_not_dominate():
    flat = torch.tensor([[1.0, 0.0], [1.0, 0.01], [0.0, 1.0]])
    w = spread_weights(flat, torch.full((3,), 1 / 3), 1.0)
    assert float(w[2]) > float(w[0])
    cosine = torch.nn.functional.cosine_similarity(flat[:, None], flat[None], dim=-1)
    mean = (cosine.sum(1) - 1) / 2
    raw = torch.exp(-(mean - mean.max()))
    torch.testing.assert_close(w, raw / raw.sum())


def test_the_aggregated_product_is_the_mean_of_products():
    task, method = tiny_text_task(), flora_chef(BASE, diversity=0.0, stability=0.0)
    running, server, _ = play(method, task, rounds=1)
    outgoing = open_round(method, server)
    replies = running.exchange(outgoing)
    after, record = close_round(method, task, server, outgoing, replies)
    for layer in ("layers.0.query", "layers.1.value"):
        got = after.shared[f"{layer}.lora_b"] @ after.shared[f"{layer}.lora_a"]
        assert float((got - mean_product(replies.update, server, layer)).abs().max()) < 1e-6
    assert record.metrics["aggregation_error"] < 1e-5


def turns(rule: str, dispersion: tuple[float, float], patience: int = 2, margin: float = 1.1, rounds: int = 6) -> list[int]:
    """The factor of each round (0: B, 1: A) when dispersions stay as they are."""
    state = {"dispersion": torch.tensor(dispersion), "run": torch.zeros(2), "seen": torch.zeros(2)}
    fire, out = Fire(rule, margin, patience), []
    for _ in range(rounds):
        side = fire._side(state["run"], state["seen"], state["dispersion"])
        out.append(side)
        state["run"][1 - side] = 0
        state["run"][side] += 1
        state["seen"][side] += 1
    return out


def test_which_factor_takes_its_turn():
    assert turns("alternate", (1.0, 9.0)) == [0, 1, 0, 1, 0, 1]
    assert turns("lowest", (1.0, 9.0)) == [0, 1, 0, 0, 1, 0]  # B agrees more; after two in a row A has its turn
    assert turns("highest", (1.0, 9.0)) == [0, 1, 1, 0, 1, 1]
    assert turns("lowest", (1.0, 1.05), patience=9) == [0, 1, 1, 1, 1, 1]  # within the margin nothing changes


def test_both_halves_work_alone():
    task = tiny_text_task()
    _, fire, records = play(flfire(BASE), task, rounds=3)
    start = server_start(BASE, task, 0).shared
    assert float(fire.state["aggregate/seen"].sum()) == 3
    assert {size for r in records for size in r.up.values()} != set()
    _, sauce, _ = play(flsauce(BASE), task, rounds=2)
    assert difference(sauce.shared, start) > 0
    _, both, _ = play(flsauce(ffa_lora(BASE)), task, rounds=2)
    assert not [n for n in both.shared if n.endswith(".lora_a")]


def test_one_factor_travels_a_round():
    task, method = tiny_text_task(), flora_chef(BASE)
    running, server = engine(method, task), server_start(method, task, 0)
    for side in (".lora_b", ".lora_a"):
        outgoing = open_round(method, server)
        replies = running.exchange(outgoing)
        sent = {n for n in replies.update.payload if ".lora_" in n}
        assert sent
        assert all(n.endswith(side) for n in sent)
        server, _ = close_round(method, task, server, outgoing, replies)
        running.commit(outgoing.cohort)


def test_bad_input():
    for bad, says in (({"margin": 0.5}, "margin = 0.5"), ({"patience": 0}, "patience = 0"), ({"diversity": -1.0}, "diversity = -1.0")):
        with pytest.raises(ValueError, match=says):
            flora_chef(BASE, **bad)
    with pytest.raises(CompositionError, match="ProductSVD is none"):
        flsauce(flexlora(BASE))
    with pytest.raises(CompositionError):
        replace(flsauce(BASE), channels=()).check({"body.weight": torch.zeros(2, 2)})
