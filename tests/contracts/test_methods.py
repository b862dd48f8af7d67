"""Every registered method keeps every contract; a new one is tested the day it is registered."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from isthmus.adapters.bias import Biases
from isthmus.core import registry
from isthmus.core.recipe import parse
from isthmus.core.types import CompositionError
from isthmus.engines.simulator import ClientError
from isthmus.parts.channels.privacy import GaussianNoise
from isthmus.parts.channels.quantise import Cast, Int8
from isthmus.parts.channels.sparse import TopK
from isthmus.runner import make_method

from ..conftest import bags_task, concepts_task, digits_task, logic_task, queries_task, tiny_text_task
from . import contracts

METHODS = sorted(m for m in registry.entries("methods") if m != "pooled")
TASKS = {
    "digits": digits_task,
    "lora": tiny_text_task,
    "ranks": lambda: tiny_text_task(ranks=(1, 2, 4, 3)),
    "biases": lambda: tiny_text_task(adapters=[Biases()]),
    "logic": logic_task,
    "bags": bags_task,
    "concepts": concepts_task,
    "queries": queries_task,
}
# methods that need a task of their own
OWN = {"fbfs": "logic", "gate_majority": "logic", "fedsem": "bags", "fcm": "concepts", "router_kmeans": "queries", "router_mlp": "queries"}


@cache
def task(name: str):
    return TASKS[name]()


# rules against attackers need more clients than these tasks have; without attackers they run with any number
FEW = {k: {"method.attackers": 0} for k in ("krum", "multi_krum", "bulyan", "trimmed_mean")} | {"beside": {"method.ranks": 1}}


def method(kind: str, **changes):
    changes = FEW.get(kind, {}) | changes
    return make_method(parse({"name": "contract", "train": {"optimiser": "sgd", "lr": 0.3}}).updated({"method.kind": kind, **changes}))


def pairs():
    for kind in METHODS:
        for name in TASKS:
            if (
                (name in OWN.values() and OWN.get(kind) != name)
                or (kind in OWN and OWN[kind] != name)
                or (kind, name) == ("beside", "ranks")
            ):
                continue
            try:
                method(kind).check(task(name).init(0))
            except CompositionError:
                continue
            yield kind, name


PAIRS = list(pairs())


def test_every_method_fits_a_task():
    assert {kind for kind, _ in PAIRS} == set(METHODS)


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_all_clients_together_equal_one_by_one(kind, name):
    contracts.ways_agree(method(kind), task(name))


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_nothing_private_leaves(kind, name):
    contracts.nothing_private_leaves(method(kind), task(name))


@pytest.mark.parametrize(("kind", "name"), PAIRS)
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_the_ledger_counts_what_is_packed_and_clients_hold_what_the_server_has(kind, name, fraction):
    contracts.ledger_equals_bytes(method(kind, participation=fraction), task(name))


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_a_saved_run_goes_on_bit_for_bit(kind, name, tmp_path):
    contracts.survives_saving(method(kind, participation=0.5), task(name), tmp_path)


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_the_order_of_clients_does_not_matter(kind, name):
    contracts.order_does_not_matter(method(kind), task(name))


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("channel", [Int8(), TopK(0.3), GaussianNoise(1.0, 0.01)], ids=lambda c: c.name)
def test_methods_go_through_channels(kind, channel):
    name = next(n for k, n in PAIRS if k == kind)
    one = method(kind)
    try:
        over = replace(one, channels=(*one.channels, channel))
    except CompositionError as error:
        if "feedback" not in str(error):
            assert (
                isinstance(channel, GaussianNoise) or kind == "dp"
            )  # refused when it is built, as it should be where more than values leave
            return
        over = replace(one, channels=(*one.channels, replace(channel, feedback=False)))
    if kind in ("fbfs", "router_mlp") and channel.name == "gaussian":
        with pytest.raises((ClientError, ValueError), match="would leave without protection"):
            contracts.play(over, task(name), rounds=1)
        return
    # rounding to 8 bits can fall on either side for values that differ in the last place; error feedback then carries the difference
    contracts.ways_agree(over, task(name), tolerance=5e-3 if channel.name == "int8" else 1e-5)
    contracts.ledger_equals_bytes(over, task(name))


@pytest.mark.parametrize("channel", [Int8(), TopK(0.3), Cast("bf16")], ids=lambda c: c.name)
@pytest.mark.parametrize("kind", ["fedavg", "flora", "rolora", "hetlora", "scaffold"])
def test_channels_carry_unequal_ranks(kind, channel):
    over = replace(method(kind), channels=(channel,))
    contracts.ledger_equals_bytes(over, task("ranks"))
    contracts.ways_agree(over, task("ranks"), tolerance=5e-3)


NULL = [
    ("fedprox", {"method.mu": 0.0}, "fedavg", {}),
    ("fedavg", {"channels": [{"kind": "cast", "dtype": "fp32"}]}, "fedavg", {}),
    ("fedavg", {"channels": [{"kind": "topk", "fraction": 1.0}]}, "fedavg", {}),
    ("fedper", {"method.private": ["nothing.*"]}, "fedavg", {}),
    ("ffa_lora+fedprox", {"method.fedprox": {"mu": 0.0}}, "ffa_lora", {}),
]


@pytest.mark.parametrize(("kind", "changes", "base", "base_changes"), NULL)
def test_a_null_setting_equals_its_base(kind, changes, base, base_changes):
    contracts.equals(method(kind, **changes), method(base, **base_changes), task("lora"))
