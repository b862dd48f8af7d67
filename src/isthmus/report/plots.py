"""Figures as SVG text, from what a run folder holds."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

COLOURS = ["#1b6ca8", "#d1603d", "#3d8f63", "#8a5fa8", "#b8912f", "#5b6770", "#c2557f", "#2b9aa0"]
REFERENCE = {"local": "#8c8c8c", "pooled": "#404040"}


@contextmanager
def figure(width: float = 6.4, height: float = 3.6) -> Iterator[tuple[Axes, list[str]]]:
    """Axes to draw on; afterwards the list holds one SVG document without the XML preamble."""
    style: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": "isthmus", "font.family": "sans-serif", "font.size": 10, "axes.spines.top": False,
        "axes.spines.right": False, "axes.grid": True, "grid.color": "#e4e4e4", "axes.axisbelow": True, "legend.frameon": False,
    }  # fmt: skip
    out: list[str] = []
    with plt.rc_context(style):
        made, axes = plt.subplots(figsize=(width, height), layout="constrained")
        yield axes, out
        buffer = io.StringIO()
        made.savefig(buffer, format="svg", metadata={"Date": None})
        plt.close(made)
    svg = buffer.getvalue()
    out.append(svg[svg.index("<svg") :])


def _curve(rows: list[dict[str, Any]], which: str, name: str) -> tuple[list[int], list[float]]:
    points = [(r["round"] + 1, r["evaluation"][which][name]) for r in rows if r["evaluation"].get(which, {}).get(name) is not None]
    return [p[0] for p in points], [p[1] for p in points]


def by_round(lines: dict[str, list[dict[str, Any]]], name: str) -> str:
    """``accuracy`` or ``loss`` of every line by round: the aggregated model and the clients' mean."""
    with figure() as (axes, out):
        for i, (label, rows) in enumerate(lines.items()):
            colour = REFERENCE.get(label, COLOURS[i % len(COLOURS)])
            if label in REFERENCE:
                which = "personal" if label == "local" else "global"
                x, y = _curve(rows, which, name)
                if y:
                    axes.axhline(y[-1], color=colour, linestyle=":" if label == "local" else "--", label=f"{label} ({which}, last)")
                continue
            for which, dash in (("global", "-"), ("personal", (0, (4, 2)))):
                x, y = _curve(rows, which, name)
                axes.plot(x, y, color=colour, linestyle=dash, marker="o", markersize=3, label=f"{label} ({which})")
        axes.set(xlabel="round", ylabel=name)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(fontsize=8)
    return out[0]


def gain(ours: list[float], local: list[float], names: list[str]) -> str:
    """What each client gains over training alone, in points of accuracy on its own test rows."""
    with figure(height=max(2.4, 0.32 * len(names) + 1)) as (axes, out):
        points = [100 * (a - b) for a, b in zip(ours, local, strict=True)]
        axes.barh(range(len(names)), points, color=[COLOURS[2] if p >= 0 else COLOURS[1] for p in points])
        axes.axvline(0, color="#404040", linewidth=0.8)
        axes.set(yticks=range(len(names)), yticklabels=names, xlabel="gain over local-only, points of accuracy")
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
    return out[0]


def bytes_against(lines: dict[str, list[dict[str, Any]]], name: str = "accuracy") -> str:
    """Accuracy of the aggregated model against the bytes that all clients have sent and received."""
    with figure() as (axes, out):
        for i, (label, rows) in enumerate(lines.items()):
            spent, x, y = 0, [], []
            for r in rows:
                spent += sum(s[1] for way in ("up", "down") for s in r[way].values())
                value = r["evaluation"].get("global", {}).get(name)
                if value is not None and spent:
                    x.append(spent / 1e6)
                    y.append(value)
            if x:
                axes.plot(x, y, color=COLOURS[i % len(COLOURS)], marker="o", markersize=3, label=label)
        axes.set(xlabel="MB on the wire, all clients, up and down", ylabel=f"{name} (global)")
        axes.legend(fontsize=8)
    return out[0]


def split(table: dict[str, Any]) -> str:
    """How many training rows of which label each client has."""
    clients, rows = table["clients"], table["rows"]
    with figure(height=max(2.4, 0.32 * len(clients) + 1.2)) as (axes, out):
        left = [0] * len(clients)
        many = len(table["labels"]) > 12
        for i, label in enumerate(table["labels"]):
            counts = [r[i] for r in rows]
            colour = plt.get_cmap("viridis")(i / max(1, len(table["labels"]) - 1)) if many else COLOURS[i % len(COLOURS)]
            axes.barh(
                range(len(clients)),
                counts,
                left=left,
                color=colour,
                label=None if many else label,
                hatch="//" if i >= len(COLOURS) and not many else None,
            )
            left = [a + b for a, b in zip(left, counts, strict=True)]
        axes.set(
            yticks=range(len(clients)),
            yticklabels=clients,
            xlabel="training rows" + (f", {len(table['labels'])} labels by colour" if many else ""),
        )
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        if not many and len(table["labels"]) > 1:
            axes.legend(fontsize=8, ncols=2)
    return out[0]


