"""Tables and pictures of the primitives' pages, from results/; see pages.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from isthmus.report import plots
from isthmus.report.progress import size

RESULTS = Path(__file__).resolve().parents[1] / "results"


def result(name: str) -> dict:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " --- |" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(r) + " |" for r in rows)]) + "\n"


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def kmeans() -> str:
    """Seconds of ten steps, and the best peer's ratio."""
    found = result("kmeans")["peers"]
    names = list(next(iter(found.values())))
    head = ["ten steps from the same centres", *names, "best peer / ours", "float32 only"]
    rows = []
    for title, row in found.items():
        ours = [f"{row[n]['best peer over it']:.2g} x" for n in ("isthmus", "isthmus, float32 only")]
        rows.append([title, *(ms(row[n]["seconds"]) if n in row else "–" for n in names), *ours])
    return markdown(head, rows)


def kmeans_phases() -> str:
    found = result("kmeans")
    limit = found["machine"]["float32 flop/s"]
    rows = []
    for shape, row in found["phases"].items():
        n, d, k = (int(x) for x in shape.replace(" x ", " ").replace(", K = ", " ").split())
        seconds, flop = row["seconds"], 2.0 * n * d * k
        half = seconds.get("assign, products in bfloat16")
        rows.append([
            shape, f"{flop / seconds['assign'] / 1e9:.0f} GFLOP/s, {100 * flop / seconds['assign'] / limit:.0f} %",
            "–" if half is None else f"{flop / half / 1e9:.0f} GFLOP/s", ms(seconds["sum by scatter alone"]), ms(seconds["sum by sorted labels"]),
            *(f"{row['assign by instruction set'][u] / seconds['assign']:.1f} x" for u in ("avx2", "base", "numpy") if u in row["assign by instruction set"]),
        ])  # fmt: skip
    head = [
        "shape",
        "assign in float32, share of the limit",
        "with bfloat16 products",
        "sums, scattered",
        "sums, sorted",
        "AVX2 takes",
        "plain takes",
        "NumPy takes",
    ]
    return markdown(head, rows)


def kmeans_bounds() -> str:
    found = result("kmeans")["bounds"]
    names = [n for n in next(iter(found.values())) if n != "steps"]
    return markdown(["data", "steps", *names], [[t, str(r["steps"]), *(ms(r[n]) for n in names)] for t, r in found.items()])


def certificate() -> str:
    found = result("certificate")
    rows = []
    for kind in ("frozen", "trained"):
        for name, r in found[kind].items():
            percent = lambda value: f"{100 * value:.1f}"
            terms = [f"{percent(r[t]['measured'])} (≤ {percent(r[t]['upper'])})" for t in ("decoder", "agreement", "stability")]
            other = percent(r["hold_out"]) if "hold_out" in r else "–"
            weights = ("vacuous" if r["pac_bayes"] >= 1 else percent(r["pac_bayes"])) if "pac_bayes" in r else "–"
            norm = found.get("norm_based", {}).get(name)
            rows.append(
                [
                    f"{name}, {kind}",
                    *terms,
                    f"**{percent(r['bound'])}**",
                    percent(r["test_error"]),
                    f"{round(r['held'] * r['splits'])} of {r['splits']}",
                    other,
                    weights,
                    ("vacuous" if norm >= 1 else percent(norm)) if norm is not None and kind == "frozen" else "–",
                ]
            )
    head = [
        "set",
        "decoder",
        "agreement",
        "stability",
        "bound",
        "test error",
        "held",
        "labelled hold-out",
        "PAC-Bayes by weights",
        "margin by norm",
    ]
    return markdown(head, rows)


def certificate_diagnostics() -> str:
    found = result("certificate")["diagnostics"]
    percent = lambda value: f"{100 * value:.1f}"
    rows = [
        [
            n,
            percent(r["train_error"]),
            percent(r["test_error"]),
            *(percent(r[t]["measured"]) for t in ("decoder", "agreement", "stability")),
            percent(min(9.999, r["bound"])),
        ]
        for n, r in found.items()
    ]
    return markdown(["digits, network from scratch", "training error", "test error", "decoder", "agreement", "stability", "bound"], rows)


