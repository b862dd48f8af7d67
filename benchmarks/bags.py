"""Federated multiple-instance learning: FedSEM against averaging, on real sets by repeated cross-validation, and on bags whose evidence is known.

python benchmarks/bags.py    # half an hour on one core; results/bags.json

Five folds, three repeats (a repeat deals bags, folds and starts anew), four clients, Dirichlet(1).  Every method has three trials on a repeat that is not in the table
(rates for the baselines; the weights of its two terms for FedSEM, at FedAvg's rate), chosen by the area under the curve.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import isthmus
from isthmus.core.rounds import server_round, server_start
from isthmus.runner import make_engine, make_method
from isthmus.tasks.build import make_task

OUT = Path(__file__).resolve().parents[1] / "results" / "bags.json"
SETS = ("musk1", "elephant", "breast", "birds")
FOLDS, REPEATS, TUNING = 5, 3, 100
RATES = (3e-4, 1e-3, 3e-3)
SEM = tuple({"method.pull": p, "method.agree": a} for p, a in ((0.1, 0.01), (0.3, 0.03), (1.0, 0.1)))
METHODS = ("fedavg", "fedprox", "fedsem", "local", "pooled")


def play(name: str, kind: str, seed: int, fold: int, **changes: Any) -> dict[str, float]:
    recipe = isthmus.recipe("fedsem").updated(
        {"task.set": name, "task.folds": FOLDS, "task.fold": fold, "seed": seed, "method.kind": kind, "rounds": 30, "partition.smallest": 4}
        | changes
    )
    task, method = make_task(recipe), make_method(recipe)
    task = task.pooled() if method.pooled else task
    engine, server, up = make_engine(recipe, method, task), server_start(method, task, seed), 0
    began = time.perf_counter()
    for _ in range(recipe.rounds):
        server, record = server_round(method, task, server, engine)
        up += sum(size[1] for size in record.up.values())
    seconds = time.perf_counter() - began
    found = engine.evaluate(server)
    out = {
        "auc": found.overall["auc"],
        "accuracy": found.overall["accuracy"],
        "personal": found.personal["accuracy"],
        "bytes_up": up,
        "seconds": seconds,
    }
    if task.keys is not None and kind not in ("local", "pooled"):
        rows = torch.cat([torch.as_tensor(t) for t in task.test])
        rows = rows[task.y[rows] == 1]
        models = engine.models(server, list(range(task.clients)), tuned=True)
        each = [task.attention({n: t[k] for n, t in models.items()}, rows) for k in range(task.clients)]
        on = [float((a * task.keys[rows]).sum(-1).mean()) for a in each]
        pairs = [divergence(a, b) for a, b in itertools.combinations(each, 2)]
        out |= {"evidence": statistics.fmean(on), "evidence_worst": min(on), "divergence": statistics.fmean(pairs)}
    return out


def divergence(a: torch.Tensor, b: torch.Tensor) -> float:
    """Jensen-Shannon, in bits, mean over bags: 0 where two clients look at the same instances, at most 1."""
    m = (a + b) / 2
    kl = lambda p: torch.where(p > 0, p * (p.clamp_min(1e-12) / m.clamp_min(1e-12)).log2(), 0.0).sum(-1).mean()
    return float((kl(a) + kl(b)) / 2)


def mean(rows: list[dict[str, float]]) -> dict[str, float]:
    """Means over all, and the deviation of the repeats' means."""
    return {n: round(statistics.fmean(r[n] for r in rows), 4) for n in rows[0]}


def examine(name: str, folds: int = FOLDS, methods: tuple[str, ...] = METHODS) -> list[dict[str, Any]]:
    rows, rate = [], 1e-3
    for kind in methods:
        trials = [{"train.lr": r} for r in RATES] if kind != "fedsem" else [{"train.lr": rate} | s for s in SEM]
        scored = [
            (statistics.fmean(play(name, kind, TUNING, f, **t)["auc"] for f in range(min(2, folds))), -i) for i, t in enumerate(trials)
        ]
        chosen = trials[-max(scored)[1]]
        if kind == "fedavg":
            rate = chosen["train.lr"]
        each = [[play(name, kind, seed, f, **chosen) for f in range(folds)] for seed in range(REPEATS)]
        by_repeat = [mean(e) for e in each]
        row = {"set": name, "method": kind, "chosen": chosen} | mean(by_repeat)
        row |= {f"{n}_std": round(statistics.stdev(r[n] for r in by_repeat), 4) for n in ("auc", "accuracy", "personal")}
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    document = json.loads(OUT.read_text()) if OUT.exists() else {"rows": []}
    for name in ("digits", *SETS):
        if any(r["set"] == name for r in document["rows"]):
            continue
        document["rows"] += examine(name)
        OUT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
