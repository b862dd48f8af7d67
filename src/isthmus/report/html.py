"""One self-contained HTML file for a run: tables, plots, recipe; no script, nothing loaded from elsewhere."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from ..core.checkpoint import write_atomic
from ..core.ledger import Ledger, total
from . import plots
from .progress import duration, size

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;max-width:62rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem;margin-bottom:.2rem}h2{font-size:1.15rem;margin-top:2rem;border-bottom:1px solid #ddd;padding-bottom:.2rem}
table{border-collapse:collapse;margin:.8rem 0}td,th{padding:.3rem .9rem;text-align:right;border-bottom:1px solid #e6e6e6}
td:first-child,th:first-child{text-align:left;padding-left:0}th{font-weight:600;color:#555}tr.own td{font-weight:600}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(26rem,1fr));gap:1rem}figure{margin:0}figcaption{color:#555;font-size:.88rem}
svg{width:100%;height:auto}pre{background:#f6f6f4;padding:.8rem;overflow:auto;font-size:.85rem}.note{color:#8a4b08}.quiet{color:#666}
"""


def page(title: str, body: str) -> str:
    """A whole document."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>{body}</body></html>"
    )


def table(head: list[str], rows: list[list[str]], own: int | None = None) -> str:
    """Cells are escaped; row ``own`` stands out."""
    cells = lambda tag, values: "".join(f"<{tag}>{html.escape(v)}</{tag}>" for v in values)  # noqa: E731
    body = "".join(f"<tr{' class=own' if i == own else ''}>{cells('td', r)}</tr>" for i, r in enumerate(rows))
    return f"<table><thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table>"


def figures(items: list[tuple[str, str | None]]) -> str:
    """Captions and SVGs in a grid."""
    shown = "".join(f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>" for caption, svg in items if svg)
    return f'<div class="grid">{shown}</div>'


def percent(value: float | None) -> str:
    """0.9637 as "96.4 %"."""
    return "–" if value is None else f"{100 * value:.1f} %"


def result_rows(document: dict[str, Any], lines: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """The method against its two reference lines: name, global, personal, up, down."""
    out = []
    for name, rows in lines.items():
        last: dict[str, Any] = next((r["evaluation"] for r in reversed(rows) if r["evaluation"]), {})
        score = lambda which, last=last: percent(last.get(which, {}).get("accuracy"))  # noqa: E731
        label = {"local": "local-only", "pooled": "pooled data"}.get(name, name)
        out.append([label, score("global"), score("personal"), size(total(rows, "up")), size(total(rows, "down"))])
    return out


def further(last: dict[str, Any]) -> list[str]:
    """A table of what else the task measures, if anything."""
    names = [n for n in dict.fromkeys([*last.get("global", {}), *last.get("personal", {})]) if n not in ("accuracy", "loss")]
    number = lambda which, n: "–" if n not in last.get(which, {}) else f"{last[which][n]:.3f}"  # noqa: E731
    return [table(["", "global", "personal"], [[n, number("global", n), number("personal", n)] for n in names])] if names else []


RESULT_HEAD = ["", "global accuracy", "personal accuracy", "bytes up", "bytes down"]


def lines_of(folder: Path, method: str) -> dict[str, list[dict[str, Any]]]:
    """Ledger rows of the method and of the reference lines, by name."""
    out = {method: Ledger(folder / "ledger.jsonl").rows()}
    for reference in sorted((folder / "reference").glob("*")):
        out[reference.name] = Ledger(reference / "ledger.jsonl").rows()
    return {n: rows for n, rows in out.items() if rows}


def write(folder: Path) -> Path:
    """``report.html`` from what the run folder holds.

    Raises:
        FileNotFoundError: the folder has no finished run.
    """
    document = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    dealt = json.loads((folder / "split.json").read_text(encoding="utf-8"))
    recipe = (folder / "recipe.toml").read_text(encoding="utf-8")
    lines = lines_of(folder, document["method"])
    ours = lines[document["method"]]
    last = next(r["evaluation"] for r in reversed(ours) if r["evaluation"])
    notes = list(dealt["notes"])
    missing = [f"round {r['round'] + 1}, client {c}: {why}" for r in ours for c, why in r["missing"].items()]
    body = [
        f"<h1>{html.escape(document['run_dir'].rstrip('/').rsplit('/', 1)[-1])}</h1>",
        f'<p class="quiet">{html.escape(document["method"])}, {document["rounds"]} rounds, seed {document["seeds"][0]}, {duration(document["seconds"])} minutes</p>',
        "<h2>Result</h2>",
        table(RESULT_HEAD, result_rows(document, lines), own=0),
        *further(last),
        '<p class="quiet">Global: the aggregated model on all clients’ test rows. Personal: each client with what it keeps, on its own test rows, '
        "mean over clients. Bytes are those of the packed messages, all clients and rounds. Local-only, global: mean over clients of each one’s model on all test rows.</p>",
        *(f'<p class="note">{html.escape(n)}</p>' for n in notes),
        "<h2>Learning</h2>",
        figures([
            ("Accuracy by round; dotted and dashed: the reference lines at their end.", plots.by_round(lines, "accuracy")),
            ("Loss by round.", plots.by_round(lines, "loss")),
            ("Accuracy against what travelled.", plots.bytes_against({document["method"]: ours}) if total(ours, "up") else None),
        ]),
        "<h2>Clients</h2>",
    ]  # fmt: skip
    local = lines.get("local")
    local_last = next((r["evaluation"]["clients"]["accuracy"] for r in reversed(local) if r["evaluation"]), None) if local else None
    one = document["method"] == "pooled"
    body.append(
        figures(
            [
                (
                    "What each client gains over training alone, on its own test rows.",
                    plots.gain(last["clients"]["accuracy"], local_last, dealt["clients"]) if local_last and not one else None,
                ),
                ("Training rows by label.", plots.split(dealt)),
            ]
        )  # fmt: skip
    )
    if not one:
        head = ["client", "training rows", "accuracy"] + (["local-only"] if local_last else [])
        shown = [
            [name, str(sum(rows)), percent(accuracy)] + ([percent(local_last[i])] if local_last else [])
            for i, (name, rows, accuracy) in enumerate(zip(dealt["clients"], dealt["rows"], last["clients"]["accuracy"], strict=True))
        ]
        body.append(table(head, shown[:50]))
        if len(shown) > 50:
            body.append(f'<p class="quiet">and {len(shown) - 50} more clients</p>')
    body.append("<h2>Diagnostics</h2>")
    body.append(
        figures(
            [
                (
                    "How far the mean of the products is from the product of the mean factors, relative.",
                    plots.metric(ours, "aggregation_error", "aggregation error"),
                ),
                ("Dispersion of the clients’ updates around their mean.", plots.metric(ours, "dispersion", "dispersion")),
                ("How much a round of local work changes each role’s update, relative.", plots.roles(ours, "change", "change")),
                ("How far the clients’ updates of each role are apart after it.", plots.roles(ours, "dispersion", "dispersion")),
            ]
        )  # fmt: skip
    )
    if missing:
        body.append(f"<h2>Missing</h2><p>{'<br>'.join(html.escape(m) for m in missing[:200])}</p>")
    body.append(f"<h2>Recipe</h2><pre>{html.escape(recipe)}</pre>")
    write_atomic(folder / "report.html", page(f"Isthmus: {folder.name}", "".join(body)).encode())
    return folder / "report.html"
