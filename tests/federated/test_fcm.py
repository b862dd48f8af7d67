from __future__ import annotations

import pytest
import torch

from isthmus.core.recipe import RecipeError
from isthmus.core.rounds import server_round, server_start
from isthmus.federated.fcm import ACTIVE, COUNT, PARENTS, dependence
from isthmus.runner import make_engine, make_method
from isthmus.tasks.concepts import FAMILIES, concepts, dealt, known, network, sample

from ..conftest import concepts_task, digits_recipe
from ..contracts.contracts import difference, play


def method(**options):
    return make_method(digits_recipe(**{"method.kind": "fcm", **{f"method.{n}": v for n, v in options.items()}}))


@pytest.mark.parametrize("family", FAMILIES)
def test_with_the_same_concepts_everywhere_it_is_fedavg(family):
    task = concepts_task(**{"task.annotated": 1.0, "task.family": family})
    _, mine, _ = play(method(edge=0.0), task, rounds=3)
    _, plain, _ = play(method(adapt=False), task, rounds=3)
    assert mine.shared[ACTIVE].all()
    both = {n: mine.shared[n] for n in plain.shared}
    # edges: the graph counts its own parents after the first round, the plain one has all
    some = [n for n in both if family != "graph" or n.startswith("encoder")]
    rounds = 1e-6 if family != "graph" else 1.0
    assert difference({n: both[n] for n in some}, {n: plain.shared[n] for n in some}) <= rounds


@pytest.mark.parametrize("family", FAMILIES)
def test_a_concept_that_joins_changes_nothing_else_at_that_moment(family):
    task = concepts_task(**{"task.joins": [0, 2], "task.family": family})
    one = method()
    engine, server, _ = play(one, task, rounds=2)
    before = server.shared[ACTIVE].clone()
    assert 0 < before.sum() < len(before)
    waiting = before == 0
    start = task.init(0)
    for n in [n for n in start if n.startswith("concept.")]:
        assert torch.equal(server.shared[n][waiting], start[n][waiting])  # nobody moved them
    rows = torch.arange(40)
    x = task.x[rows]
    grown = dict(server.shared) | {ACTIVE: torch.ones_like(before)}
    assert torch.equal(task.outputs(server.shared, x)[1], task.outputs(grown, x)[1])
    server, _ = server_round(one, task, server, engine)
    assert server.shared[ACTIVE].all()
    assert not torch.equal(server.shared["concept.weight"][waiting], start["concept.weight"][waiting])


def test_a_module_moves_by_its_annotators_only_and_by_their_rows():
    task = concepts_task()
    one = method()
    engine, server = make_engine(digits_recipe(), one, task), server_start(one, task, 0)
    from isthmus.core.rounds import open_round

    update = engine.exchange(open_round(one, server)).update
    assert update is not None
    counts = update.payload[COUNT]
    delta = update.payload["concept.weight"]
    assert ((delta.abs().sum(-1) > 0) == (counts > 0)).all()
    after, _ = server_round(one, task, server, engine)
    share = counts / counts.sum(0)
    expected = torch.einsum("km,kmh->mh", share, delta)
    assert torch.allclose(after.shared["concept.weight"] - server.shared["concept.weight"], expected, atol=1e-6)


def test_what_is_not_annotated_moves_nothing():
    task = concepts_task()
    params = task.init(0) | {ACTIVE: torch.ones(8), "label.weight": torch.randn(10, 8, generator=torch.Generator().manual_seed(0))}
    batch = task.batch(task.train[0][:16])
    names = [n for n in params if n.startswith("concept.w")]
    grads = torch.func.grad(lambda p: task.loss(params | p, batch))({n: params[n] for n in names})
    own = task.since[0] < 1e6
    assert not grads["concept.weight"][~own].any()
    assert grads["concept.weight"][own].abs().sum(-1).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_correcting_all_concepts_gives_the_label_of_the_truth(family):
    task = concepts_task(**{"task.family": family})
    g = torch.Generator().manual_seed(0)
    params = {n: t + 0.1 * torch.randn(t.shape, generator=g) for n, t in task.init(0).items()}
    x, truth = task.x[:30], task.truth[:30]
    all_ = torch.ones_like(truth)
    _, label = task.outputs(params, x, truth, all_)
    if family == "bottleneck":
        assert torch.allclose(label, truth @ params["label.weight"].T + params["label.bias"], atol=1e-5)
    wrong = {n: t + (n == "concept.weight") * 3.0 for n, t in params.items()}  # predictions play no part any more
    assert torch.allclose(label, task.outputs(wrong, x, truth, all_)[1], atol=1e-5)
    assert torch.equal(task.outputs(params, x)[1], task.outputs(params, x, truth, 0 * all_)[1])


