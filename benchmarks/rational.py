"""Rational clients on digits: who stays, and what the model is worth, by how much they put up with: results/rational.json.

python benchmarks/rational.py    # some ten minutes on one core

Ten clients: six large ones with Dirichlet(1) labels, four with 30 images each, which are inverted.  A client's outside option is the test loss
that it reaches alone in as many rounds; it leaves when the model that it receives has missed (1 + margin) times that for five rounds in a row, from
round 20 on.  80 rounds, five seeds.  Every method has the same rate, chosen for FedAvg without thresholds on a seed that is not in the table.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from isthmus.core.recipe import parse
from isthmus.runner import run
from isthmus.tasks.build import make_task

OUT = Path(__file__).resolve().parents[1] / "results" / "rational.json"
SEEDS, MARGINS = (0, 1, 2, 3, 4), (1.0, 0.5, 0.25, 0.0)
METHODS = ("fedavg+rational", "fedprox+rational", "uniform", "feduca")
RECIPE = {
    "name": "rational", "rounds": 80, "task": {"kind": "digits"}, "partition": {"clients": 10, "alpha": 1.0}, "model": {"width": 32},
    "train": {"optimiser": "sgd", "lr": 0.1, "size": 32, "steps": 8}, "evaluate": {"every": 80, "references": False},
}  # fmt: skip


def task_of(seed: int):
    task = make_task(parse(RECIPE).updated({"seed": seed}))
    train, test, x = list(task.train), list(task.test), task.x.clone()
    for c in range(6, 10):
        train[c] = train[c][:30]
        rows = torch.cat([train[c], test[c]])
        x[rows] = 1 - x[rows]
    return replace(task, x=x, train=train, test=test)


def play(task, seed: int, kind: str, lr: float, thresholds: list[float] | None = None) -> dict:
    recipe = parse(RECIPE).updated({"seed": seed, "train.lr": lr})
    more = {} if thresholds is None else {"thresholds": thresholds, "patience": 5, "start": 20}
    if kind == "uniform":  # every client the same weight, whatever its size
        task = replace(task, train=[rows.repeat(-(-200 // len(rows)))[:200] for rows in task.train])
        kind = "fedavg+rational"
    if kind == "feduca":
        recipe = recipe.updated({"method.kind": kind} | {f"method.{n}": v for n, v in more.items()})
    else:
        recipe = recipe.updated({"method.kind": kind} | ({"method.rational": more} if more else {}))
    with tempfile.TemporaryDirectory() as folder:
        result = run(recipe, Path(folder) / "run", task=task)
        last = result.line.rows[-1]
        return {
            "staying": last["metrics"].get("staying", 10.0),
            "accuracy": last["evaluation"]["global"]["accuracy"],
            "loss": last["evaluation"]["clients"]["loss"],
            "slack": max(r["metrics"].get("slack", 0.0) for r in result.line.rows),
        }


def main() -> None:
    rates = {lr: play(task_of(100), 100, "fedavg", lr)["accuracy"] for lr in (0.03, 0.1, 0.3)}
    lr = max(rates, key=lambda r: rates[r])
    document: dict = {"rate": lr, "rows": []}
    alone = {seed: play(task_of(seed), seed, "local", lr)["loss"] for seed in SEEDS}
    for margin in MARGINS:
        for kind in METHODS:
            found = [play(task_of(seed), seed, kind, lr, [(1 + margin) * x for x in alone[seed]]) for seed in SEEDS]
            row = {"margin": margin, "method": kind}
            for n in ("staying", "accuracy", "slack"):
                row |= {n: round(statistics.fmean(f[n] for f in found), 4), f"{n}_std": round(statistics.stdev(f[n] for f in found), 4)}
            document["rows"].append(row)
            print(row, flush=True)
            OUT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
