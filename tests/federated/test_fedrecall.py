from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isthmus.core.rounds import close_round, open_round, server_start
from isthmus.core.tensors import under
from isthmus.federated.fedavg import plain
from isthmus.federated.fedex_lora import fedex_lora
from isthmus.federated.fedlova import fedlova
from isthmus.federated.fedprox import fedprox
from isthmus.federated.fedrecall import ReCall, contribution, fedrecall, held
from isthmus.federated.fedsa_lora import fedsa_lora
from isthmus.federated.ffa_lora import ffa_lora
from isthmus.federated.flexlora import flexlora
from isthmus.federated.flora import flora
from isthmus.federated.flora_chef import flora_chef
from isthmus.federated.frank_lora import frank_lora
from isthmus.federated.hetlora import hetlora
from isthmus.federated.rolora import rolora
from isthmus.parts.factors import BYPASS_A, BYPASS_B
from isthmus.parts.work import LocalTraining

from ..conftest import tiny_text_task
from ..contracts.contracts import difference, engine, play

BASE = plain(LocalTraining("sgd", 0.3))
WRAPPED = [
    lambda b: b, ffa_lora, fedsa_lora, rolora, flora, flexlora, hetlora, fedex_lora, fedlova, frank_lora, flora_chef, fedprox,
]  # fmt: skip
NAMES = [
    "fedavg", "ffa_lora", "fedsa_lora", "rolora", "flora", "flexlora", "hetlora", "fedex_lora", "fedlova", "frank_lora", "flora_chef",
    "fedprox",
]  # fmt: skip


def recalls(method):
    """With a filter that lets something through on a federation this small."""
    return fedrecall(method, q=2, retention=0.95, reliability=0.0)


@pytest.mark.parametrize("wrap", WRAPPED, ids=NAMES)
def test_without_a_cache_it_is_the_wrapped_method_bit_for_bit(wrap):
    task, method = tiny_text_task(), wrap(BASE)
    a, ours, _ = play(fedrecall(method, q=0), task)
    b, theirs, _ = play(method, task)
    assert difference(ours.shared, theirs.shared) == 0.0
    assert difference(a.state(), b.state()) == 0.0


@pytest.mark.parametrize("wrap", WRAPPED, ids=NAMES)
def test_a_probe_that_never_falls_leaves_the_wrapped_method_bit_for_bit(wrap, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "argmin", lambda self, *a, **k: torch.zeros((), dtype=torch.long))
    task, method = tiny_text_task(), wrap(BASE)
    a, ours, _ = play(recalls(method), task)
    b, theirs, _ = play(method, task)
    assert difference(ours.shared, theirs.shared) == 0.0
    assert difference({n: t for n, t in a.state().items() if not n.startswith("fedrecall/")}, b.state()) == 0.0


@pytest.mark.parametrize("wrap", WRAPPED, ids=NAMES)
def test_payloads_are_those_of_the_wrapped_method(wrap):
    task, sent = tiny_text_task(), []
    for method in (recalls(wrap(BASE)), wrap(BASE)):
        running, server, _ = play(method, task, rounds=2)
        outgoing = open_round(method, server)
        replies = running.exchange(outgoing)
        after, record = close_round(method, task, server, outgoing, replies)
        shapes = {n: (t.dtype, t.shape) for n, t in replies.update.payload.items()}
        sent.append((shapes, replies.up, record.down, set(after.shared), set(after.state)))
    assert sent[0] == sent[1]


def test_outside_of_training_the_server_learns_what_it_learns_without():
    task = tiny_text_task()
    a, ours, _ = play(fedrecall(BASE, q=2, retention=0.95, reliability=0.0, inside=False), task, rounds=4)
    _, theirs, _ = play(BASE, task, rounds=4)
    assert bool((a.state()["fedrecall/strength"] > 0).any())
    assert difference(ours.shared, theirs.shared) < 1e-6


def test_the_bypass_comes_into_force_and_stays_private():
    task, method = tiny_text_task(), recalls(BASE)
    running, server, _ = play(method, task, rounds=4)
    strength = running.state()["fedrecall/strength"]
    assert bool((strength > 0).any())
    models = running.models(server, [0, 1, 2, 3])
    assert float(models["layers.0.value" + BYPASS_B].abs().max()) > 0
    assert not [n for n in {**server.shared, **server.state} if "recall" in n or "bypass" in n]
    assert not [n for n in running.global_params(server) if "bypass" in n]


