"""Tables and pictures of the methods that share counts, prototypes, modules or utilities, from results/; see pages.py."""

from __future__ import annotations

from collections.abc import Callable

from primitive_pages import markdown, result

from isthmus.report import plots
from isthmus.report.progress import size


def pm(row: dict, name: str, scale: float = 100.0, digits: int = 1) -> str:
    if row.get(name) is None:
        return "–"
    return f"{scale * row[name]:.{digits}f} ± {scale * row.get(f'{name}_std', 0.0):.{digits}f}"


def logic() -> str:
    """Accuracy of hardened circuits by skew."""
    tables = result("logic")["tables"]
    methods = [r["method"] for r in next(iter(tables.values()))]
    rows = []
    for m in methods:
        mine = [next(r for r in t if r["method"] == m) for t in tables.values()]
        which = "accuracy_personal" if m == "local" else "accuracy_global"
        name = f"`{m}`, each on its own rows" if m == "local" else f"`{m}`"
        rows.append([name, *(pm(r, which) for r in mine), size(mine[0]["bytes_up"]), size(mine[0]["bytes_down"])])
    return markdown(["method", *tables, "up", "down"], rows)


def logic_cells() -> str:
    """What circuits take."""
    rows = [
        [f"`{r['method']}`", f"{r['gates']:,}", f"{r['cells']['total']:,}" if r["cells"] else "not finished in 8 minutes", f"{100 * r['accuracy']:.1f}", f"{r['mismatches']} of {r['test_rows']}"]
        for r in result("logic")["cells"]
    ]  # fmt: skip
    return markdown(
        ["method", "gates before the adders", "cells after synthesis", "accuracy", "rows on which circuit and model differ"], rows
    )


def bags() -> str:
    """Area under the curve and accuracy by set."""
    rows = result("bags").get("rows", [])
    sets = list(dict.fromkeys(r["set"] for r in rows))
    out = []
    for m in dict.fromkeys(r["method"] for r in rows):
        mine = {r["set"]: r for r in rows if r["method"] == m}
        out.append([f"`{m}`", *(f"{pm(mine[s], 'auc')}; {100 * mine[s]['accuracy']:.1f}" if s in mine else "–" for s in sets)])
    return markdown(["method", *sets], out)


def bags_evidence() -> str:
    """Where attention lies on bags whose evidence is known."""
    rows = [r for r in result("bags").get("rows", []) if "evidence" in r]
    return markdown(
        ["method", "attention on the key instances", "the worst client's", "divergence between clients, bits", "up"],
        [[f"`{r['method']}`", f"{100 * r['evidence']:.1f} %", f"{100 * r['evidence_worst']:.1f} %", f"{r['divergence']:.3f}", size(r["bytes_up"])] for r in rows],
    )  # fmt: skip


def routing() -> str:
    """Areas under the frontier."""
    rows = result("routing")["rows"]
    settings = list(dict.fromkeys(r["setting"] for r in rows))
    out = []
    for m in dict.fromkeys(r["method"] for r in rows if r["method"] != "best single model"):  # one point at cost 1 has no area
        mine = {r["setting"]: r for r in rows if r["method"] == m}
        sent = mine[settings[0]].get("bytes")
        out.append(
            [
                m if " " in m or m in ("random", "oracle") else f"`{m}`",
                *(pm(mine[s], "frontier") for s in settings),
                size(sent) if sent else "–",
            ]
        )
    return markdown(["router", *settings, "bytes"], out)


def routing_models() -> str:
    """Who can be asked."""
    return markdown(
        ["model", "right", "cost"], [[r["model"], f"{100 * r['accuracy']:.1f} %", f"{r['cost']:.3f}"] for r in result("routing")["models"]]
    )


def concepts() -> str:
    """By set and family: label, concepts, those never annotated, with corrections."""
    out = []
    for r in result("concepts")["rows"]:
        cells = [pm(r, n) for n in ("accuracy", "concepts", "unseen", "intervened", "corrected")]
        out.append([r["set"], r["family"], f"`{r['method']}`", *cells])
    return markdown(
        [
            "set",
            "family",
            "method",
            "label",
            "all concepts",
            "never annotated by the client",
            "label, mean over corrections",
            "label, all corrected",
        ],
        out,
    )


def concepts_mean() -> str:
    """The same, mean over sets and families."""
    rows = result("concepts")["rows"]
    out = []
    for m in dict.fromkeys(r["method"] for r in rows):
        mine = [r for r in rows if r["method"] == m]
        cells = []
        for n in ("accuracy", "concepts", "unseen", "intervened", "corrected"):
            values = [r[n] for r in mine if r.get(n) is not None]
            cells.append(f"{100 * sum(values) / len(values):.1f}" if values else "–")
        out.append([f"`{m}`", *cells])
    return markdown(
        ["method", "label", "all concepts", "never annotated by the client", "label, mean over corrections", "label, all corrected"], out
    )


def rational() -> str:
    """Who stays and what the model is worth."""
    rows = result("rational").get("rows", [])
    out = []
    for setting, margin in dict.fromkeys((r["setting"], r["margin"]) for r in rows):
        for r in (r for r in rows if (r["setting"], r["margin"]) == (setting, margin)):
            chosen = ", ".join(f"{n} = {v:g}" for n, v in r["options"].items())
            out.append([setting, f"{margin:+g}", r["method"], chosen, pm(r, "staying", 1.0), pm(r, "accuracy")])
    return markdown(["setting", "margin", "method", "", "clients that stay", "accuracy, everybody's rows"], out)


