"""Federated logic-gate networks: accuracy at three kinds of skew, and what the circuits take after synthesis: results/logic.json.

python benchmarks/logic.py            # some twenty minutes on two cores; yosys for the cells

Every method has the same number of local steps (averaging in ten rounds of 25).  ``gates`` and ``diversity`` of FBFS are chosen on a seed
that is not in the table, by accuracy on the held-out rows' clients' test images at two labels a client.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import isthmus
from isthmus.comparison import compare
from isthmus.compilation import compile_run

ROOT = Path(__file__).resolve().parents[1]
RUNS, OUT = ROOT / "runs" / "logic", ROOT / "results" / "logic.json"
SKEWS = {
    "two labels a client": {"partition.classes": 2},
    "one label a client": {"partition.classes": 1},
    "Dirichlet 0.05": {"partition.kind": "dirichlet", "partition.clients": 10, "partition.alpha": 0.05, "partition.smallest": 5},
}
TUNING_SEED = 100


def main() -> None:
    document: dict = {"tables": {}, "tuning": [], "cells": []}
    recipe = isthmus.recipe("fbfs")
    best, options = -1.0, {}
    for gates in (50, 100, 200):
        for diversity in (0.0, 0.4, 0.8):
            setting = {"method.gates": gates, "method.diversity": diversity}
            rows = compare(
                recipe.updated({"compare.methods": ["fbfs"], "compare.seeds": [TUNING_SEED], "compare.settings": {"fbfs": setting}}),
                RUNS / f"tune-{gates}-{diversity}",
            )
            value = rows[0]["accuracy_global"]
            document["tuning"].append({"gates": gates, "diversity": diversity, "accuracy": value})
            if value > best:
                best, options = value, setting
            print(document["tuning"][-1], flush=True)
    document["chosen"] = options
    settings = dict(recipe.compare.settings) | {"fbfs": options}
    for name, changes in SKEWS.items():
        began = time.perf_counter()
        rows = compare(recipe.updated(changes | {"compare.settings": settings}), RUNS / name.replace(" ", "-"))
        document["tables"][name] = [{k: v for k, v in r.items() if k != "run_dir"} for r in rows]
        OUT.write_text(json.dumps(document, indent=1) + "\n")
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    if shutil.which("yosys"):
        for label in ("fbfs", "ensemble-fbfs", "fedavg"):
            found = compile_run(RUNS / "two-labels-a-client" / f"{label}-seed0")
            document["cells"].append({"method": label} | {k: v for k, v in found.items() if k != "folder"})
            print(document["cells"][-1], flush=True)
            OUT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
