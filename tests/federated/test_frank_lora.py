from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isthmus.adapters.lora import Lora
from isthmus.core import seeds
from isthmus.core.rounds import close_round, open_round, server_start
from isthmus.core.types import Inbox
from isthmus.federated.fedavg import plain
from isthmus.federated.ffa_lora import ffa_lora
from isthmus.federated.frank_lora import Drawn, RankRate, frank_lora, rank_rate
from isthmus.federated.hetlora import hetlora
from isthmus.parts.share import ByName
from isthmus.parts.work import LocalTraining

from ..conftest import tiny_text_task
from ..contracts.contracts import difference, engine, play

SGD = LocalTraining("sgd", 0.3)
BASE = plain(SGD)


@pytest.mark.parametrize(("rank", "inputs"), [(2, 16), (4, 16), (8, 64), (32, 64)])
def test_signal_to_noise_of_a_gaussian_a_is_r_over_n_plus_one(rank, inputs):
    g = torch.randn(inputs, generator=torch.Generator().manual_seed(0))
    ratios = []
    for client in range(600):
        a = Drawn()("layer", (rank, inputs), 0, 0, torch.tensor(client), torch.tensor(rank))
        ratios.append(float((g @ a.mT @ a - g).square().sum() / g.square().sum()))
    noise = torch.tensor(ratios)
    error = float(noise.std() / len(noise) ** 0.5)
    assert float(noise.mean()) == pytest.approx((inputs + 1) / rank, abs=4 * error)


def test_an_orthogonal_a_of_full_rank_changes_nothing():
    a = Drawn(draw="orthogonal")("layer", (16, 16), 0, 0, torch.tensor(0), torch.tensor(16))
    torch.testing.assert_close(a.mT @ a, torch.eye(16), rtol=0, atol=1e-5)
    half = Drawn(draw="orthogonal")("layer", (8, 16), 0, 0, torch.tensor(0), torch.tensor(8))
    torch.testing.assert_close(half @ half.mT, 2 * torch.eye(8), rtol=0, atol=1e-5)


def test_full_rank_and_orthogonal_is_full_fine_tuning_of_the_matrix_by_sgd():
    """One SGD step on B with A'A = I moves the weight by lr times its own gradient."""
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    w = torch.zeros(3, 6, requires_grad=True)
    (x @ w.mT - x[:, :3]).square().mean().backward()
    a = Drawn(draw="orthogonal")("layer", (6, 6), 0, 0, torch.tensor(0), torch.tensor(6))
    b = torch.zeros(3, 6, requires_grad=True)
    (x @ (b @ a).mT - x[:, :3]).square().mean().backward()
    torch.testing.assert_close(b.grad @ a, w.grad, rtol=1e-4, atol=1e-5)


def test_rows_beyond_the_rank_are_zero_and_the_scale_is_that_of_the_rank():
    a = Drawn()("layer", (8, 400), 0, 3, torch.tensor(1), torch.tensor(2))
    assert float(a[2:].abs().max()) == 0
    assert float(a[:2].var()) == pytest.approx(1 / 2, rel=0.15)


def test_when_a_is_drawn_anew():
    draw = lambda every, round, client=0, common=False: Drawn(every, common)("l", (2, 4), 0, round, torch.tensor(client), torch.tensor(2))
    assert not torch.equal(draw(1, 0), draw(1, 1))
    assert torch.equal(draw(2, 0), draw(2, 1))
    assert not torch.equal(draw(2, 1), draw(2, 2))
    assert torch.equal(draw(0, 0), draw(0, 99))
    assert not torch.equal(draw(1, 0, 0), draw(1, 0, 1))
    assert torch.equal(draw(1, 0, 0, True), draw(1, 0, 1, True))


@pytest.mark.parametrize("ranks", [None, (1, 2, 4, 3)])
def test_the_merged_update_is_the_mean_of_products_with_each_clients_own_a(ranks):
    task, method = tiny_text_task(ranks=ranks), frank_lora(BASE)
    running, server, _ = play(method, task, rounds=1)
    outgoing = open_round(method, server)
    replies = running.exchange(outgoing)
    after, _ = close_round(method, task, server, outgoing, replies)
    for layer in ("layers.0.query", "layers.1.value"):
        expected = torch.zeros_like(server.shared[f"{layer}.delta"])
        for i, client in enumerate(replies.update.client.tolist()):
            rank = 4 if ranks is None else ranks[client]
            a = seeds.normal(seeds.key(0, 1, client, layer, "frank"), (4, 32)) / rank**0.5
            a[rank:] = 0
            expected += replies.update.shares[i] * replies.update.payload[f"{layer}.lora_b"][i] @ a
        torch.testing.assert_close(after.shared[f"{layer}.delta"] - server.shared[f"{layer}.delta"], expected, rtol=1e-4, atol=1e-7)