TABLES: dict[str, Callable[[], str]] = {
    "logic": logic, "logic-cells": logic_cells, "bags": bags, "bags-evidence": bags_evidence, "routing": routing, "routing-models": routing_models,
    "concepts": concepts, "concepts-mean": concepts_mean, "rational": rational,
}  # fmt: skip


def pictures() -> dict[str, str]:
    out: dict[str, str] = {}
    if found := result("logic"):
        with plots.figure(height=3.2) as (axes, svg):
            names = list(found["tables"])
            methods = [r["method"] for r in found["tables"][names[0]] if r["method"] != "local"]
            for i, m in enumerate(methods):
                values = [next(100 * r["accuracy_global"] for r in found["tables"][n] if r["method"] == m) for n in names]
                axes.bar([j + (i - len(methods) / 2) * 0.13 for j in range(len(names))], values, 0.12, color=plots.COLOURS[i % 8], label=m)
            axes.set_xticks(range(len(names)), names)
            axes.set(ylabel="accuracy of the circuit, %")
            axes.legend(fontsize=7, ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        out["fbfs"] = svg[0]
    if (found := result("bags")) and found["rows"]:
        with plots.figure(height=3.2) as (axes, svg):
            sets = list(dict.fromkeys(r["set"] for r in found["rows"]))
            methods = list(dict.fromkeys(r["method"] for r in found["rows"]))
            for i, m in enumerate(methods):
                mine = {r["set"]: r for r in found["rows"] if r["method"] == m}
                x = [j + (i - len(methods) / 2) * 0.15 for j, s in enumerate(sets) if s in mine]
                axes.errorbar(
                    x,
                    [100 * mine[s]["auc"] for s in sets if s in mine],
                    [100 * mine[s]["auc_std"] for s in sets if s in mine],
                    fmt="o",
                    color=plots.COLOURS[i],
                    label=m,
                )
            axes.set_xticks(range(len(sets)), sets)
            axes.set(ylabel="area under the curve, %")
            axes.legend(fontsize=7, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        out["fedsem"] = svg[0]
    if found := result("routing"):
        with plots.figure(height=3.4) as (axes, svg):
            settings = list(dict.fromkeys(r["setting"] for r in found["rows"]))
            for i, m in enumerate(
                ("router_kmeans", "router_mlp", "fedavg", "own table", "own network", "pooled table", "hull of single models", "oracle")
            ):
                mine = {r["setting"]: r for r in found["rows"] if r["method"] == m}
                axes.bar(
                    [j + (i - 4) * 0.1 for j in range(len(settings))],
                    [100 * mine[s]["frontier"] for s in settings],
                    0.09,
                    color=plots.COLOURS[i],
                    label=m,
                )
            axes.set_xticks(range(len(settings)), settings, fontsize=8)
            axes.set(ylabel="area under the frontier, %", ylim=(40, 100))
            axes.legend(fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        out["routing_areas"] = svg[0]
    if (found := result("routing")) and "frontier" in found:
        with plots.figure(height=3.6) as (axes, svg):
            for i, (name, points) in enumerate(found["frontier"].items()):
                axes.plot(
                    [p[0] for p in points], [100 * p[1] for p in points], "o-", markersize=2.5, color=plots.COLOURS[i % 8], label=name
                )
            for r in found["models"]:
                axes.plot(r["cost"], 100 * r["accuracy"], "x", color="#8c8c8c", markersize=4)
            axes.set(xlabel="mean cost of a query (the most expensive model: 1)", ylabel="right, %")
            axes.legend(fontsize=7)
        out["routing"] = svg[0]
    if found := result("concepts"):
        rows = [r for r in found["rows"] if r["set"] == "digits" and r["family"] == "bottleneck"]
        with plots.figure(height=3.2) as (axes, svg):
            for i, r in enumerate(r for r in rows if "curve" in r):
                axes.plot(
                    range(len(r["curve"])), [100 * v for v in r["curve"]], "o-", markersize=3, color=plots.COLOURS[i], label=r["method"]
                )
            axes.set(xlabel="concepts corrected", ylabel="label right, % (digits, bottleneck)")
            axes.legend(fontsize=8)
        out["concepts_corrected"] = svg[0]
        with plots.figure(height=3.2) as (axes, svg):
            for i, r in enumerate(r for r in rows if "over_rounds" in r):
                axes.plot(
                    [5 * (j + 1) for j in range(len(r["over_rounds"]))],
                    [100 * v for v in r["over_rounds"]],
                    "o-",
                    markersize=3,
                    color=plots.COLOURS[i],
                    label=r["method"],
                )
            axes.axvline(15, color="#8c8c8c", linestyle=":")
            axes.set(xlabel="round (half of the concepts begin in round 15)", ylabel="concepts right, %")
            axes.legend(fontsize=8)
        out["concepts_rounds"] = svg[0]
    if (found := result("rational")) and found["rows"]:
        with plots.figure(height=3.2) as (axes, svg):
            rows = [r for r in found["rows"] if r["setting"] == "digits"]
            margin = sorted({r["margin"] for r in rows})[len({r["margin"] for r in rows}) // 2]
            for i, r in enumerate(r for r in rows if r["margin"] == margin):
                axes.plot(range(1, len(r["curve"]) + 1), r["curve"], color=plots.COLOURS[i], label=r["method"])
            axes.set(xlabel="round", ylabel=f"clients that are still there (digits, margin {margin:+g})")
            axes.legend(fontsize=8)
        out["feduca"] = svg[0]
    return out