def test_children_see_a_correction():
    task = concepts_task(**{"task.family": "graph"})
    params = task.init(0)
    params["concept.edges"][1, 0] = 5.0
    z = task.encode(params, task.x[:4])
    truth, given = torch.ones(4, 8), torch.zeros(4, 8)
    given[:, 0] = 1.0
    plain, corrected = known(params, z, "graph")[0], known(params, z, "graph", truth, given)[0]
    p = known(params, z, "graph")[0][:, 0].sigmoid()
    assert torch.allclose(corrected[:, 1] - plain[:, 1], 5.0 * (1 - p), atol=1e-5)
    assert torch.allclose(corrected[:, 2:], plain[:, 2:])


def test_dependence_is_the_mutual_information():
    table = torch.tensor([[[0, 0, 0, 0], [25, 25, 25, 25]], [[50, 0, 0, 50], [10, 0, 0, 0]]])
    assert torch.allclose(dependence(table), torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.float64), atol=1e-9)


def test_edges_are_those_of_the_union_of_rows():
    task = concepts_task(**{"task.annotated": 1.0, "task.family": "graph"})
    _, server, _ = play(method(edge=0.05), task, rounds=1)
    t = task.truth[torch.cat(list(task.train))]
    pairs = torch.stack([a.T @ b for a in (1 - t, t) for b in (1 - t, t)], -1)
    assert torch.equal(server.shared[PARENTS], torch.tril((dependence(pairs) > 0.05).float(), -1))


def test_a_client_predicts_what_it_never_annotated():
    recipe = digits_recipe(
        **{"task": {"kind": "concepts", "set": "digits"}, "data": {}, "method.kind": "fcm", "rounds": 15, "model.width": 32,
           "train": {"optimiser": "adamw", "lr": 0.005, "size": 32, "epochs": 2}}
    )  # fmt: skip
    task, one = concepts(recipe), make_method(recipe)
    engine, server, _ = play(one, task, recipe.rounds, running=make_engine(recipe, one, task))
    found = engine.evaluate(server)
    assert found.overall["unseen"] > 0.85
    assert found.overall["corrected"] > found.overall["accuracy"] - 0.02


def test_every_concept_has_somebody_and_begins_when_it_should():
    since = dealt(3, 10, 0.2, [0, 7], 0)
    assert (since < 1e6).any(0).all()
    assert set(since[since < 1e6].tolist()) == {0.0, 7.0}


def test_packaged_networks_are_read_as_they_are():
    nodes, sizes, parents, tables = network("asia")
    place = nodes.index("dysp")
    assert sizes[place] == 2
    assert sorted(nodes[j] for j in parents[place]) == ["bronc", "either"]
    assert all(abs(t.sum(-1) - 1).max() < 0.02 for t in tables)
    found, names = sample("asia", 20_000, 0)
    assert found[:, names.index("smoke")].mean() == pytest.approx(0.5, abs=0.02)
    lung = found[:, names.index("lung")] == 0
    assert lung[found[:, names.index("smoke")] == 0].mean() == pytest.approx(0.1, abs=0.01)
    for other in ("sachs", "insurance", "alarm"):
        task = concepts(digits_recipe(**{"task": {"kind": "concepts", "set": other}, "data.limit": 400, "partition.alpha": 5.0}))
        assert task.truth.shape[1] >= 5
        assert len(task.label_names) > int(task.y.max())


@pytest.mark.parametrize(
    "options",
    [{"set": "x"}, {"family": "x"}, {"use": "x"}, {"annotated": 0.0}, {"joins": [3]}, {"alpha": -1.0}, {"correct": 2.0}, {"sets": 1}],
)
def test_a_task_that_cannot_be_names_the_field(options):
    with pytest.raises(RecipeError, match=f"task.{next(iter(options))}"):
        concepts(digits_recipe(**{"task": {"kind": "concepts", **options}}))


def test_edges_cannot_be_negative():
    with pytest.raises((ValueError, RecipeError), match="edge"):
        method(edge=-1.0)