def test_half_the_uplink_where_layers_are_square():
    task = tiny_text_task()
    _, _, ours = play(frank_lora(BASE), task, rounds=1)
    _, _, theirs = play(BASE, task, rounds=1)
    head = 4 * (3 * 32 + 3)
    assert ours[0].up[0][0] - head == (theirs[0].up[0][0] - head) // 2


def test_never_resampled_and_common_is_ffa_lora_with_that_a():
    """The base holds what FFA-LoRA's B holds: the same model up to rounding, with plain SGD."""
    task = tiny_text_task()
    _, server, _ = play(frank_lora(BASE, every=0, common=True), task)
    drawn = Drawn(0, True)

    class SameStart:
        def __getattr__(self, name):
            return getattr(task, name)

        def init(self, seed):
            full = torch.tensor(4)
            return {
                n: drawn(n.removesuffix(".lora_a"), tuple(t.shape), 0, 0, torch.tensor(0), full) if n.endswith("lora_a") else t
                for n, t in task.init(seed).items()
            }

    ffa, reference, _ = play(ffa_lora(BASE), SameStart())
    for layer in ("layers.0.query", "layers.1.value"):
        product = reference.shared[f"{layer}.lora_b"] @ ffa.global_params(reference)[f"{layer}.lora_a"]
        torch.testing.assert_close(server.shared[f"{layer}.delta"], product, rtol=1e-3, atol=1e-6)


def test_rates_grow_with_the_rank():
    params = {"x.lora_a": torch.zeros(8, 31), "x.lora_b": torch.zeros(5, 8)}
    inbox = Inbox({}, 0, torch.tensor(0), rank=torch.tensor(2))
    rates = RankRate().rates(params, {}, inbox)
    assert set(rates) == {"x.lora_b"}
    assert float(rates["x.lora_b"]) == pytest.approx(2 * (8 + 32) / (8 * (2 + 32)))
    assert float(RankRate().rates(params, {}, replace(inbox, rank=None))["x.lora_b"]) == pytest.approx(1)
    assert float(RankRate(reference=2).rates(params, {}, inbox)["x.lora_b"]) == pytest.approx(1)


def test_rates_work_with_any_method_of_frozen_a():
    task = tiny_text_task(ranks=(1, 2, 4, 3))
    _, with_rates, _ = play(rank_rate(ffa_lora(BASE)), task)
    _, without, _ = play(ffa_lora(BASE), task)
    assert difference(with_rates.shared, without.shared) > 1e-4
    equal = tiny_text_task()
    _, with_rates, _ = play(rank_rate(ffa_lora(BASE)), equal)
    _, without, _ = play(ffa_lora(BASE), equal)
    assert difference(with_rates.shared, without.shared) < 1e-6


def test_the_accumulated_update_is_not_bound_to_the_rank():
    task = tiny_text_task(adapters=[Lora(1)])
    _, server, _ = play(frank_lora(BASE), task, rounds=4)
    s = torch.linalg.svdvals(server.shared["layers.1.value.delta"])
    assert int((s > 1e-4 * s[0]).sum()) > 4


def test_a_never_travels():
    task, method = tiny_text_task(), frank_lora(BASE)
    running, server = engine(method, task), server_start(method, task, 0)
    for _ in range(2):
        outgoing = open_round(method, server)
        replies = running.exchange(outgoing)
        assert not [n for n in replies.update.payload if n.endswith("lora_a")]
        server, _ = close_round(method, task, server, outgoing, replies)
        message = method.send.message(server, 0)
        assert not [n for n in message if n.endswith(("lora_a", "stack_a"))]
        running.commit(outgoing.cohort)


def test_bad_input():
    with pytest.raises(ValueError, match="every = -1"):
        frank_lora(BASE, every=-1)
    with pytest.raises(ValueError, match="reference = 0"):
        rank_rate(BASE, reference=0)
    assert hetlora(BASE).share == ByName()  # other methods keep their share
