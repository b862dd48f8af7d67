"""What hostile clients do to each rule, and what it costs when nobody is hostile: results/robust.json.

python benchmarks/robust.py           # some twenty minutes on one core
python benchmarks/robust.py digits    # one part only

Digits: ten clients, Dirichlet 1, 30 rounds, three seeds.  News: BBC News, MiniLM with LoRA rank 8, ten clients, eight rounds, lengths and
distances of factors against those of products.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

import isthmus
from isthmus.core.recipe import parse
from isthmus.core.rounds import RunError
from isthmus.runner import run
from isthmus.tasks.build import make_task

OUT = Path(__file__).resolve().parents[1] / "results" / "robust.json"
SEEDS = (0, 1, 2)
HOSTILE = {10: [4], 20: [1, 4], 30: [1, 4, 7]}
RULES = ("fedavg", "norm_bound", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median")
ATTACKS = ("none", "sign flip", "sign flip x10", "scale x100", "nan", "label flip", "backdoor")
PAYLOADS = {"sign flip": ("sign_flip", 1.0), "sign flip x10": ("sign_flip", 10.0), "scale x100": ("scale", 100.0), "nan": ("nan", 1.0)}
DIGITS = {
    "name": "robust", "rounds": 30, "task": {"kind": "digits"}, "partition": {"clients": 10, "alpha": 1.0}, "model": {"width": 64},
    "train": {"optimiser": "sgd", "lr": 0.1, "epochs": 2}, "evaluate": {"every": 30, "references": False},
}  # fmt: skip


def options(kind: str, hostile: int, space: str = "factors") -> dict:
    """Every rule is told how many are hostile."""
    out = {"method.kind": kind}
    for part in kind.split("+"):
        mine = {} if part == "fedavg" else {"space": space}
        if part in ("krum", "multi_krum", "trimmed_mean", "bulyan"):
            mine["attackers"] = hostile
        if mine:
            out |= {f"method.{part}": mine} if "+" in kind else {f"method.{n}": v for n, v in mine.items()}
    return out


def poisoned(task, attack: str, clients: list[int]):
    """The task with hostile clients' training rows changed: labels turned round, or a mark on half of them that means label 0."""
    x, y = task.x.clone(), task.y.clone()
    for c in clients:
        rows = task.train[c]
        if attack == "label flip":
            y[rows] = 9 - y[rows]
        else:
            some = rows[::2]
            x[some] = marked(x[some])
            y[some] = 0
    return replace(task, x=x, y=y)


def marked(x: torch.Tensor) -> torch.Tensor:
    """Digits (n, 64) with two bright corners."""
    x = x.clone()
    x[:, [0, 7, 56, 63]] = 1.0
    return x


def digits(attack: str, share: int, kind: str, seed: int) -> dict[str, float]:
    hostile = HOSTILE.get(share, [])
    recipe = parse(DIGITS).updated({"seed": seed, **options(kind, len(hostile))})
    if attack in PAYLOADS:
        what, factor = PAYLOADS[attack]
        recipe = recipe.updated({"channels": [{"kind": "attack", "clients": hostile, "what": what, "factor": factor}]})
    task = make_task(recipe)
    if attack in ("label flip", "backdoor"):
        task = poisoned(task, attack, hostile)
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = run(recipe, Path(folder) / "run", task=task)
        except RunError:
            return {"accuracy": 0.1}  # it diverged
    out = {"accuracy": result.document["accuracy_global"]}
    if attack == "backdoor":
        rows = torch.cat(list(task.test))
        rows = rows[task.y[rows] != 0]
        params = result.line.engine.global_params(result.line.server)
        fooled = replace(task, x=task.x.index_copy(0, rows, marked(task.x[rows])), y=torch.zeros_like(task.y))
        out["fooled"] = float(fooled.score(params, rows)["accuracy"].mean())
    return out


def news(kind: str, space: str, attack: bool) -> float:
    recipe = isthmus.recipe("newsroom").updated(
        {
            "partition.clients": 10,
            "partition.alpha": 1.0,
            "rounds": 8,
            "evaluate.references": False,
            "evaluate.every": 8,
            "data.limit": 1200,
        }
        | options(kind, 3, space)
        | ({"channels": [{"kind": "attack", "clients": HOSTILE[30], "what": "sign_flip", "factor": 5.0}]} if attack else {})
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            return run(recipe, Path(folder) / "run").document["accuracy_global"]
        except RunError:
            return 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["digits", "news", []], metavar="PART")
    parts = parser.parse_args().parts or ["news", "digits"]
    document = json.loads(OUT.read_text()) if OUT.exists() else {}
    if "news" in parts:
        document["news"] = []
        for kind in ("fedavg", "norm_bound", "median", "trimmed_mean", "multi_krum", "geometric_median"):
            for space in ("factors", "products") if kind != "fedavg" else ("factors",):
                row = {"rule": kind, "space": space, "clean": news(kind, space, False), "attacked": news(kind, space, True)}
                document["news"].append(row)
                print(row, flush=True)
                OUT.write_text(json.dumps(document, indent=1) + "\n")
    if "digits" in parts:
        document["digits"] = []
        for attack in ATTACKS:
            for share in (0,) if attack == "none" else HOSTILE:
                for kind in RULES:
                    found = [digits(attack, share, kind, seed) for seed in SEEDS]
                    row = {"attack": attack, "share": share, "rule": kind} | {
                        n: [round(statistics.fmean(f[n] for f in found), 4), round(statistics.stdev(f[n] for f in found), 4)]
                        for n in found[0]
                    }
                    document["digits"].append(row)
                    print(row, flush=True)
                OUT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
