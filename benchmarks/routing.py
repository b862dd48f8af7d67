"""Federated routers against each client's own, one model for all, chance and pooled data: results/routing.json

python benchmarks/routing.py    # ten minutes on one core; src/isthmus/tables/newsdesk.json is made by answers.py

Ten clients; "frontier" is the area under the accuracy-cost frontier on everybody's test queries, costs up to the most expensive model's.  "shifted": the test queries come from 20 Newsgroups
alone while clients asked both.  Numbers of clusters and rates are chosen on a seed that is not in the table, three trials each.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

import isthmus
from isthmus.runner import run
from isthmus.tasks.build import deal, make_task
from isthmus.tasks.queries import TRADES, coverage, frontier
from isthmus.tasks.sources import Corpus, load

OUT = Path(__file__).resolve().parents[1] / "results" / "routing.json"
SEEDS, TUNING = (0, 1, 2), 100
SETTINGS = {
    "skewed": (0.3, 0.4, False),
    "skewed, two models each": (0.3, 0.2, False),
    "alike": (100.0, 0.4, False),
    "skewed, shifted": (0.3, 0.4, True),
}
TRIALS = {
    "router_kmeans": [{"method.clusters": k, "method.local": max(8, k // 2)} for k in (12, 24, 64)],
    "router_mlp": [{"train.lr": r} for r in (0.0005, 0.002, 0.008)],
    "fedavg": [{"train.lr": r} for r in (0.0005, 0.002, 0.008)],
}


class Table:
    """The task's rows once, dealt anew for every seed and setting."""

    def __init__(self) -> None:
        self.recipe = isthmus.recipe("routing").updated({"task.coverage": 1.0, "partition.kind": "iid"})
        self.task = make_task(self.recipe)
        found = json.loads((Path(isthmus.__file__).parent / "tables" / "newsdesk.json").read_text())
        kinds: list[str] = []
        for part in found["queries"]:
            label = load(part["set"]).label
            kinds += [f"{part['set']}: {label[i]}" for i in part["rows"]]
        number = {k: i for i, k in enumerate(sorted(set(kinds)))}
        self.kind, self.groups = torch.tensor([number[k] for k in kinds]), torch.tensor([k.startswith("20news") for k in kinds])

    def dealt(self, seed: int, alpha: float, share: float, shifted: bool):
        recipe = self.recipe.updated({"partition": {"kind": "dirichlet", "clients": 10, "alpha": alpha}, "seed": seed})
        train, test, names = deal(recipe, [Corpus("queries", [""] * len(self.kind))], self.kind, torch.zeros_like(self.kind))
        quality, cost, asked = self.task.y.chunk(3, -1)
        asked, own = torch.ones_like(asked), coverage(10, quality.shape[1], share, seed)
        for c, rows in enumerate(train):
            asked[rows] *= own[c]
        if shifted:
            test = [rows[self.groups[rows]] if self.groups[rows].any() else rows for rows in test]
        return replace(self.task, y=torch.cat([quality, cost, asked], 1), train=train, test=test, client_names=names)


def play(task, seed: int, kind: str, pooled: bool = False, **changes) -> dict[str, float]:
    trained = {"rounds": 30, "train.epochs": 2, "evaluate.every": 30}
    recipe = isthmus.recipe("routing").updated({"seed": seed, "method.kind": kind} | (trained if kind != "router_kmeans" else {}) | changes)
    with tempfile.TemporaryDirectory() as folder:
        found = run(recipe, Path(folder) / "run", task=task.pooled() if pooled else task).document
    return {n: found[f"{n}_global"] for n in ("frontier", "accuracy", "cost", "regret")} | {
        "bytes": found["bytes_up"] + found["bytes_down"]
    }


def alone(task, seed: int, kind: str, **changes) -> dict[str, float]:
    """Every client's own router, on everybody's test queries: means over clients."""
    every = torch.cat(list(task.test))
    rows = [play(replace(task, train=[mine], test=[every]), seed, kind, **changes) for mine in task.train]
    return {n: statistics.fmean(r[n] for r in rows) for n in rows[0]} | {"bytes": 0}


