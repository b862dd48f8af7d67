from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isthmus.adapters.bias import Biases
from isthmus.core.rounds import open_round
from isthmus.core.tensors import select
from isthmus.core.types import CompositionError, Inbox, Server, Update
from isthmus.core.wire import pack, schema
from isthmus.federated.fedavg import plain
from isthmus.federated.fedibs import OnlyPresent, Schedule, Selection, fedibs
from isthmus.parts.aggregate import MeanWherePresent
from isthmus.parts.channels.privacy import GaussianNoise
from isthmus.parts.channels.quantise import Int8
from isthmus.parts.work import LocalTraining

from ..conftest import tiny_text_task
from ..contracts.contracts import difference, engine, play

BASE = plain(LocalTraining("sgd", 0.3))


def task():
    return tiny_text_task(adapters=[Biases()])


def test_nothing_personal_is_fedavg_on_biases_bit_for_bit():
    one = task()
    _, ours, _ = play(fedibs(BASE, rho=0.0), one)
    _, theirs, _ = play(BASE, one)
    assert difference({n: ours.shared[n] for n in theirs.shared}, theirs.shared) == 0.0


def test_the_schedule_grows_from_nothing_to_rho():
    schedule = Schedule(0.5, 4)
    assert [schedule.count(100, t) for t in range(6)] == [0, 7, 25, 42, 50, 50]
    assert Schedule(1.0, 1).count(7, 3) == 7


def test_masks_are_nested_and_as_large_as_the_schedule_says():
    one, method = task(), fedibs(BASE, rho=0.6, horizon=3)
    running, server, before = engine(method, one), None, None
    for round in range(4):
        running, server, _ = play(method, one, rounds=1, running=running, server=server)
        masks = {n: t for n, t in running.state().items() if n.startswith("fedibs/mask.")}
        for n, mask in masks.items():
            assert (mask.sum(1) == Schedule(0.6, 3).count(mask.shape[1], round)).all()
            assert before is None or bool((mask | ~before[n]).all())
        before = {n: t.clone() for n, t in masks.items()}


