"""Every system joined with every other method, both ways round: two rounds, finite, of the same shapes, bytes as packed."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from isthmus.core import registry
from isthmus.core.recipe import parse
from isthmus.core.types import CompositionError
from isthmus.runner import make_method

from ..conftest import tiny_text_task
from ..contracts.contracts import play
from ..contracts.test_methods import FEW, OWN

SYSTEMS = ("fedlova", "frank_lora", "flora_chef", "fedibs", "fedrecall")
METHODS = sorted(m for m in registry.BUILT_IN["methods"] if m not in ("pooled", *OWN))
PAIRS = sorted({(a, b) for s in SYSTEMS for m in METHODS for a, b in ((s, m), (m, s)) if a != b})

KEEPS = ("ffa_lora", "fedsa_lora")  # one factor stays with the clients, which methods that average products cannot have


@cache
def task(ranks: bool):
    from isthmus.adapters.bias import Biases

    return {"equal": tiny_text_task(), "ranks": tiny_text_task(ranks=(1, 2, 4, 3)), "biases": tiny_text_task(adapters=[Biases()])}[ranks]


def test_the_systems_are_registered():
    assert set(SYSTEMS) <= set(METHODS)


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda x: x)
def test_pairs(first, second):
    train = {"optimiser": "sgd", "lr": 0.1}
    try:
        options = {part: {n.removeprefix("method."): v for n, v in FEW.get(part, {}).items()} for part in (first, second)}
        method = make_method(parse({"name": "pair", "train": train, "method": {"kind": f"{first}+{second}", **options}}))
    except CompositionError:
        return  # refused when it is built
    ran = 0
    for name in ("equal", "ranks", "biases"):
        one = task(name)
        try:
            method.check(one.init(0))
        except CompositionError:
            continue
        if name == "ranks" and "beside" in (first, second):
            continue
        ran += 1
        _, server, records = play(method, one, rounds=2)
        start = one.init(0)
        assert all(torch.isfinite(t).all() for t in server.shared.values() if t.is_floating_point())
        assert all(t.shape == start[n].shape for n, t in server.shared.items() if n in start)
        assert not [c for r in records for c in r.missing]
        assert all(wire == payload + 24 or payload == wire == 0 for r in records for payload, wire in r.up.values())
    refused = {"fedibs", "local", *KEEPS} & {first, second}
    assert ran or refused
