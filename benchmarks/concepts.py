"""Federated concept-based models: growing with what clients annotate, against fixed architectures, own models and full supervision: results/concepts.json

python benchmarks/concepts.py    # twenty minutes on one core

Six clients, each with 40 % of the concepts annotated, half of the concepts from round 15 of 40 on.  Rates are chosen for each method on digits with a seed that is not in the table, three
trials each.  A local model may use its client's annotations from the start.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch

import isthmus
from isthmus.runner import run
from isthmus.tasks.build import make_task

OUT = Path(__file__).resolve().parents[1] / "results" / "concepts.json"
SEEDS, TUNING, RATES = (0, 1, 2), 100, (0.001, 0.003, 0.01)
SETS, FAMILIES = ("digits", "animals", "insurance", "asia"), ("bottleneck", "embedding", "graph")
METHODS = {
    "fcm": {},
    "fixed": {"method.adapt": False},
    "common": {"method.adapt": False, "task.use": "common"},
    "local": {"method.kind": "local"},
    "full": {"task.annotated": 1.0, "task.joins": [0]},
}
NAMES = ("accuracy", "concepts", "unseen", "intervened", "corrected")


def play(name: str, family: str, method: str, seed: int, lr: float) -> dict:
    changes = {"task.set": name, "task.family": family, "seed": seed, "train.lr": lr, "data.limit": 2000, "evaluate.every": 5} | METHODS[
        method
    ]
    recipe = isthmus.recipe("concepts").updated(changes)
    task = make_task(recipe)
    with tempfile.TemporaryDirectory() as folder:
        result = run(recipe, Path(folder) / "run", task=task)
    last = result.line.rows[-1]["evaluation"]
    # a local model has no common one: each client's, on its own rows
    which = last["personal"] if method == "local" else last["global"]
    out = {n: which.get(n) for n in NAMES} | {
        "bytes": result.document["bytes_up"] + result.document["bytes_down"],
        "seconds": result.document["seconds"],
    }
    engine, server = result.line.engine, result.line.server
    if method != "local":
        rows = torch.cat(list(task.test))
        out["curve"] = task.score(engine.global_params(server), rows)["of.corrected"].mean(0).tolist()
        out["over_rounds"] = [r["evaluation"]["global"]["concepts"] for r in result.line.rows if r["evaluation"]]
    return out


def main() -> None:
    document: dict = json.loads(OUT.read_text()) if OUT.exists() else {"rates": {}, "rows": []}
    for method in METHODS if not document["rates"] else ():
        found = {lr: play("digits", "bottleneck", method, TUNING, lr) for lr in RATES}
        document["rates"][method] = max(RATES, key=lambda r: found[r]["intervened"])
    print(document["rates"], flush=True)
    for name in SETS:
        for family in FAMILIES:
            if any((r["set"], r["family"]) == (name, family) for r in document["rows"]):
                continue
            for method in METHODS:
                found = [play(name, family, method, seed, document["rates"][method]) for seed in SEEDS]
                row = {"set": name, "family": family, "method": method}
                for n in (*NAMES, "bytes", "seconds"):
                    values = [f[n] for f in found if f[n] is not None]
                    row |= (
                        {n: round(statistics.fmean(values), 4), f"{n}_std": round(statistics.stdev(values), 4)}
                        if len(values) > 1
                        else {n: None}
                    )
                for n in ("curve", "over_rounds"):
                    if n in found[0]:
                        row[n] = [round(statistics.fmean(c), 4) for c in zip(*(f[n] for f in found), strict=True)]
                document["rows"].append(row)
                print({n: row[n] for n in ("set", "family", "method", *NAMES)}, flush=True)
            OUT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
