from __future__ import annotations

import pytest

from isthmus.core import recipe
from isthmus.core.recipe import RecipeError, parse

GOOD = {"name": "x"}


@pytest.mark.parametrize("name", sorted(recipe.packaged()))
def test_packaged_recipes_are_valid_and_come_back_from_their_table(name):
    found, _ = recipe.load(name)
    assert parse(found.table()) == found


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({}, ["name", "missing"]),
        ({"name": "x", "rouns": 3}, ["rouns", "3", "did you mean 'rounds'"]),
        ({"name": "x", "rounds": 0}, ["rounds", "0", "greater than or equal to 1"]),
        ({"name": "x", "train": {"lr": -1}}, ["train.lr", "-1", "greater than 0"]),
        ({"name": "x", "train": {"optimizer": "sgd"}}, ["train.optimizer", "did you mean 'optimiser'"]),
        ({"name": "x", "train": {"optimiser": "lion"}}, ["train.optimiser", "'lion'", "'adamw' or 'sgd'"]),
        ({"name": "x", "partition": {"kind": "fair"}}, ["partition.kind", "'fair'", "'dirichlet'"]),
        ({"name": "x", "method": {"kind": "fedavgg"}}, ["fedavgg", "did you mean 'fedavg'"]),
        ({"name": "x", "method": {"kind": "fedprox", "mu": "big"}}, ["method.fedprox.mu", "'big'", "number"]),
        ({"name": "x", "method": {"kind": "fedprox", "muu": 1}}, ["method.fedprox.muu", "did you mean 'mu'"]),
        ({"name": "x", "method": {"kind": "fedavg+fedprox", "mu": 1}}, ["method.mu", "[method.<part>]"]),
        ({"name": "x", "adapter": {"kind": "lora", "rank": 0}}, ["adapter.rank", "0", "at least 1"]),
        ({"name": "x", "adapter": {"kind": "lora", "targets": ["q"]}}, ["adapter.targets", "'q'", "query"]),
        ({"name": "x", "adapter": {"kind": "lora", "rank": 4, "ranks": [8]}}, ["adapter.ranks", "8", "between 1 and"]),
        ({"name": "x", "channels": [{"kind": "topk", "fraction": 2}]}, ["fraction", "2", "at most 1"]),
        ({"name": "x", "channels": [{"kind": "zip"}]}, ["zip", "accepted are attack, cast"]),
        ({"name": "x", "task": {"kind": "poetry"}}, ["poetry", "classification"]),
        ({"name": "../../etc", "rounds": 1}, ["name", "../../etc"]),
    ],
)
def test_an_error_names_the_field_the_value_and_what_is_accepted(table, says):
    with pytest.raises(RecipeError) as caught:
        parse(table, "mine.toml")
    assert "mine.toml" in str(caught.value)
    for part in says:
        assert part in str(caught.value), str(caught.value)


def test_all_mistakes_are_named_at_once():
    with pytest.raises(RecipeError) as caught:
        parse({"name": "x", "rounds": 0, "seed": -1})
    assert "rounds" in str(caught.value)
    assert "seed" in str(caught.value)


def test_set_overrides_any_field(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('name = "a"\n[method]\nkind = "fedprox"\nmu = 0.5\n')
    found, root = recipe.load(
        str(path), ["train.lr=0.01", "rounds=3", "data.source=r8", 'adapter.targets=["value"]', "engine.deadline=2.5"]
    )
    assert root == tmp_path
    assert (found.train.lr, found.rounds, found.data.source, found.engine.deadline) == (0.01, 3, "r8", 2.5)
    assert found.adapter.options["targets"] == ["value"]
    assert found.method.options == {"mu": 0.5}
    # another part does not inherit the options of the one before
    assert recipe.load(str(path), ["method.kind=scaffold"])[0].method.options == {}
    for bad in ("train.lr", "=3", "rounds=none", "rounds.more=3"):
        with pytest.raises(RecipeError):
            recipe.load(str(path), [bad])


def test_no_toml_and_no_such_recipe_are_clear(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("name = ")
    with pytest.raises(RecipeError, match=r"broken\.toml: not valid TOML"):
        recipe.load(str(path))
    with pytest.raises(RecipeError, match="did you mean 'newsroom'"):
        recipe.load("newsrom")
