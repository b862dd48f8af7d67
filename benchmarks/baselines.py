"""The table of baselines: every method tuned with the same number of trials, then compared over seeds, data sets and skews.

python benchmarks/baselines.py            # about an hour on two cores; what is finished in runs/baselines is kept
python benchmarks/baselines.py --table    # print the table of results/baselines.json as Markdown
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch

import isthmus
from isthmus.comparison import compare, plus_minus
from isthmus.report.progress import size

ROOT = Path(__file__).resolve().parents[1]
DATA, ALPHAS, TUNING_SEED = ("bbc", "r8"), (0.5, 0.1), 100
# three trials each; a server optimiser has its own rate to tune
TRIALS = {"": [{"train.lr": lr} for lr in (1e-3, 3e-3, 1e-2)]} | {
    m: [{"train.lr": 3e-3, "method.server_lr": lr} for lr in (3e-3, 1e-2, 3e-2)] for m in ("fedadam", "fedyogi")
}
PERSONAL = ("local", "fedper", "fedsa_lora")  # methods whose clients' models are the point; the others are tuned for the global one


def tune(recipe: isthmus.Recipe, data: str) -> dict[str, dict[str, float]]:
    """The best trial of each method on a seed that the table does not use."""
    best = {}
    for i in range(3):
        settings = {m: TRIALS.get(m, TRIALS[""])[i] for m in recipe.compare.methods}
        one = recipe.updated({"compare.seeds": [TUNING_SEED], "compare.settings": settings, "evaluate.every": recipe.rounds})
        for row in compare(one, ROOT / "runs" / "baselines" / f"tune-{data}-{i}"):
            value = row["accuracy_personal" if row["method"] in PERSONAL else "accuracy_global"]
            if row["method"] not in best or value > best[row["method"]][0]:
                best[row["method"]] = (value, settings[row["method"]])
    return {m: setting for m, (_, setting) in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", action="store_true")
    out = ROOT / "results" / "baselines.json"
    if not parser.parse_args().table:
        document = {
            "machine": platform.machine(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "isthmus": isthmus.__version__,
            "tables": [],
        }
        for data in DATA:
            recipe = isthmus.recipe("baselines", f'data.source="{data}"')
            settings = tune(recipe, data)
            for alpha in ALPHAS:
                one = recipe.updated({"partition.alpha": alpha, "compare.settings": settings})
                rows = compare(one, ROOT / "runs" / "baselines" / f"{data}-{alpha}")
                rows = [{k: v for k, v in r.items() if k != "run_dir"} for r in rows]
                document["tables"].append({"data": data, "alpha": alpha, "settings": settings, "rows": rows})
                out.parent.mkdir(exist_ok=True)
                out.write_text(json.dumps(document, indent=1) + "\n")
                print(data, alpha, "done", flush=True)
    for table in json.loads(out.read_text())["tables"]:
        print(f"\n**{table['data']}, Dirichlet {table['alpha']}**\n")
        print(
            "| method | global accuracy | personal accuracy | up | down | bytes to target | learning rate |\n| --- | --- | --- | --- | --- | --- | --- |"
        )
        for r in table["rows"]:
            rate = table["settings"][r["method"]]
            shown = ", ".join(f"{v:g}" for v in rate.values())
            target = "–" if r["bytes_to_target"] is None else size(r["bytes_to_target"])
            cells = [
                r["method"],
                plus_minus(r, "accuracy_global"),
                plus_minus(r, "accuracy_personal"),
                size(r["bytes_up"]),
                size(r["bytes_down"]),
                target,
                shown,
            ]
            print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
