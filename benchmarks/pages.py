"""Writes what was measured into README and documentation: tables between markers, pictures into docs/img.

    python benchmarks/pages.py

A page says ``<!-- table NAME: columns; methods -->`` (both lists may be left out) or ``<!-- primitive NAME -->``, and ``<!-- end -->`` after
it; what stands between is written from results/.  A test holds pages and results together.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import beyond_pages
import primitive_pages

from isthmus.core import recipe
from isthmus.report import plots
from isthmus.report.progress import size

ROOT = Path(__file__).resolve().parents[1]
RESULTS, IMAGES = ROOT / "results", ROOT / "docs" / "img"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKER = re.compile(r"(<!-- (table|grid|speed|fields|primitive)([^>]*?) -->\n).*?(<!-- end -->)", re.S)


def plus(row: dict, name: str) -> str:
    if row.get(name) is None:
        return "–"
    return f"{100 * row[name]:.1f} ± {100 * row[f'{name}_std']:.1f}"


def perplexity(row: dict, which: str) -> str:
    value = row[f"loss_{which}"]
    return "–" if value is None else f"{math.exp(value):.2f}"


def amount(value: float | None) -> str:
    return "–" if value is None else size(value)


COLUMNS = {
    "global": ("global", lambda r, s: plus(r, "accuracy_global")),
    "personal": ("personal", lambda r, s: plus(r, "accuracy_personal")),
    "tuned": ("after local work", lambda r, s: plus(r, "accuracy_tuned")),
    "perplexity": ("perplexity, global", lambda r, s: perplexity(r, "global")),
    "own": ("perplexity, personal", lambda r, s: perplexity(r, "personal")),
    "up": ("up", lambda r, s: size(r["bytes_up"])),
    "down": ("down", lambda r, s: size(r["bytes_down"])),
    "target": ("to global target", lambda r, s: amount(r["bytes_to_target"])),
    "private": ("to personal target", lambda r, s: amount(r["bytes_to_personal"])),
    "rate": ("learning rate", lambda r, s: ", ".join(f"{v:g}" for n, v in s.items() if n.endswith("lr"))),
}
USUAL = ("global", "personal", "up", "down", "target", "private", "rate")


def table(name: str, columns: list[str], methods: list[str]) -> str:
    """One table of results/adapters.json as Markdown."""
    found = json.loads((RESULTS / "adapters.json").read_text())["tables"][name]
    chosen = [COLUMNS[c] for c in columns or USUAL]
    lines = ["| method | " + " | ".join(title for title, _ in chosen) + " |", "| --- |" + " --- |" * len(chosen)]
    for row in found["rows"]:
        if not methods or row["method"] in methods:
            cells = [value(row, found["settings"][row["method"]]) for _, value in chosen]
            lines.append(f"| `{row['method']}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def grid(names: list[str], columns: list[str]) -> str:
    """Several tables of results/adapters.json side by side, rows that all of them have, and bytes of the first."""
    tables = json.loads((RESULTS / "adapters.json").read_text())["tables"]
    rows = [{r["method"]: r for r in tables[n]["rows"]} for n in names]
    heads = [f"{tables[n]['title']}, {c}" for n in names for c in columns]
    lines = ["| method | " + " | ".join(heads) + " | up | down |", "| --- |" + " --- |" * (len(heads) + 2)]
    for method, first in rows[0].items():
        if all(method in r for r in rows):
            cells = [plus(r[method], f"accuracy_{c}") for r in rows for c in columns]
            lines.append(f"| `{method}` | " + " | ".join(cells) + f" | {size(first['bytes_up'])} | {size(first['bytes_down'])} |")
    return "\n".join(lines) + "\n"


def speed() -> str:
    """results/simulator.json as Markdown."""
    found = json.loads((RESULTS / "simulator.json").read_text())
    x = lambda value: "–" if value is None else f"{value:.2g} x" if value < 10 else f"{value:.0f} x"
    rows = [("work", "Flower 1.42", "pfl-research 0.6", "plain loop")]
    for title, part in found["minilm"].items():
        r = part["ratios"]
        rows.append((f"MiniLM LoRA, {title}, fp32", x(r["fp32 over Flower"]), "", x(r["fp32 over peft loop"]) + " (peft)"))
        rows.append((f"MiniLM LoRA, {title}, bf16", x(r["bf16 over Flower"]), "", x(r["bf16 over peft loop"]) + " (peft)"))
    for title, part in found["small"].items():
        r = part["ratios"]
        rows.append((f"small network, {title}", x(r["over Flower"]), x(r["over pfl-research"]), x(r["over plain loop"])))
    return "\n".join("| " + " | ".join(row) + " |" + ("\n| --- | --- | --- | --- |" if not i else "") for i, row in enumerate(rows)) + "\n"


def fields() -> str:
    """Every field of a recipe."""
    lines = ["| field | accepted | default | meaning |", "| --- | --- | --- | --- |"]
    for name, accepted, default, meaning in recipe.fields():
        lines.append(f"| `{name}` | {accepted} | {default if default in ('', 'required') else f'`{default}`'} | {meaning} |")
    return "\n".join(lines) + "\n"


def filled(text: str) -> str:
    """A page with everything between markers as results/ has it."""

    def replace(match: re.Match) -> str:
        head, kind, rest, end = match.groups()
        if kind in ("speed", "fields"):
            return head + (speed() if kind == "speed" else fields()) + end
        if kind == "primitive":
            return head + (primitive_pages.TABLES | beyond_pages.TABLES)[rest.strip()]() + end
        name, _, options = rest.strip().partition(":")
        columns, _, methods = options.partition(";")
        split = lambda text: [x.strip() for x in text.split(",") if x.strip()]
        if kind == "grid":
            return head + grid(split(columns), split(name)) + end
        return head + table(name, split(columns), split(methods)) + end

    return MARKER.sub(replace, text)


def pictures() -> dict[str, str]:
    """Every picture of the documentation, by file name."""
    tables = json.loads((RESULTS / "adapters.json").read_text())["tables"]
    found = json.loads((RESULTS / "diagnostics.json").read_text()) if (RESULTS / "diagnostics.json").exists() else {}
    out: dict[str, str | None] = {}

    def some(name: str, *methods: str) -> list[dict]:
        return [r for r in tables.get(name, {"rows": []})["rows"] if r["method"] in methods]

    personal = ("accuracy_personal", "accuracy (personal)", "bytes")
    out["fedlova_bytes"] = plots.curves(
        some("bbc-0.1", "fedavg", "ffa_lora", "fedsa_lora", "flora", "flexlora", "fedlova", "query_only:fedlova"), *personal
    )
    out["frank_lora_rounds"] = plots.curves(
        some("mixed", *(r["method"] for r in tables.get("mixed", {"rows": []})["rows"])), "accuracy_global", "accuracy (global)"
    )
    out["flora_chef_bytes"] = plots.curves(
        some("bbc-0.1", "fedavg", "ffa_lora", "rolora", "fedsa_lora", "fedex_lora", "flsauce", "flora_chef"),
        "accuracy_global",
        "accuracy (global)",
        "bytes",
    )
    out["fedibs_bytes"] = plots.curves(some("biases", *(r["method"] for r in tables.get("biases", {"rows": []})["rows"])), *personal)
    out["fedrecall_rounds"] = plots.curves(
        some("tasks", "fedavg", "fedavg+fedrecall", "flexlora", "flexlora+fedrecall", "fedlova", "fedlova+fedrecall"),
        "accuracy_personal",
        "accuracy (personal)",
    )
    if "roles" in found:
        for name in ("change", "dispersion"):
            series = {k: v for k, v in found["roles"]["fedavg, bbc"].items() if k.startswith(name)}
            out[f"fedlova_{name}"] = lines({k.partition(" ")[2]: v for k, v in series.items()}, "round", name)
    if "snr" in found:
        points = found["snr"]["points"]
        with plots.figure() as (axes, svg):
            for i, n in enumerate(sorted({p["n"] for p in points})):
                mine = [p for p in points if p["n"] == n]
                axes.plot([p["r"] for p in mine], [p["theory"] for p in mine], color=plots.COLOURS[i], label=f"r / (n + 1), n = {n}")
                axes.plot([p["r"] for p in mine], [p["measured"] for p in mine], "o", color=plots.COLOURS[i], label=f"measured, n = {n}")
            axes.set(xlabel="rank r", ylabel="signal to noise", xscale="log", yscale="log")
            axes.legend(fontsize=8)
        out["frank_lora_snr"] = svg[0]
    if "turns" in found:
        both = {f"{f}, {rule}": found["turns"][rule][f"dispersion_{f.lower()}"] for rule in ("lowest", "alternate") for f in ("A", "B")}
        out["flora_chef_dispersion"] = lines(both, "round", "dispersion of the clients' updates")
    if "masks" in found:
        labels = {"fraction": "personal share", "overlap": "overlap of two clients (Jaccard)", "chance": "overlap by chance"}
        out["fedibs_masks"] = lines({labels[n]: v for n, v in found["masks"].items()}, "round", "")
    if "recall" in found:
        share = found["recall"]["retention_by_rank_of_strength"]
        out["fedrecall_retention"] = lines({"share that came back": share}, "direction, strongest first", "retention")
    return {n: svg for n, svg in out.items() if svg} | primitive_pages.pictures() | beyond_pages.pictures()


def lines(series: dict[str, list[float]], x: str, y: str) -> str:
    with plots.figure(height=3.2) as (axes, svg):
        for i, (label, values) in enumerate(series.items()):
            axes.plot(range(1, len(values) + 1), values, color=plots.COLOURS[i], marker="o", markersize=3, label=label)
        axes.set(xlabel=x, ylabel=y)
        axes.legend(fontsize=8)
    return svg[0]


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for name, svg in pictures().items():
        (IMAGES / f"{name}.svg").write_text(svg)
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
