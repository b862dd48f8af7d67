"""Several methods on one recipe over several seeds, side by side."""

from __future__ import annotations

import json
import shutil
import statistics
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .core.checkpoint import write_atomic
from .core.recipe import Recipe, RecipeError, parse
from .runner import Callback, bytes_to, run
from .tasks.build import make_task

_AVERAGED = (
    "accuracy_global", "accuracy_personal", "accuracy_tuned", "loss_global", "loss_personal", "loss_tuned", "bytes_up", "bytes_down", "payload_bytes_up", "payload_bytes_down",
    "bytes_to_target", "bytes_to_personal", "seconds",
)  # fmt: skip


def compare(
    recipe: Recipe,
    folder: Path,
    root: Path | None = None,
    callbacks: Callable[[str, int], Sequence[Callback]] = lambda method, seed: (),
) -> list[dict[str, Any]]:
    """Run every method of ``recipe.compare`` with every seed, and put means and standard deviations side by side.

    A method is a ``method.kind``, or ``label:kind`` where one kind stands in the table with several settings.  A method and seed that is finished in ``folder`` already is not run again.  All methods of a seed see the same data, split, model,
    initial values and order of examples.  ``bytes_to_target``: bytes up and down until the global accuracy first reaches that of pooled
    data minus two points (or, without pooled data, 98 % of the best method's last); ``bytes_to_personal``: until the personal accuracy
    reaches 98 % of the best method's last; None where a seed never does.  ``curve``: means over seeds, by round.

    Returns:
        One document a method, as ``isthmus compare --json`` prints it.
    """
    results: dict[str, list[dict[str, Any]]] = {m: [] for m in recipe.compare.methods}
    for seed in recipe.compare.seeds:
        tasks: dict[str, Any] = {}
        for method in recipe.compare.methods:
            kind = method.rpartition(":")[2]
            changes = {"seed": seed, "evaluate.references": False, "compare": {}} | (
                {"method.kind": kind} if kind != recipe.method.kind else {}
            )
            one = recipe.updated(changes | recipe.compare.settings.get(method, {}))
            target = folder / f"{method.replace(':', '-')}-seed{seed}"
            if not _same(target, one):
                shutil.rmtree(target, ignore_errors=True)
            if not (target / "result.json").exists():
                key = json.dumps(
                    [
                        one.task.model_dump(),
                        one.data.model_dump(),
                        one.partition.model_dump(),
                        one.model.model_dump(),
                        one.adapter.model_dump(),
                    ]
                )
                if key not in tasks:
                    tasks.clear()  # one model in memory at a time
                    tasks[key] = make_task(one, root)
                run(one, target, root, callbacks(method, seed), resume=True, task=tasks[key])
            document = json.loads((target / "result.json").read_text(encoding="utf-8"))
            document["rows"] = [json.loads(line) for line in (target / "ledger.jsonl").read_text().splitlines()]
            results[method].append(document)
    return _summarise(recipe, folder, results)


def _same(target: Path, recipe: Recipe) -> bool:
    """Whether what lies in ``target`` was made by exactly this recipe."""
    try:
        return parse(tomllib.loads((target / "recipe.toml").read_text(encoding="utf-8"))).table() == recipe.table()
    except (OSError, tomllib.TOMLDecodeError, RecipeError):
        return False


def _summarise(recipe: Recipe, folder: Path, results: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows = []
    for i in range(len(recipe.compare.seeds)):
        pooled = results["pooled"][i]["accuracy_global"] if "pooled" in results else None
        best = max(d[i]["accuracy_global"] or 0 for d in results.values())
        target = pooled - 0.02 if pooled is not None else 0.98 * best
        own = 0.98 * max(d[i]["accuracy_personal"] or 0 for d in results.values())
        for method, documents in results.items():
            alone = method in ("local", "pooled")
            documents[i]["bytes_to_target"] = None if alone else bytes_to(documents[i]["rows"], "global", target)
            documents[i]["bytes_to_personal"] = None if alone else bytes_to(documents[i]["rows"], "personal", own)
    for method, documents in results.items():
        row: dict[str, Any] = {"method": method, "task": recipe.task.kind, "rounds": recipe.rounds, "seeds": list(recipe.compare.seeds)}
        row["further"] = documents[0].get("further", [])
        for name in (*_AVERAGED, *row["further"]):
            values = [d[name] for d in documents if d.get(name) is not None]
            whole = len(values) == len(documents)
            row[name] = round(statistics.fmean(values), 6) if whole else None
            row[f"{name}_std"] = (round(statistics.stdev(values), 6) if len(values) > 1 else 0.0) if whole else None
        row["accuracy_local_only"] = _mean(results.get("local"), "accuracy_personal")
        row["accuracy_pooled"] = _mean(results.get("pooled"), "accuracy_global")
        row["curve"] = _curve([d["rows"] for d in documents])
        row["run_dir"] = str(folder)
        rows.append(row)
    write_atomic(folder / "compare.json", json.dumps(rows, indent=1).encode())
    return rows


def _curve(runs: list[list[dict[str, Any]]]) -> list[dict[str, float]]:
    """By round: bytes on the wire so far, and every metric that all seeds have, as means over seeds."""
    out, spent = [], 0.0
    longest = max(map(len, runs))
    # one that was over before the others stays as it was
    runs = [r + [r[-1] | {"round": i, "up": {}, "down": {}} for i in range(len(r), longest)] for r in runs]
    for rows in zip(*runs, strict=True):
        spent += statistics.fmean(sum(s[1] for way in ("up", "down") for s in r[way].values()) for r in rows)
        point: dict[str, float] = {"round": rows[0]["round"] + 1, "bytes": round(spent)}
        flat = [
            r["metrics"]
            | {f"{n}_{which}": v for which in ("global", "personal", "tuned") for n, v in (r["evaluation"] or {}).get(which, {}).items()}
            | {f"{n}_{role}": v for role, found in (r["evaluation"] or {}).get("roles", {}).items() for n, v in found.items()}
            for r in rows
        ]
        point |= {n: round(statistics.fmean(f[n] for f in flat), 6) for n in flat[0] if all(n in f for f in flat)}
        out.append(point)
    return out


def _mean(documents: list[dict[str, Any]] | None, name: str) -> float | None:
    if not documents or any(d[name] is None for d in documents):
        return None
    return round(statistics.fmean(d[name] for d in documents), 6)


def plus_minus(row: dict[str, Any], name: str, scale: float = 100) -> str:
    """ "96.4 ± 0.3"."""
    return "–" if row[name] is None else f"{scale * row[name]:.1f} ± {scale * row[f'{name}_std']:.1f}"