def forecasting() -> str:
    """Mean squared errors by series and horizon; the best of a row stands out."""
    rows = [r for r in result("forecasting")["rows"] if r["model"] != "bank of one size"]
    models = list(dict.fromkeys(r["model"] for r in rows))
    out = []
    for series, horizon in dict.fromkeys((r["series"], r["horizon"]) for r in rows):
        here = {r["model"]: r["mse"] for r in rows if (r["series"], r["horizon"]) == (series, horizon)}
        best = min(here.values())
        cells = [
            ("–" if m not in here else f"**{here[m]:.3f}**" if round(here[m], 3) <= round(best, 3) else f"{here[m]:.3f}") for m in models
        ]
        out.append([f"{series}, {horizon}", *cells])
    return markdown(["series, horizon", *models], out)


def forecasting_cost() -> str:
    """Means over series and horizons, relative to the dense map RLinear."""
    rows = [r for r in result("forecasting")["rows"] if r["model"] != "bank of one size"]
    base = {(r["series"], r["horizon"]): r for r in rows if r["model"] == "RLinear"}
    best = {key: min(r["mse"] for r in rows if (r["series"], r["horizon"]) == key) for key in base}
    out = []
    for model in dict.fromkeys(r["model"] for r in rows):
        mine = [r for r in rows if r["model"] == model]
        mean = lambda f: float(np.mean([f(r, base[r["series"], r["horizon"]]) for r in mine]))
        wins = sum(round(r["mse"], 3) <= round(best[r["series"], r["horizon"]], 3) for r in mine)
        out.append([
            model, f"{mean(lambda r, b: r['mse'] / b['mse']):.3f}", f"{mean(lambda r, b: r['mae'] / b['mae']):.3f}", f"{wins} of {len(mine)}",
            f"{mean(lambda r, b: r['multiply_adds'] / b['multiply_adds']):.2f}", f"{mean(lambda r, b: r['parameters'] / b['parameters']):.3f}",
            f"{mean(lambda r, b: r['seconds']):.1f}",
        ])  # fmt: skip
    return markdown(
        [
            "model",
            "squared error / RLinear's",
            "absolute error / RLinear's",
            "best of a row",
            "multiply-adds / RLinear's",
            "parameters / RLinear's",
            "seconds to fit",
        ],
        out,
    )


def forecasting_federated() -> str:
    """`isthmus compare forecast`: the house's sensors together, alone, pooled."""
    pm = lambda r, n: f"{r[n]:.3f} ± {r[n + '_std']:.3f}"
    rows = [
        [f"`{r['method']}`", pm(r, "loss_global"), pm(r, "loss_personal"), f"{100 * r['accuracy_personal']:.1f} %", size(r["bytes_up"]), size(r["bytes_down"])]
        for r in result("forecasting")["federated"]
    ]  # fmt: skip
    return markdown(["method", "error, global", "error, personal", "beats the naive forecast", "up", "down"], rows)


def regression() -> str:
    found = result("regression")["families"]
    names = list(next(iter(found.values()))["ratio"])
    show = lambda v: "none" if not np.isfinite(v["median"]) else f"{v['median']:.2g}"
    return markdown(["loud sources", *names], [[t, *(show(r["ratio"][n]) for n in names)] for t, r in found.items()])


def regression_more() -> str:
    found = result("regression")
    rows = [
        [f"all sources alike: error / least squares', {n}", f"{v['median']:.2f} ({v['low']:.2f} to {v['high']:.2f})"]
        for n, v in found["equal"].items()
    ]
    rows += [[f"95 % intervals that held, {n}", f"{100 * v:.1f} %"] for n, v in found["coverage"].items()]
    if "large" in found:
        r = found["large"]
        rows.append([f"n = {r['n']:,}, d = {r['d']}", f"{r['seconds']:.0f} s"])
    return markdown(["", "measured"], rows)


