"""Rational clients: who stays, and what the model is worth, by how much they put up with: results/rational.json.

python benchmarks/rational.py            # some twenty minutes on one core; `rational.py digits` only that setting

digits: ten clients, six large ones with Dirichlet(1) labels and four with 30 images each, which are inverted.  bags: six clients with MUSK1, Dirichlet(0.5).  news: six clients with 600
articles of BBC News, Dirichlet(0.3), LoRA on MiniLM.  A client's outside option is the test loss that it reaches alone in as many rounds (personalised: after a round of local work on
what it received); it leaves for good when the model that it receives has missed that plus a margin for several rounds in a row.  Rates and the one parameter of each method are chosen
on a seed that is not in the table, three trials each, by how many stay and then by accuracy, at the middle margin.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from isthmus.core.recipe import parse
from isthmus.runner import run
from isthmus.tasks.build import make_task

OUT = Path(__file__).resolve().parents[1] / "results" / "rational.json"
SEEDS, TUNING = (0, 1, 2), 100
TRIALS = {
    "fedavg": [{}],
    "fedprox": [{"mu": m} for m in (0.01, 0.1, 1.0)],
    "qffl": [{"q": q} for q in (0.01, 0.1, 1.0)],
    "afl": [{"eta": e} for e in (0.01, 0.1, 0.5)],
    "feduca": [{"eta": e} for e in (0.3, 1.0, 5.0)],
    "feduca, projection": [{"gap": g} for g in (0.1, 0.5, 1.0)],
}
SETTINGS = {
    "digits": {
        "recipe": {
            "name": "rational", "rounds": 80, "task": {"kind": "digits"}, "partition": {"clients": 10, "alpha": 1.0}, "model": {"width": 32},
            "train": {"optimiser": "sgd", "lr": 0.1, "size": 32, "steps": 8}, "evaluate": {"every": 80, "references": False},
        },
        "margins": (0.5, 0.25, 0.1), "patience": 5, "start": 20,
    },
    "bags": {
        "recipe": {
            "name": "rational", "rounds": 30, "task": {"kind": "bags", "set": "musk1"}, "partition": {"clients": 6, "alpha": 0.5, "smallest": 5}, "model": {"width": 32},
            "train": {"optimiser": "sgd", "lr": 0.1, "size": 8, "epochs": 2}, "evaluate": {"every": 30, "references": False},
        },
        "margins": (0.1, 0.0, -0.1), "patience": 3, "start": 10,
    },
    "news": {
        "recipe": {
            "name": "rational", "rounds": 12, "data": {"source": "bbc", "limit": 600}, "partition": {"clients": 6, "alpha": 0.3}, "model": {"max_length": 32},
            "adapter": {"kind": "lora", "rank": 4, "layers": "upper:2"}, "train": {"lr": 0.003, "size": 16}, "evaluate": {"every": 12, "references": False},
        },
        "margins": (0.1, 0.0), "patience": 2, "start": 4,
    },
}  # fmt: skip


def task_of(name: str, seed: int):
    task = make_task(parse(SETTINGS[name]["recipe"]).updated({"seed": seed}))
    if name != "digits":
        return task
    train, test, x = list(task.train), list(task.test), task.x.clone()
    for c in range(6, 10):
        train[c] = train[c][:30]
        rows = torch.cat([train[c], test[c]])
        x[rows] = 1 - x[rows]
    return replace(task, x=x, train=train, test=test)


def play(name: str, task, seed: int, method: str, options: dict, lr: float | None = None, thresholds: list[float] | None = None) -> dict:
    setting, kind = SETTINGS[name], method.partition(",")[0]
    recipe = parse(setting["recipe"]).updated({"seed": seed} | ({} if lr is None else {"train.lr": lr}))
    leave = {} if thresholds is None else {"thresholds": thresholds, "patience": setting["patience"], "start": setting["start"]}
    if kind == "feduca":
        more = leave | options | ({"rule": "projection"} if "projection" in method else {})
        recipe = recipe.updated({"method.kind": kind} | {f"method.{n}": v for n, v in more.items()})
    elif leave:
        recipe = recipe.updated({"method.kind": f"{kind}+rational", "method.rational": leave} | {f"method.{kind}": options})
    else:
        recipe = recipe.updated({"method.kind": kind} | {f"method.{n}": v for n, v in options.items()})
    with tempfile.TemporaryDirectory() as folder:
        result = run(recipe, Path(folder) / "run", task=task)
    rows, last = result.line.rows, result.line.rows[-1]
    everybody = float(recipe.partition.clients)
    return {
        "staying": last["metrics"].get("staying", everybody),
        "accuracy": last["evaluation"].get("global", {}).get("accuracy", 0.0),
        "loss": last["evaluation"].get("clients", {}).get("loss", []),
        "slack": max(r["metrics"].get("slack", 0.0) for r in rows),
        "curve": [r["metrics"].get("staying", everybody) for r in rows],
    }


def main() -> None:
    document = json.loads(OUT.read_text()) if OUT.exists() else {"rows": []}
    for name in sys.argv[1:] or SETTINGS:
        if any(r["setting"] == name for r in document["rows"]):
            continue
        setting, tasks = SETTINGS[name], {seed: task_of(name, seed) for seed in (*SEEDS, TUNING)}
        base = setting["recipe"]["train"]["lr"]
        rates = {lr: play(name, tasks[TUNING], TUNING, "fedavg", {}, lr)["accuracy"] for lr in (base / 3, base, base * 3)}
        lr = max(rates, key=lambda r: rates[r])
        alone = {seed: play(name, tasks[seed], seed, "local", {}, lr)["loss"] for seed in tasks}
        above = lambda seed, margin: [x + margin for x in alone[seed]]
        middle = setting["margins"][len(setting["margins"]) // 2]
        for method, trials in TRIALS.items():
            tried = [play(name, tasks[TUNING], TUNING, method, t, lr, above(TUNING, middle)) for t in trials]
            options = trials[max(range(len(trials)), key=lambda i: (tried[i]["staying"], tried[i]["accuracy"]))]
            for margin in setting["margins"]:
                found = [play(name, tasks[seed], seed, method, options, lr, above(seed, margin)) for seed in SEEDS]
                row = {"setting": name, "margin": margin, "method": method, "options": options, "rate": lr}
                for n in ("staying", "accuracy", "slack"):
                    row |= {n: round(statistics.fmean(f[n] for f in found), 4), f"{n}_std": round(statistics.stdev(f[n] for f in found), 4)}
                rounds = max(len(f["curve"]) for f in found)
                longer = [f["curve"] + [f["curve"][-1]] * (rounds - len(f["curve"])) for f in found]
                row["curve"] = [round(statistics.fmean(c), 3) for c in zip(*longer, strict=True)]
                document["rows"].append(row)
                print({n: v for n, v in row.items() if n != "curve"}, flush=True)
        OUT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