def fixed(task) -> dict[str, dict[str, float]]:
    """One model for all, a random one, and whoever knows the answers."""
    quality, cost, _ = task.y[torch.cat(list(task.test))].chunk(3, -1)
    mean, price = quality.mean(0), cost.mean(0)
    best = int(mean.argmax())
    value = [quality - t * cost for t in TRADES]
    at = [v.argmax(-1, keepdim=True) for v in value]
    points = [(quality.gather(1, a).mean(), cost.gather(1, a).mean()) for a in at]
    know = frontier(torch.stack([p[0] for p in points]), torch.stack([p[1] for p in points]), 1.0)
    one = frontier(mean[[best]], price[[best]], 1.0)
    return {
        "best single model": {"frontier": one, "accuracy": float(mean[best]), "cost": float(price[best])},
        "hull of single models": {"frontier": frontier(mean, price, 1.0), "accuracy": float(mean[best]), "cost": float(price[best])},
        "random": {
            "frontier": frontier(mean.mean()[None], price.mean()[None], 1.0),
            "accuracy": float(mean.mean()),
            "cost": float(price.mean()),
        },
        "oracle": {"frontier": know, "accuracy": float(points[0][0]), "cost": float(points[0][1])},
    }


def drawn(table: Table, chosen: dict) -> dict[str, list[list[float]]]:
    """(cost, share right) at every price of some routers, for the picture."""
    task, out = table.dealt(0, 0.3, 0.4, False), {}
    rows = torch.cat(list(task.test))
    every = replace(task, train=[task.train[0]], test=[rows])
    for name, kind, one in (
        ("table, together", "router_kmeans", task),
        ("network, together", "router_mlp", task),
        ("table, one client alone", "router_kmeans", every),
    ):
        trained = {"rounds": 30, "train.epochs": 2, "evaluate.every": 30} if kind != "router_kmeans" else {}
        recipe = isthmus.recipe("routing").updated({"method.kind": kind} | trained | chosen[kind])
        with tempfile.TemporaryDirectory() as folder:
            line = run(recipe, Path(folder) / "run", task=one).line
        found = task.score(line.engine.global_params(line.server), rows)
        out[name] = [
            [round(float(c), 4), round(float(q), 4)] for c, q in zip(found["at.cost"].mean(0), found["at.quality"].mean(0), strict=True)
        ]
    return out


def main() -> None:
    table, document = Table(), {"rows": [], "chosen": {}, "models": []}
    document["models"] = [
        {"model": m, "accuracy": round(float(q), 4), "cost": round(float(c), 4)}
        for m, q, c in zip(table.task.models, *(t.mean(0) for t in table.task.y.chunk(3, -1)[:2]), strict=True)
    ]
    tuning = table.dealt(TUNING, 0.3, 0.4, False)
    for kind, trials in TRIALS.items():
        document["chosen"][kind] = max(trials, key=lambda t: play(tuning, TUNING, kind, **t)["frontier"])
    chosen = document["chosen"]
    print(chosen, flush=True)
    document["frontier"] = drawn(table, chosen)
    for name, (alpha, share, shifted) in SETTINGS.items():
        found: dict[str, list[dict[str, float]]] = {}
        for seed in SEEDS:
            task = table.dealt(seed, alpha, share, shifted)
            one = {kind: play(task, seed, kind, **chosen[kind]) for kind in TRIALS}
            one |= {
                "own network": alone(task, seed, "fedavg", **chosen["fedavg"]),
                "own table": alone(task, seed, "router_kmeans", **chosen["router_kmeans"]),
            }
            one |= {
                "pooled network": play(task, seed, "fedavg", True, **chosen["fedavg"]),
                "pooled table": play(task, seed, "router_kmeans", True, **chosen["router_kmeans"]),
            }
            for method, row in (one | fixed(task)).items():
                found.setdefault(method, []).append(row)
        for method, rows in found.items():
            row = {"setting": name, "method": method}
            for n in rows[0]:
                row |= {n: round(statistics.fmean(r[n] for r in rows), 4), f"{n}_std": round(statistics.stdev(r[n] for r in rows), 4)}
            document["rows"].append(row)
            print({n: v for n, v in row.items() if not n.endswith("_std")}, flush=True)
        OUT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