def load() -> str:
    """Seconds and memory of a coordinator by number of clients."""
    rows = [
        [f"{r['clients']:,}", f"{r['rounds']}", f"{r['seconds_a_round']:.2f}", f"{r['last_tenth_seconds'] / r['first_tenth_seconds']:.2f}",
         f"{r['growth_mb_a_round']:.2f}", f"{r['peak_mb'] / 1e3:.1f}"]
        for r in result("load")["rows"]
    ]  # fmt: skip
    head = ["clients", "rounds", "seconds a round", "last tenth / first tenth", "growth, MB a round", "peak, GB"]
    return markdown(head, rows)


def robust() -> str:
    """Accuracy by attack and rule."""
    rows = result("robust")["digits"]
    rules = list(dict.fromkeys(r["rule"] for r in rows))
    out = []
    for attack, share in dict.fromkeys((r["attack"], r["share"]) for r in rows):
        mine = {r["rule"]: r for r in rows if (r["attack"], r["share"]) == (attack, share)}
        name = attack if attack == "none" else f"{attack}, {share} %"
        out.append([name, *(f"{100 * mine[r]['accuracy'][0]:.1f} ± {100 * mine[r]['accuracy'][1]:.1f}" for r in rules)])
        if "fooled" in mine[rules[0]]:
            out.append([f"fooled, {share} %", *(f"{100 * mine[r]['fooled'][0]:.0f}" for r in rules)])
    return markdown(["attack", *(f"`{r}`" for r in rules)], out)


