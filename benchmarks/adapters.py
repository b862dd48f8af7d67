"""The tables of federated adapter methods: every method tuned with the same number of trials, then compared over seeds and data sets.

    python benchmarks/adapters.py             # some two hours on two cores; what is finished in runs/adapters is kept
    python benchmarks/adapters.py bbc mixed   # some tables only
    python benchmarks/adapters.py --print     # the tables of results/adapters.json as Markdown

Tuning: three trials of the learning rate for every method on a seed that no table uses: on BBC News for its tables, on R52 for the corpora with
many labels, on a table's own data for the others.  Banking77 and the eleven languages are read from $ISTHMUS_DATA and left out without it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import time
from pathlib import Path

import torch

import isthmus
from isthmus.comparison import compare, plus_minus
from isthmus.report.progress import size

ROOT = Path(__file__).resolve().parents[1]
RUNS, OUT = ROOT / "runs" / "adapters", ROOT / "results" / "adapters.json"
TUNING_SEED = 100
USUAL, SERVER = (1e-3, 3e-3, 1e-2), (3e-3, 1e-2, 3e-2)
# methods whose clients' own models are the point are tuned for those, the others for the aggregated one
PERSONAL = ("local", "fedper", "fedsa_lora", "fedlova", "query_only", "fedibs", "head_private", "lora_private_head", "lora_b_private")

BASELINES = (
    "local", "fedavg", "fedprox", "scaffold", "fedadam", "fedyogi", "fedper", "ffa_lora", "fedsa_lora", "rolora", "flora", "flexlora",
    "hetlora", "fedex_lora",
)  # fmt: skip
OURS = ("fedlova", "query_only:fedlova", "value_only:fedavg", "frank_lora", "flsauce", "rolora+flsauce", "flora_chef", "fedrecall")
SYSTEMS = ("fedlova", "frank_lora", "flora_chef", "fedrecall")
CORE = ("fedavg", "ffa_lora", "fedsa_lora", "rolora", "flexlora", "fedex_lora", *SYSTEMS, "pooled")
MIXED = ("fedavg", "ffa_lora", "ffa_lora+rank_rate", "hetlora", "flexlora", "flora", "no_rates:frank_lora", "frank_lora")
BIAS = (
    "local",
    "fedavg",
    "head_private:fedper",
    "random:fedibs",
    "change:fedibs",
    "fedibs",
    "lora:fedavg",
    "lora_private_head:fedper",
    "prompt:fedavg",
)

RECALL = ("fedavg", "ffa_lora", "fedsa_lora", "flexlora", "flora_chef", "fedlova")
# what a label or a kind means beside its defaults
FIXED: dict[str, dict] = {
    "query_only:fedlova": {"method.share": ["query"]},
    "value_only:fedavg": {"adapter.targets": ["value"]},
    "no_rates:frank_lora": {"method.rates": False},
    "outside:fedrecall": {"method.inside": False},
    **{f"outside:{b}+fedrecall": {"method.fedrecall": {"inside": False}} for b in RECALL},
    # as many shared ranks as FedAvg has, and as many again for the client
    "fedavg+beside": {"adapter.rank": 16, "method.beside": {"ranks": 8}},
    "random:fedibs": {"method.score": "random"},
    "change:fedibs": {"method.score": "change"},
    "lora:fedavg": {"adapter": {"kind": "lora", "rank": 8, "layers": "upper:2"}},
    "prompt:fedavg": {"adapter": {"kind": "prompt", "tokens": 8}},
    "lora_private_head:fedper": {"adapter": {"kind": "lora", "rank": 8, "layers": "upper:2"}},
    "lora_b_private:fedsa_lora": {"adapter": {"kind": "lora", "rank": 8, "layers": "upper:2"}},
}
BIASES = {"adapter": {"kind": "bias", "layers": "all"}, "rounds": 8}
FOREIGN = {
    "partition.clients": 2, "partition.alpha": 1.0, "data.own_labels": True, "data.source": ["bbc", "r8", "20newsgroups"], "data.limit": 600,
    "evaluate.tuned": True,
}  # fmt: skip
TALK = {
    "task.kind": "language", "data.source": "friends", "partition.kind": "source", "data.limit": 300, "model.path": "smollm2",
    "model.max_length": 24, "adapter.layers": "upper:4", "rounds": 3,
}  # fmt: skip
TABLES: dict[str, tuple[str, dict, tuple[str, ...]]] = {
    "bbc-0.5": ("BBC News, Dirichlet 0.5", {"partition.alpha": 0.5}, (*BASELINES, *OURS, "outside:fedrecall", "pooled")),
    "bbc-0.1": ("BBC News, Dirichlet 0.1", {"partition.alpha": 0.1}, (*BASELINES, *OURS, "outside:fedrecall", "pooled")),
    "r52-0.5": ("Reuters R52, Dirichlet 0.5", {"data.source": "r52", "partition.alpha": 0.5}, (*BASELINES, *SYSTEMS, "pooled")),
    "r52-0.1": ("Reuters R52, Dirichlet 0.1", {"data.source": "r52", "partition.alpha": 0.1}, (*BASELINES, *SYSTEMS, "pooled")),
    "mixed": ("BBC News, Dirichlet 0.5, ranks 2 to 64", {"adapter.rank": 64, "adapter.ranks": [2, 2, 4, 4, 8, 16, 32, 64]}, MIXED),
    "tasks": (
        "three corpora, label sets of their own",
        FOREIGN,
        (*(m for b in RECALL for m in (b, f"{b}+fedrecall", f"outside:{b}+fedrecall")), "fedavg+beside", "local"),
    ),
    "biases": ("BBC News, Dirichlet 0.1, biases", {"partition.alpha": 0.1} | BIASES, BIAS),
    "animals": (
        "ten animals, a camera for each client, dual encoder",
        {
            "task": {"kind": "pairs", "views": True},
            "data.source": "animals",
            "data.limit": 1200,
            "model.path": "small-clip",
            "model.precision": "fp32",
        }
        | BIASES,
        ("local", "fedavg", "random:fedibs", "fedibs", "lora:fedavg", "lora_b_private:fedsa_lora", "prompt:fedavg", "pooled"),
    ),
    "languages": (
        "reviews in eleven languages, one a client",
        {"data.source": "text/multiemo_11_languages.jsonl.gz", "data.client": "language", "partition.kind": "source", "data.limit": 1320},
        CORE,
    ),
    "banking": ("Banking77, Dirichlet 0.5", {"data.source": "banking77/train.csv", "data.label": "category", "data.limit": 1800}, CORE),
    "talk": ("Friends, six speakers, SmolLM2-135M", TALK, ("fedavg", "ffa_lora", *SYSTEMS)),
    "20newsgroups-0.5": (
        "20 Newsgroups, 2,000 posts, Dirichlet 0.5",
        {"data.source": "20newsgroups", "partition.alpha": 0.5, "data.limit": 2000},
        CORE,
    ),
    "20newsgroups-0.1": (
        "20 Newsgroups, 2,000 posts, Dirichlet 0.1",
        {"data.source": "20newsgroups", "partition.alpha": 0.1, "data.limit": 2000},
        CORE,
    ),
}
MANY_LABELS = ("r52-0.5", "r52-0.1", "languages", "banking", "20newsgroups-0.5", "20newsgroups-0.1")
TUNED_ON_THEIR_OWN = ("mixed", "biases", "animals", "talk")


def label(method: str) -> str:
    return method.partition(":")[0]


def trials(method: str) -> list[dict]:
    """Three a method; a server optimiser has its own rate to tune."""
    if label(method) in ("fedadam", "fedyogi"):
        return [{"train.lr": 3e-3, "method.server_lr": lr} for lr in SERVER]
    return [{"train.lr": lr} for lr in USUAL]


def tune(name: str, recipe: isthmus.Recipe, methods: tuple[str, ...]) -> dict[str, dict]:
    """The best trial of each method on a seed that no table uses, together with what is fixed for it."""
    best: dict[str, tuple[float, dict]] = {}
    for i in range(3):
        settings = {m: FIXED.get(m, {}) | trials(m)[i] for m in methods}
        changes = {"compare.methods": list(methods), "compare.settings": settings, "compare.seeds": [TUNING_SEED]}
        for row in compare(recipe.updated(changes | {"evaluate.every": recipe.rounds}), RUNS / f"tune-{name}-{i}"):
            m = row["method"]
            own = any(p in label(m).split("+") for p in PERSONAL) or "fedrecall" in m
            value = -row["loss_personal" if own else "loss_global"]
            if value == value and (m not in best or value > best[m][0]):
                best[m] = (value, settings[m])
    return {m: setting for m, (_, setting) in best.items()}


def versions() -> dict[str, str]:
    return {n: importlib.metadata.version(n) for n in ("torch", "transformers", "numpy")} | {"python": platform.python_version()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE")
    parser.add_argument("--print", action="store_true", dest="show")
    options = parser.parse_args()
    document = json.loads(OUT.read_text()) if OUT.exists() else {"tables": {}}
    for name in [] if options.show else options.tables or TABLES:
        title, changes, methods = TABLES[name]
        source = changes.get("data.source", "bbc")
        if isinstance(source, str) and "/" in source and not (Path(os.environ.get("ISTHMUS_DATA", ".")) / source).exists():
            print(f"{name}: left out, no {source} in $ISTHMUS_DATA")
            continue
        base = isthmus.recipe("baselines")
        recipe, began = base.updated(changes), time.perf_counter()
        if name in TUNED_ON_THEIR_OWN:
            settings = tune(name, recipe, methods)
        elif name in MANY_LABELS:
            settings = tune("r52", base.updated({"data.source": "r52"}), (*BASELINES, *SYSTEMS, "pooled"))
        else:
            settings = tune("bbc", base, (*BASELINES, *OURS, "outside:fedrecall", "pooled"))
        # a method wrapped in FedReCall, or with a private adapter beside its own, keeps its own rate
        own = lambda m: m.removeprefix("outside:").removesuffix("+fedrecall").removesuffix("+beside")
        settings = {m: settings[own(m)] | FIXED.get(m, {}) for m in methods}
        rows = compare(recipe.updated({"compare.methods": list(methods), "compare.settings": settings}), RUNS / name)
        for r in rows:
            del r["run_dir"]
        document |= {"versions": versions(), "threads": torch.get_num_threads(), "processor": platform.processor() or platform.machine()}
        document["tables"][name] = {"title": title, "recipe": changes, "settings": settings, "rows": rows}
        OUT.write_text(json.dumps(document, indent=1) + "\n")
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    if options.show:
        for name in options.tables or document["tables"]:
            print(f"\n**{document['tables'][name]['title']}**\n\n{markdown(document['tables'][name])}")


def markdown(table: dict) -> str:
    """A table as Markdown."""
    language = table["recipe"].get("task.kind") == "language"
    score = ["perplexity, global", "perplexity, personal"] if language else ["global accuracy", "personal accuracy"]
    lines = [f"| method | {' | '.join(score)} | up | down | bytes to global target | to personal target | seconds | learning rate |"]
    lines.append("| --- |" + " --- |" * (lines[0].count("|") - 2))
    for r in table["rows"]:
        setting = table["settings"][r["method"]]
        cells = [f"`{r['method']}`"]
        for which in ("global", "personal"):
            cells.append(plus_minus(r, f"accuracy_{which}") if not language else f"{torch.tensor(r[f'loss_{which}']).exp():.2f}")
        cells += [size(r["bytes_up"]), size(r["bytes_down"])]
        cells += ["–" if r[f"bytes_to_{t}"] is None else size(r[f"bytes_to_{t}"]) for t in ("target", "personal")]
        cells += [f"{r['seconds']:.0f}", ", ".join(f"{v:g}" for n, v in setting.items() if n.endswith("lr"))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