def test_wire_bytes_are_bits_of_the_mask_and_the_shareable_values():
    one, method = task(), fedibs(BASE, rho=0.5, horizon=1)
    running, server, _ = play(method, one, rounds=1)
    outgoing = open_round(method, server)
    replies = running.exchange(outgoing)
    biases = [t.numel() for n, t in one.init(0).items() if n.endswith(".bias") and n != "head.bias"]
    head = 3 * 32 + 3
    expected = sum(-(-d // 8) + 4 * (d - d // 2) for d in biases) + 4 * head
    assert {size[0] for size in replies.up.values()} == {expected}
    first = select(replies.update.payload, 0)
    assert len(pack(first)) == expected + 24  # the header
    assert schema(first)["mask.layers.0.down.bias"] == (torch.uint8, (4,))


def test_what_travels_comes_back():
    channel, inbox = OnlyPresent(Schedule(0.5, 1)), Inbox({}, 5, torch.tensor(0))
    mask = torch.tensor([True, False, True, True, False, False, False, True, False, True])
    payload = {"x.bias": torch.arange(10.0) * mask, "mask.x.bias": mask, "head.weight": torch.ones(2)}
    sent = channel.encode(payload, inbox)
    assert sent["x.bias"].tolist() == [0, 2, 3, 7, 9]
    assert sent["mask.x.bias"].tolist() == [0b10001101, 0b10]
    back = channel.decode(sent, schema(payload))
    assert difference(back, payload) == 0.0
    nothing = {"x.bias": torch.zeros(3), "mask.x.bias": torch.zeros(3, dtype=torch.bool)}
    all_personal = OnlyPresent(Schedule(1.0, 1))
    assert difference(all_personal.decode(all_personal.encode(nothing, inbox), schema(nothing)), nothing) == 0.0


def test_each_coordinate_is_averaged_over_those_who_sent_it():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    payload = {"x.bias": torch.tensor([[1.0, 2.0, 9.0], [4.0, 8.0, 9.0]]), "mask.x.bias": mask, "head.bias": torch.tensor([[1.0], [3.0]])}
    update = Update(payload, torch.tensor([1.0, 3.0]), {}, torch.arange(2))
    step, _ = MeanWherePresent()(update, Server({}, {}, 0, (-1, -1), {}, frozenset(), 0), {})
    assert set(step) == {"x.bias", "head.bias"}
    torch.testing.assert_close(step["x.bias"], torch.tensor([3.25, 2.0, 0.0]))
    torch.testing.assert_close(step["head.bias"], torch.tensor([2.5]))


def test_fisher_of_a_logistic_model_is_the_squared_gradient_by_hand():
    x, y = torch.tensor([1.0, 2.0, -1.0]), torch.tensor([1.0, 0.0, 1.0])

    def loss(params, batch):
        return torch.nn.functional.binary_cross_entropy_with_logits(batch["x"] + params["x.bias"][0], batch["y"])

    plugin = Selection(Schedule(0.5, 1), decay=0.0)
    params = {"x.bias": torch.zeros(1)}
    _, memory = plugin.begin(params, plugin.init(params), Inbox(params, 0, torch.tensor(0)), loss, {"x": x, "y": y})
    by_hand = (torch.sigmoid(x) - y).mean() ** 2
    torch.testing.assert_close(memory["fisher.x.bias"][0], by_hand)


def test_personal_coordinates_keep_their_value_and_the_others_follow():
    one, method = task(), fedibs(BASE, rho=0.5, horizon=1)
    running, server, _ = play(method, one, rounds=3)
    models, state = running.models(server, [0, 1, 2, 3]), running.state()
    for n in ("layers.0.up.bias", "layers.1.down.bias"):
        mask = state[f"fedibs/mask.{n}"]
        assert torch.equal(models[n][mask], state[f"fedibs/own.{n}"][mask])
        assert torch.equal(models[n][~mask], server.shared[n].expand_as(models[n])[~mask])


def test_what_becomes_personal_is_what_costs_most():
    plugin = Selection(Schedule(0.5, 1))
    params = {"x.bias": torch.tensor([0.3, 0.1, 0.2, 0.0])}
    memory = plugin.init(params) | {"fisher.x.bias": torch.tensor([1.0, 4.0, 9.0, 100.0])}
    inbox = Inbox({"x.bias": torch.zeros(4)}, 1, torch.tensor(0))
    _, after, extra = plugin.end(params, memory, inbox, None)
    assert after["mask.x.bias"].tolist() == [True, False, True, False]  # costs 0.09, 0.04, 0.36, 0
    assert extra["mask.x.bias"].tolist() == [False, True, False, True]
    keeps = memory | {"mask.x.bias": torch.tensor([False, False, False, True])}
    assert plugin.end(params, keeps, inbox, None)[1]["mask.x.bias"].tolist() == [False, False, True, True]


def test_clients_choose_for_themselves():
    running, _, _ = play(fedibs(BASE, rho=0.5, horizon=2), task(), rounds=3)
    masks = torch.cat([t for n, t in running.state().items() if n.startswith("fedibs/mask.")], 1)
    assert len(torch.unique(masks, dim=0)) == len(masks)


@pytest.mark.parametrize("score", ["laplace", "fisher", "change", "random"])
def test_every_score_runs(score):
    _, server, _ = play(fedibs(BASE, score=score, horizon=1), task(), rounds=2)
    assert all(torch.isfinite(t).all() for t in server.shared.values())


def test_only_biases_of_the_feed_forward_layers_and_the_head_train():
    assert {n.rpartition(".")[2] for n in task().init(0)} == {"bias", "weight"}
    assert {n.split(".")[2] for n in task().init(0) if n.startswith("layers.")} == {"up", "down"}


def test_bad_input_and_what_does_not_fit():
    for bad, says in (({"rho": 1.5}, "rho = 1.5"), ({"horizon": 0}, "horizon = 0"), ({"decay": 1.0}, "decay = 1.0")):
        with pytest.raises(ValueError, match=says):
            fedibs(BASE, **bad)
    one = fedibs(BASE)
    with pytest.raises(CompositionError, match="feedback = false"):
        replace(one, channels=(*one.channels, Int8()))
    replace(one, channels=(*one.channels, Int8(feedback=False)))
    with pytest.raises(CompositionError, match="OnlyPresent took away"):
        replace(one, channels=(*one.channels, GaussianNoise(1.0, 0.1)))


def test_with_private_masks_noise_and_secure_sums_go_over_it():
    """No mask travels; without a personal coordinate it is the base; dp, local noise and secure sums take it as any other method."""
    from isthmus.core.rounds import open_round, upload_schemas
    from isthmus.runner import make_method

    from ..conftest import digits_recipe, tiny_text_task
    from ..contracts.contracts import difference, play

    t = tiny_text_task(adapters=[Biases()])

    def method(kind, **more):
        return make_method(digits_recipe(**{"method.kind": kind, "method.fedibs": {"private_masks": True, "horizon": 2}, **more}))

    plain = make_method(digits_recipe())
    none = make_method(digits_recipe(**{"method.kind": "fedibs", "method.private_masks": True, "method.rho": 0.0}))
    assert difference(play(none, t)[1].shared, play(plain, t)[1].shared) == 0.0
    private = method("fedibs+fedprox")
    engine, server, _ = play(private, t, rounds=3)
    assert not any("mask" in n for n in upload_schemas(private, t, open_round(private, server))[-1])
    masks = [x for n, x in engine.state().items() if n.startswith("fedibs/mask.")]
    assert any(m.any() for m in masks)
    _, noisy, records = play(method("fedibs+dp"), t, rounds=2)
    assert records[-1].metrics["epsilon"] > 0
    _, summed, _ = play(method("fedibs+fedprox", channels=[{"kind": "secure_sum"}]), t, rounds=3)
    assert difference(summed.shared, server.shared) < 1e-5
    assert all(torch.isfinite(x).all() for x in noisy.shared.values())