def test_what_is_recalled_restores_exactly_what_is_missing():
    """u_i' (dW_now + P) v_i = u_i' dW_start v_i + sigma_i for every recalled direction, in float64, with out != in."""
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    o, i, r = 14, 9, 3
    start_b, start_a, now_b, now_a, delta = draw(o, r), draw(r, i), draw(o, r), draw(r, i), draw(o, i)
    own_b, own_a = start_b + draw(o, r), start_a + draw(r, i)
    none_b, none_a = torch.zeros(o, 2, dtype=torch.float64), torch.zeros(2, i, dtype=torch.float64)
    u, s, vh = contribution(own_b, own_a, none_b, none_a, start_b, start_a)
    memory = {"u": u, "v": vh.mT, "s": s, "before": held(u, vh.mT, start_b, start_a, None), "old_u": u[:, :4], "old_v": vh.mT[:, :4]}
    found, _ = ReCall(q=4, retention=1.0, reliability=0.0)._missing(memory, now_b, now_a, delta)
    p = found[BYPASS_B] @ found[BYPASS_A]
    now = ((u.mT @ (now_b @ now_a + delta + p)) * vh).sum(-1)
    recalled = (u.mT @ found[BYPASS_B]).abs().amax(1) > 1e-9
    assert int(recalled.sum()) >= 1
    assert float((now - memory["before"] - s)[recalled].abs().max()) < 1e-12


def test_the_contribution_from_factors_is_the_dense_svd():
    g = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    b, a, p_b, p_a, sb, sa = draw(12, 2), draw(2, 7), draw(12, 1), draw(1, 7), draw(12, 2), draw(2, 7)
    u, s, vh = contribution(b, a, p_b, p_a, sb, sa)
    dense = b @ a + p_b @ p_a - sb @ sa
    torch.testing.assert_close(s[:5], torch.linalg.svdvals(dense)[:5], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(u @ torch.diag(s) @ vh, dense, rtol=1e-10, atol=1e-12)


def test_a_direction_that_arrived_in_full_is_not_recalled():
    u, v = torch.eye(4)[:, :2], torch.eye(3)[:, :2]
    memory = {"u": u, "v": v, "s": torch.tensor([2.0, 1.0]), "before": torch.zeros(2), "old_u": u, "old_v": v}
    b, a = torch.zeros(4, 1), torch.zeros(1, 3)
    b[0, 0], a[0, 0] = 2.0, 1.0  # the first direction is all there, the second is not
    found, kept = ReCall(q=2)._missing(memory, b, a, None)
    p = found[BYPASS_B] @ found[BYPASS_A]
    expected = torch.zeros(4, 3)
    expected[1, 1] = 1.0
    torch.testing.assert_close(p, expected)
    torch.testing.assert_close(kept["seen"], torch.tensor([[2.0, 1.0], [1.0, 0.0]]))


def test_a_direction_never_met_before_waits():
    u, v = torch.eye(4)[:, :2], torch.eye(3)[:, :2]
    memory = {
        "u": u,
        "v": v,
        "s": torch.tensor([2.0, 1.0]),
        "before": torch.zeros(2),
        "old_u": torch.zeros(4, 2),
        "old_v": torch.zeros(3, 2),
    }
    found, kept = ReCall(q=2)._missing(memory, torch.zeros(4, 1), torch.zeros(1, 3), None)
    assert float(found[BYPASS_B].abs().max()) == 0
    again, _ = ReCall(q=2)._missing(memory | kept, torch.zeros(4, 1), torch.zeros(1, 3), None)
    assert float(again[BYPASS_B].abs().max()) > 0


def test_the_probe_takes_no_number_from_the_order_of_examples():
    task = tiny_text_task()
    running = engine(recalls(BASE), task)
    other = engine(BASE, task)
    outgoing = open_round(BASE, server_start(BASE, task, 0))
    assert torch.equal(running._batches(outgoing, [0, 1])["row"], other._batches(outgoing, [0, 1])["row"])
    assert not torch.equal(running.batches.probe(task.rows(0, "train"), 0, 0, 0), running.batches.draw(task.rows(0, "train"), 0, 0, 0)[0])


def test_memory_is_of_the_client_alone():
    task = tiny_text_task()
    running, _, _ = play(recalls(BASE), task)
    mine = under(running.state(), "fedrecall/")
    assert len(torch.unique(mine["layers.0.value.s"], dim=0)) == task.clients


def test_bad_input():
    for bad, says in (({"q": -1}, "q = -1"), ({"retention": 0.0}, "retention = 0.0"), ({"strengths": ()}, "strengths = ()")):
        with pytest.raises(ValueError, match=says.replace("(", r"\(").replace(")", r"\)")):
            fedrecall(BASE, **bad)
    assert replace(fedrecall(BASE), plugins=()) == BASE
