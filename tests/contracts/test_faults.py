"""Each contract catches the fault that it is there for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from isthmus.core import checkpoint
from isthmus.core.types import Aggregate, Plugin
from isthmus.engines.simulator import Simulator
from isthmus.parts.aggregate import WeightedMean
from isthmus.parts.send import Changed
from isthmus.parts.share import ByName

from . import contracts
from .test_methods import method, task


@dataclass(frozen=True)
class UniformMean(Aggregate):
    def __call__(self, update, server, state):
        return {n: t.mean(0) for n, t in update.payload.items()}, state


@dataclass(frozen=True)
class FirstCounts(Aggregate):
    def __call__(self, update, server, state):
        return {n: 0.9 * t[0] + 0.1 * t.mean(0) for n, t in update.payload.items()}, state


@dataclass(frozen=True)
class Leak(Plugin):
    """Publishes what should stay private under another name."""

    name = "leak"

    def publish(self, params, clients):
        return {"control.head.weight": torch.zeros(10, 16)}

    def end(self, params, memory, inbox, trained):
        return params, memory, {"control.head.weight": params["head.weight"]}


@dataclass(frozen=True)
class Forgetful(Changed):
    def message(self, server, seen):
        return {n: t for n, t in super().message(server, seen).items() if n != "head.bias"}


def test_wrong_weights_are_seen():
    with pytest.raises(AssertionError):
        contracts.ways_agree(method("fedavg"), task("digits"), other=replace(method("fedavg"), aggregate=UniformMean()))


def test_a_plugin_left_out_is_seen():
    with pytest.raises(AssertionError):
        contracts.ways_agree(method("fedprox"), task("digits"), other=method("fedavg"))


def test_dropped_memory_is_seen(monkeypatch):
    run = Simulator._run

    def forget(self, outgoing, some):
        update, memory = run(self, outgoing, some)
        return update, memory if self.together else {n: torch.zeros_like(t) for n, t in memory.items()}

    monkeypatch.setattr(Simulator, "_run", forget)
    with pytest.raises(AssertionError):
        contracts.ways_agree(method("scaffold"), task("digits"))


def test_a_wrong_identity_is_seen(monkeypatch):
    run = Simulator._run

    def shift(self, outgoing, some):
        if self.together:
            return run(self, outgoing, some)
        inbox = type(outgoing).inbox
        monkeypatch.setattr(type(outgoing), "inbox", lambda o, client, personal: inbox(o, (client + 1) % 4, personal))
        try:
            return run(self, outgoing, some)
        finally:
            monkeypatch.setattr(type(outgoing), "inbox", inbox)

    monkeypatch.setattr(Simulator, "_run", shift)
    # half the clients: over all of them, the mean of the noise would not depend on whose is whose
    noisy = method("fedavg", participation=0.5, channels=[{"kind": "gaussian", "clip": 1.0, "sigma": 0.1}])
    with pytest.raises(AssertionError):
        contracts.ways_agree(noisy, task("digits"))


def test_a_private_name_that_leaves_is_seen():
    leaking = method("fedper")
    with pytest.raises(AssertionError):
        contracts.nothing_private_leaves(replace(leaking, plugins=(Leak(),)), task("digits"))


def test_a_null_setting_that_does_something_is_seen():
    with pytest.raises(AssertionError):
        contracts.equals(method("fedprox", **{"method.mu": 0.1}), method("fedavg"), task("digits"))


def test_miscounted_bytes_are_seen(monkeypatch):
    sizes = Simulator._sizes
    monkeypatch.setattr(Simulator, "_sizes", lambda *a: {c: (p, w + 1) for c, (p, w) in sizes(*a).items()})
    with pytest.raises(AssertionError):
        contracts.ledger_equals_bytes(method("fedavg"), task("digits"))


def test_a_stale_client_is_seen():
    with pytest.raises(AssertionError):
        contracts.ledger_equals_bytes(replace(method("fedavg"), send=Forgetful()), task("digits"))


def test_lost_state_is_seen(tmp_path):
    def careless(folder, round, tensors, meta):
        checkpoint.save(folder, round, {n: torch.zeros_like(t) if n.startswith("state/") else t for n, t in tensors.items()}, meta)

    with pytest.raises(AssertionError):
        contracts.survives_saving(method("fedyogi"), task("digits"), tmp_path, write=careless)


def test_dependence_on_order_is_seen():
    with pytest.raises(AssertionError):
        contracts.order_does_not_matter(replace(method("fedavg"), aggregate=FirstCounts()), task("digits"))


def test_the_faults_are_faults_of_something_that_works():
    plain = method("fedavg")
    assert isinstance(plain.aggregate, WeightedMean)
    assert isinstance(plain.share, ByName)
    contracts.ways_agree(plain, task("digits"))
