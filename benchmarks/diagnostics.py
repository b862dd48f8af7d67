"""What the five systems' sources observe, looked for in real runs: results/diagnostics.json.

python benchmarks/diagnostics.py            # some ten minutes on two cores
python benchmarks/diagnostics.py snr recall # some only
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from torch import Tensor

import isthmus
from isthmus.core.rounds import server_round, server_start
from isthmus.core.tensors import under
from isthmus.engines.evaluate import evaluate
from isthmus.federated.frank_lora import Drawn
from isthmus.parts.factors import layers, roles_of
from isthmus.runner import make_engine, make_method
from isthmus.tasks.build import make_task

OUT = Path(__file__).resolve().parents[1] / "results" / "diagnostics.json"
SEEDS = (0, 1, 2)


def rounds_of(recipe: isthmus.Recipe):
    """Play a recipe; after each round (engine, server, record)."""
    task, method = make_task(recipe), make_method(recipe)
    engine, server = make_engine(recipe, method, task), server_start(method, task, recipe.seed)
    for _ in range(recipe.rounds):
        server, record = server_round(method, task, server, engine)
        yield engine, server, record


def mean(values: list[float]) -> float:
    return round(statistics.fmean(values), 5)


def roles() -> dict:
    """FedLoVA: how much local work changes the query's and the value's update in each round, and how far clients are apart after it."""
    out = {}
    for kind in ("fedavg", "fedlova"):
        for data in ("bbc",):
            seeds = []
            for seed in SEEDS:
                recipe = isthmus.recipe("fedlova", f"method.kind={kind}", f"seed={seed}", "rounds=5", f"data.source={data}")
                seeds.append([evaluate(e, s, False, False, roles_of).roles for e, s, _ in rounds_of(recipe)])
            out[f"{kind}, {data}"] = {
                f"{name} {role}": [mean([s[t][role][name] for s in seeds]) for t in range(5)]
                for role in ("query", "value")
                for name in ("change", "dispersion")
            }
    return out


def snr() -> dict:
    """Frank-LoRA: 1 / E||g A'A - g||^2 for a unit g, against r / (n + 1)."""
    out = []
    for n in (64, 384):
        g = torch.nn.functional.normalize(torch.randn(n, generator=torch.Generator().manual_seed(1)), dim=0)
        for r in (2, 4, 8, 16, 32, 64):
            draws = [Drawn()("layer", (r, n), 0, 0, torch.tensor(c), torch.tensor(r)) for c in range(400)]
            noise = [float((g @ a.mT @ a - g).square().sum()) for a in draws]
            out.append({"n": n, "r": r, "measured": 1 / statistics.fmean(noise), "theory": r / (n + 1)})
    return {"points": out}


def turns() -> dict:
    """FLoRA-Chef: dispersion of A and B over the rounds, and whose turn it was."""
    out = {}
    for rule in ("lowest", "highest", "alternate"):
        seeds = []
        for seed in SEEDS:
            recipe = isthmus.recipe("flora_chef", f"seed={seed}", "rounds=10", f"method.rule={rule}")
            last = None
            rows = []
            for e, s, record in rounds_of(recipe):
                rows.append(record.metrics)
                last = evaluate(e, s).overall["accuracy"]
            seeds.append((rows, last))
        out[rule] = {n: [mean([rows[t][n] for rows, _ in seeds]) for t in range(10)] for n in ("dispersion_a", "dispersion_b", "turn_of_a")}
        out[rule]["accuracy"] = mean([last for _, last in seeds])
    return out


def masks() -> dict:
    """FedIBS: the personal fraction by round, and how much two clients' masks overlap (Jaccard), against what chance would give."""
    out: dict[str, list[list[float]]] = {"fraction": [], "overlap": [], "chance": []}
    for seed in SEEDS:
        rows: dict[str, list[float]] = {n: [] for n in out}
        for engine, _, _ in rounds_of(isthmus.recipe("fedibs", f"seed={seed}")):
            found = torch.cat([t for n, t in engine.state().items() if n.startswith("fedibs/mask.")], 1).float()
            both = found @ found.T
            size = found.sum(1)
            either = size[:, None] + size[None] - both
            pair = torch.triu(torch.ones_like(both), 1) > 0
            p = float(found.mean())
            rows["fraction"].append(p)
            rows["overlap"].append(float((both / either.clamp_min(1))[pair].mean()))
            rows["chance"].append(p / (2 - p) if p else 0.0)
        for n in out:
            out[n].append(rows[n])
    return {n: [mean([s[t] for s in seeds]) for t in range(len(seeds[0]))] for n, seeds in out.items()}


def recall() -> dict:
    """FedReCall: how much of each local direction comes back, by its strength; whether owners find the same direction again."""
    retention: dict[int, list[float]] = {}
    own, others, gaps, strength = [], [], [], []
    for seed in SEEDS:
        before: dict[str, Tensor] = {}
        for engine, server, _ in rounds_of(isthmus.recipe("fedrecall", f"seed={seed}")):
            state = under(engine.state(), "fedrecall/")
            for n in layers(server.shared):
                s, kept = state[f"{n}.seen"].unbind(1)
                for i in range(16):
                    real = s[:, i] > 1e-3 * s[:, 0].clamp_min(1e-12)
                    retention.setdefault(i, []).extend(kept[real, i].clamp(-1, 2).tolist())
                u, v = state[f"{n}.u"][..., :4], state[f"{n}.v"][..., :4]
                if n in before:
                    pu, pv = before[n]
                    same = (torch.einsum("kom,lon->klmn", u, pu) * torch.einsum("kim,lin->klmn", v, pv)).abs().amax(-1).mean(-1)
                    own += same.diagonal().tolist()
                    others += same[~torch.eye(len(u), dtype=torch.bool)].tolist()
                before[n] = (u.clone(), v.clone())
            strength += state["strength"].tolist()
            gaps.append(float((state["strength"] > 0).float().mean()))
    return {
        "retention_by_rank_of_strength": [mean(retention[i]) for i in sorted(retention) if retention[i]],
        "alignment_own": mean(own),
        "alignment_others": mean(others),
        "share_of_participations_with_a_bypass": mean(gaps),
    }


PARTS = {"snr": snr, "roles": roles, "turns": turns, "masks": masks, "recall": recall}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART")
    document = json.loads(OUT.read_text()) if OUT.exists() else {}
    for name in parser.parse_args().parts or PARTS:
        document[name] = PARTS[name]()
        OUT.write_text(json.dumps(document, indent=1) + "\n")
        print(name, json.dumps(document[name])[:1500], flush=True)


if __name__ == "__main__":
    main()
