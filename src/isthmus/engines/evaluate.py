"""The two metrics of every run: the aggregated model on everybody's test rows, and each client with what it keeps on its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.rounds import scope
from ..core.tensors import Tensors, matches, under
from ..core.types import Server

if TYPE_CHECKING:
    from .simulator import Simulator

Analyse = Callable[[Tensors, Tensors], dict[str, dict[str, float]]]


@dataclass(frozen=True)
class Evaluation:
    """Metrics by name ("accuracy", "loss"), overall and for each client."""

    overall: dict[str, float]  # the aggregated model, every test row
    personal: dict[str, float]  # mean over clients of their own
    clients: dict[str, list[float]]  # each client with what it keeps, on its own test rows
    tuned: dict[str, float] = field(default_factory=dict)  # mean over clients of their own after a round of local work
    roles: dict[str, dict[str, float]] = field(default_factory=dict)  # what was analysed, by role of an adapter's site
    bytes: int = 0  # that travelled for it


def sums(scores: Tensors) -> Tensors:
    """Weighted sums over rows, in fp64: of what is scored row by row () and of what a task makes more of (names with a dot; flat), and the ``weight`` itself."""
    weight = scores["weight"].double()
    return {n: (weight @ t.double().flatten(1) if "." in n else weight @ t.double()) for n, t in scores.items() if n != "weight"} | {
        "weight": weight.sum()
    }


def means(task: Any, total: Tensors) -> dict[str, float]:
    """Metrics from `sums`, which may be added over clients before; the task's ``overall`` sees the flat means of names with a dot."""
    weight = total["weight"].clamp_min(1e-12)
    found = {n: float(t / weight) for n, t in total.items() if n != "weight" and "." not in n}
    return found | (task.overall({n: t / weight for n, t in total.items() if "." in n}) if hasattr(task, "overall") else {})


def _mean(task: Any, scores: Tensors, rows: Tensor | slice = slice(None)) -> dict[str, float]:
    return means(task, sums({n: t[rows] for n, t in scores.items()}))


def evaluate(engine: Simulator, server: Server, everywhere: bool = True, tuned: bool = False, analyse: Analyse | None = None) -> Evaluation:
    """Score a federation.

    ``tuned``: also the clients' models after the local work of the next round.  ``analyse``: what to say of all clients' models (K, ...)
    before and after that work.

    Clients whose model is the same share one pass.  Where nothing is shared (local-only), the overall metric is the mean over clients
    of each one's model on everybody's rows: as many passes as clients, made only when ``everywhere``.
    """
    task, method = engine.task, engine.method
    tests = [task.rows(c, "test") for c in range(task.clients)]
    rows = torch.cat(tests)
    owner = torch.arange(task.clients).repeat_interleave(torch.tensor([len(t) for t in tests]))
    start = task.init(engine.seed)
    common = set(scope(method, task, list(start))) == set(start) and "rank" not in engine.state() and not method.personal
    shared = task.score(engine.global_params(server), rows) if common else None
    personal = shared if shared is not None else task.score(personal_stack(engine, server), rows, owner)
    each = [_mean(task, personal, owner == c) for c in range(task.clients)]
    by_name = {n: [m[n] for m in each] for n in each[0]}
    mean = {n: sum(v) / len(v) for n, v in by_name.items()}
    found = Evaluation(_overall(engine, server, rows, owner, shared, personal, everywhere), mean, by_name)
    if not tuned and analyse is None:
        return found
    after = client_models(engine, server, tuned=True)
    mine = [_mean(task, task.score(after, rows, owner), owner == c) for c in range(task.clients)] if tuned else []
    roles = analyse(client_models(engine, server), after) if analyse else {}
    return replace(found, tuned={n: sum(m[n] for m in mine) / len(mine) for n in mine[0]} if mine else {}, roles=roles)


def personal_stack(engine: Simulator, server: Server) -> Tensors:
    """All clients' models: private tensors (clients, ...), shared ones without the client axis where clients hold them as they are."""
    state = engine.state()
    if "rank" not in state and not engine.method.personal:
        return engine.global_params(server) | under(state, "kept/")
    return client_models(engine, server)


def client_models(engine: Simulator, server: Server, tuned: bool = False) -> Tensors:
    """All clients' models (clients, ...), see `Simulator.models`, in chunks."""
    clients = range(engine.task.clients)
    parts = [engine.models(server, list(clients[i : i + 64]), tuned) for i in range(0, len(clients), 64)]
    return {n: torch.cat([m[n] for m in parts]) for n in parts[0]}


def _overall(
    engine: Simulator, server: Server, rows: Tensor, owner: Tensor, shared: Tensors | None, personal: Tensors, everywhere: bool
) -> dict[str, float]:
    task = engine.task
    if shared is not None:
        return _mean(task, shared)
    if task.private:  # heads over label sets of their own: there is no model without them
        if not server.shared:
            return _mean(task, personal)
        heads = {n: t for n, t in under(engine.state(), "kept/").items() if matches(n, task.private)}
        return _mean(task, task.score(engine.global_params(server) | heads, rows, owner))
    if server.shared:
        return _mean(task, task.score(engine.global_params(server), rows))
    if not everywhere:
        return {}
    each = [_mean(task, task.score(engine.personal_params(server, c), rows)) for c in range(task.clients)]
    return {n: sum(m[n] for m in each) / len(each) for n in each[0]}
