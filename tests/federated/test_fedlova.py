from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isthmus.adapters.lora import Lora
from isthmus.core.rounds import server_start
from isthmus.core.types import CompositionError
from isthmus.federated.fedavg import plain
from isthmus.federated.fedlova import fedlova
from isthmus.federated.flexlora import flexlora
from isthmus.federated.flora import flora
from isthmus.parts.channels.quantise import Cast
from isthmus.parts.channels.sparse import TopK
from isthmus.parts.factors import roles_of
from isthmus.parts.work import LocalTraining

from ..conftest import tiny_text_task
from ..contracts.contracts import difference, play

BASE = plain(LocalTraining("sgd", 0.3))


def test_without_query_adapters_it_is_fedavg_bit_for_bit():
    task = tiny_text_task(adapters=[Lora(4, targets=("value",))])
    _, ours, _ = play(fedlova(BASE), task)
    _, theirs, _ = play(BASE, task)
    assert difference(ours.shared, theirs.shared) == 0.0


def test_sharing_both_is_fedavg_bit_for_bit():
    task = tiny_text_task()
    _, ours, _ = play(fedlova(BASE, ("query", "value")), task)
    _, theirs, _ = play(BASE, task)
    assert difference(ours.shared, theirs.shared) == 0.0


def test_exactly_the_value_factors_and_the_head_travel():
    task = tiny_text_task()
    engine, server, records = play(fedlova(BASE), task)
    start = task.init(0)
    travels = {n: t for n, t in start.items() if ".query." not in n}
    assert set(server.shared) == set(travels)
    assert {size[0] for r in records for size in r.up.values()} == {sum(4 * t.numel() for t in travels.values())}
    kept = engine.state()["kept/layers.0.query.lora_b"]
    assert len(torch.unique(kept.flatten(1), dim=0)) == task.clients  # every client has its own
    params = engine.global_params(server)
    assert all(float(t.abs().max()) == 0 for n, t in params.items() if n.endswith("query.lora_b"))


def test_one_client_is_local_training():
    task = tiny_text_task().pooled()
    one, server, _ = play(fedlova(BASE), task, rounds=2)
    alone, _, _ = play(replace(BASE, share=replace(BASE.share, patterns=())), task, rounds=2)
    mine = one.personal_params(server, 0)
    theirs = alone.personal_params(server_start(BASE, task, 0), 0) | {n.removeprefix("kept/"): t[0] for n, t in alone.state().items()}
    assert difference({n: mine[n] for n in task.init(0)}, {n: theirs[n] for n in task.init(0)}) < 1e-6


@pytest.mark.parametrize("other", [flexlora, flora])
@pytest.mark.parametrize("channels", [(), (Cast("bf16"),), (TopK(0.2),)], ids=["plain", "bf16", "topk"])
def test_its_rule_combines_with_other_aggregation_and_channels(other, channels):
    task = tiny_text_task()
    _, server, records = play(replace(fedlova(other(BASE)), channels=channels), task, rounds=2)
    assert not [n for n in server.shared if ".query." in n]
    assert all(torch.isfinite(t).all() for t in server.shared.values())
    assert all(r.up for r in records)


def test_bad_input():
    with pytest.raises(CompositionError, match="at least one role"):
        fedlova(BASE, ())


def test_change_and_dispersion_of_a_role_by_hand():
    b = torch.tensor([[[1.0], [0.0]], [[3.0], [0.0]]])  # two clients, products [[1], [0]] and [[3], [0]]
    after = {"layers.0.value.lora_b": b, "layers.0.value.lora_a": torch.ones(2, 1, 1)}
    before = {"layers.0.value.lora_b": b - torch.tensor([[1.0], [0.0]]), "layers.0.value.lora_a": torch.ones(2, 1, 1)}
    found = roles_of(before, after)["value"]
    assert found["change"] == pytest.approx((2 / 10) ** 0.5)
    assert found["dispersion"] == pytest.approx(1 / 4)  # each is 1 from the mean 2