def robust_news() -> str:
    """MiniLM, in both spaces."""
    rows = [[f"`{r['rule']}`", r["space"], f"{100 * r['clean']:.1f}", f"{100 * r['attacked']:.1f}"] for r in result("robust")["news"]]
    return markdown(["rule", "space", "nobody hostile", "three of ten flip the sign"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "forecasting-federated": forecasting_federated, "load": load, "robust": robust, "robust-news": robust_news,
    "kmeans": kmeans, "kmeans-phases": kmeans_phases, "kmeans-bounds": kmeans_bounds, "certificate": certificate,
    "certificate-diagnostics": certificate_diagnostics, "forecasting": forecasting, "forecasting-cost": forecasting_cost,
    "regression": regression, "regression-more": regression_more,
}  # fmt: skip


def pictures() -> dict[str, str]:
    out: dict[str, str] = {}
    if found := result("kmeans"):
        flops, read = found["machine"]["float32 flop/s"], found["machine"]["read bytes/s"]
        with plots.figure() as (axes, svg):
            x = np.geomspace(0.25, 1024, 200)
            axes.plot(x, np.minimum(flops, x * read) / 1e9, color="#404040", label="limit: float32 multiply-adds, reading")
            for i, (shape, row) in enumerate(found["phases"].items()):
                n, d, k = (int(v) for v in shape.replace(" x ", " ").replace(", K = ", " ").split())
                flop, seconds = 2.0 * n * d * k, row["seconds"]
                axes.plot(k / 2, flop / seconds["assign"] / 1e9, "o", color=plots.COLOURS[i], label=f"assign, {shape}")
                if "assign, products in bfloat16" in seconds:
                    axes.plot(k / 2, flop / seconds["assign, products in bfloat16"] / 1e9, "^", color=plots.COLOURS[i])
                axes.plot(0.75, 3.0 * n * d / seconds["distances to own centres"] / 1e9, "s", color=plots.COLOURS[i], markersize=4)
            axes.set(
                xscale="log",
                yscale="log",
                xlabel="flop for each byte of the data",
                ylabel="GFLOP/s",
            )
            axes.plot([], [], "^", color="#404040", label="the same, products in bfloat16")
            axes.plot([], [], "s", color="#404040", markersize=4, label="distances to own centres")
            axes.legend(fontsize=7)
        out["kmeans_roofline"] = svg[0]
    if found := result("robust"):
        with plots.figure() as (axes, svg):
            for i, rule in enumerate(dict.fromkeys(r["rule"] for r in found["digits"])):
                clean = [r for r in found["digits"] if r["rule"] == rule and r["attack"] == "none"]
                mine = clean + [r for r in found["digits"] if r["rule"] == rule and r["attack"] == "sign flip x10"]
                axes.plot(
                    [r["share"] for r in mine],
                    [100 * r["accuracy"][0] for r in mine],
                    "o-",
                    color=plots.COLOURS[i],
                    markersize=4,
                    label=rule,
                )
            axes.set(xlabel="clients that flip the sign of ten times what they learned, %", ylabel="accuracy, %")
            axes.legend(fontsize=8)
        out["robust"] = svg[0]
    if found := result("certificate"):
        both = {f"{n}, {kind}": r for kind in ("frozen", "trained") for n, r in found[kind].items()}
        out["certificate_bars"] = plots.certificates(both)
        with plots.figure(height=3.0) as (axes, svg):
            noise = [r["noise"] for r in found["weight_noise"]]
            for i, (name, label) in enumerate((("readout", "the network's readout"), ("decoder", "k-NN in its last hidden layer"))):
                axes.plot(noise, [100 * r[name] for r in found["weight_noise"]], "o-", color=plots.COLOURS[i], markersize=3, label=label)
            axes.set(xlabel="noise on all weights, relative to their own size", ylabel="test error, %")
            axes.legend(fontsize=8)
        out["certificate_noise"] = svg[0]
    if found := result("forecasting"):
        with plots.figure(height=4.0) as (axes, svg):
            for i, (series, report) in enumerate(found["rank"].items()):
                best = min(report["test"])
                axes.plot(
                    report["rank"],
                    [e / best for e in report["test"]],
                    "o-",
                    markersize=2.5,
                    color=plots.COLOURS[i % len(plots.COLOURS)],
                    label=series,
                )
            axes.set(xscale="log", xlabel="rank", ylabel="test error / the best rank's (horizon 96)", ylim=(0.98, 2.0))
            axes.legend(fontsize=8)
        out["forecasting_rank"] = svg[0]
        with plots.figure(height=4.0) as (axes, svg):
            rows = [r for r in found["rows"] if r["horizon"] == 96]
            base = {r["series"]: r for r in rows if r["model"] == "RLinear"}
            for i, model in enumerate(dict.fromkeys(r["model"] for r in rows if r["model"] not in ("seasonal naive", "Linear", "NLinear"))):
                mine = [r for r in rows if r["model"] == model]
                if model == "bank of one size":
                    sizes: dict[int, list[dict]] = {}
                    for r in mine:
                        sizes.setdefault(r["rank"] * 1000 + r["size"][0], []).append(r)
                    groups = [g for g in sizes.values() if len(g) == len(base)]
                else:
                    groups = [mine]
                x = [float(np.mean([r["multiply_adds"] / base[r["series"]]["multiply_adds"] for r in g])) for g in groups]
                y = [float(np.mean([r["mse"] / base[r["series"]]["mse"] for r in g])) for g in groups]
                axes.plot(x, y, "." if model == "bank of one size" else "o", color=plots.COLOURS[i % len(plots.COLOURS)], label=model)
            axes.set(xscale="log", xlabel="multiply-adds / RLinear's (horizon 96)", ylabel="squared error / RLinear's")
            axes.legend(fontsize=7)
        out["forecasting_cost"] = svg[0]
    if (found := result("regression")) and "envelope" in found:
        with plots.figure() as (axes, svg):
            for i, name in enumerate(("least squares", "absolute deviations", "scale mixture")):
                points = sorted((r["rate"], r["worst"][name]) for r in found["envelope"])
                axes.plot(
                    [p[0] for p in points],
                    [p[1] for p in points],
                    "o",
                    color=plots.COLOURS[i],
                    markersize=4,
                    label=f"{name}, worst scale",
                )
            x = np.geomspace(min(r["rate"] for r in found["envelope"]), max(r["rate"] for r in found["envelope"]), 20)
            axes.plot(x, x, color="#404040", label="sqrt(n d) / m")
            axes.set(xscale="log", yscale="log", xlabel="sqrt(n d) / m", ylabel="error, worst of three loud scales")
            axes.legend(fontsize=8)
        out["regression_rate"] = svg[0]
    return out