def compare(rows: list[dict[str, Any]]) -> str:
    """Accuracy of every method, mean and spread over seeds: the aggregated model and the clients' mean."""
    with figure(height=max(2.6, 0.42 * len(rows) + 1)) as (axes, out):
        at = range(len(rows))
        for shift, which, colour in ((-0.17, "accuracy_global", COLOURS[0]), (0.17, "accuracy_personal", COLOURS[1])):
            values = [100 * (r[which] or 0) for r in rows]
            spread = [100 * (r[f"{which}_std"] or 0) for r in rows]
            label = which.removeprefix("accuracy_")
            axes.errorbar(values, [i + shift for i in at], xerr=spread, fmt="o", color=colour, markersize=5, capsize=3, label=label)
        axes.set(yticks=list(at), yticklabels=[r["method"] for r in rows], xlabel="accuracy, %")
        axes.invert_yaxis()
        axes.legend(fontsize=8)
    return out[0]


def curves(rows: list[dict[str, Any]], name: str, label: str, over: str = "round") -> str | None:
    """A number of every method of a comparison, mean over seeds, by "round" or against the "bytes" spent; None where there is none."""
    shown = [(r["method"], [p for p in r["curve"] if name in p and (over == "round" or p["bytes"])]) for r in rows]
    if not any(points for _, points in shown):
        return None
    with figure(height=4.2) as (axes, out):
        for i, (method, points) in enumerate((m, p) for m, p in shown if p):
            style: dict[str, Any] = {"linestyle": "-" if i < len(COLOURS) else "--", "marker": "o", "markersize": 3}
            x = [p[over] / (1e6 if over == "bytes" else 1) for p in points]
            axes.plot(x, [p[name] for p in points], color=COLOURS[i % len(COLOURS)], label=method, **style)
        axes.set(xlabel="round" if over == "round" else "MB on the wire, all clients, up and down", ylabel=label)
        if over == "bytes":
            axes.set_xscale("log")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(fontsize=7, ncols=2)
    return out[0]


def roles(points: list[dict[str, Any]], name: str, label: str) -> str | None:
    """``change`` or ``dispersion`` of the update of each role by round, from ledger rows; None where no round has it."""
    found = {role for r in points for role in (r["evaluation"] or {}).get("roles", {})}
    if not found:
        return None
    with figure(height=2.8) as (axes, out):
        for i, role in enumerate(sorted(found)):
            some = [
                (r["round"] + 1, r["evaluation"]["roles"][role][name]) for r in points if role in (r["evaluation"] or {}).get("roles", {})
            ]
            axes.plot([p[0] for p in some], [p[1] for p in some], color=COLOURS[i], marker="o", markersize=3, label=role)
        axes.set(xlabel="round", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(fontsize=8)
    return out[0]


def metric(rows: list[dict[str, Any]], name: str, label: str) -> str | None:
    """A training metric of the ledger by round, or None where no round has it."""
    points = [(r["round"] + 1, r["metrics"][name]) for r in rows if name in r["metrics"]]
    if not points:
        return None
    with figure(height=2.8) as (axes, out):
        axes.plot([p[0] for p in points], [p[1] for p in points], color=COLOURS[3], marker="o", markersize=3)
        axes.set(xlabel="round", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return out[0]


def certificates(found: dict[str, dict[str, Any]]) -> str:
    """Bars of three terms for each name: what was measured (full) and what the confidence adds (pale), and the test error as a mark.

    ``found``: name to a certificate's document with ``decoder``, ``agreement``, ``stability`` (each ``measured`` and ``upper``), ``bound``, and
    ``test_error`` where it is known.
    """
    names = list(found)
    with figure(height=max(2.2, 0.42 * len(names) + 1.2)) as (axes, out):
        left = [0.0] * len(names)
        for i, term in enumerate(("decoder", "agreement", "stability")):
            for part, alpha in (("measured", 1.0), ("upper", 0.35)):
                wide = [
                    100
                    * (found[n][term]["measured"] if part == "measured" else max(0.0, found[n][term]["upper"] - found[n][term]["measured"]))
                    for n in names
                ]
                label = {
                    "decoder": "k-NN decoder error",
                    "agreement": "decoder and network differ",
                    "stability": "retrained network differs",
                }
                axes.barh(range(len(names)), wide, left=left, color=COLOURS[i], alpha=alpha, label=label[term] if alpha == 1.0 else None)
                left = [a + b for a, b in zip(left, wide, strict=True)]
        for i, n in enumerate(names):
            if found[n].get("test_error") is not None:
                axes.plot(
                    [100 * found[n]["test_error"]] * 2,
                    [i - 0.4, i + 0.4],
                    color="#202020",
                    linewidth=2,
                    label="test error" if i == 0 else None,
                )
        axes.set(
            yticks=range(len(names)),
            yticklabels=names,
            xlabel="error, % (pale: what the confidence adds)",
            xlim=(0, min(100, max(left) * 1.05)),
        )
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.legend(fontsize=8)
    return out[0]
