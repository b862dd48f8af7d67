"""A run: a recipe becomes a folder with a ledger, checkpoints, an adapter and a report, and can go on after any interruption."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w
import torch

from .adapters import export
from .adapters.host import Host
from .adapters.lora import Lora
from .core import checkpoint
from .core.batches import Batches
from .core.ledger import Ledger, total
from .core.recipe import Recipe, RecipeError, build, method_options, parse
from .core.rounds import Finished, Limits, RunError, server_round, server_start
from .core.tensors import Tensors, prefixed, under
from .core.types import Method, Server
from .engines.evaluate import Evaluation
from .engines.simulator import Faults, Simulator
from .federated.fedavg import plain
from .parts.factors import roles_of
from .parts.work import LocalTraining
from .tasks.build import make_task

REFERENCES = ("local", "pooled")


class Callback:
    """What wants to know how a run goes; override what you need."""

    def begin(self, line: str, recipe: Recipe, start: int) -> None:
        """A line ("fedavg", or a reference line) starts at round ``start``."""

    def round(self, line: str, row: dict[str, Any]) -> None:
        """A round is in the ledger; ``row`` is its line."""

    def end(self, line: str) -> None:
        """The line has all its rounds."""


@dataclass
class Line:
    """One trained line of a run: its ledger rows, and what it ended with."""

    method: Method
    engine: Any
    server: Server
    rows: list[dict[str, Any]]
    ending: dict[str, Any] = field(default_factory=dict)  # the evaluation at an end between two that were due

    @property
    def last(self) -> dict[str, Any]:
        """The evaluation after the last round."""
        return dict(self.ending or self.rows[-1]["evaluation"])


@dataclass
class Result:
    """What `run` gives back; ``document`` is what ``--json`` prints."""

    recipe: Recipe
    folder: Path
    line: Line
    task: Any
    document: dict[str, Any]
    references: dict[str, Line] = field(default_factory=dict)


def make_method(recipe: Recipe) -> Method:
    """The recipe's method: plain FedAvg under [train], changed by each part of ``method.kind`` in turn, with its channels.

    Raises:
        RecipeError, CompositionError: parts that do not exist or do not fit together.
    """
    train = recipe.train
    work = LocalTraining(train.optimiser, train.lr, train.momentum, train.weight_decay, clip=train.clip)
    method = plain(work, recipe.participation)
    for kind in recipe.method.kind.split("+"):
        method = build("methods", kind, method_options(recipe, kind), f"method.{kind}", skip=1)(method)
        if not isinstance(method, Method):
            raise RecipeError(f"method {kind!r} gave {type(method).__name__} instead of a Method")
    channels = tuple(build("channels", c.kind, c.options, f"channels.{i}")() for i, c in enumerate(recipe.channels))
    taken = frozenset().union(*(c.takes for c in channels))
    # what is only looked at for the ledger gives way to what must not be seen
    observers = tuple(o for o in method.observers if not o.needs & taken)
    return replace(method, name=recipe.method.kind, channels=(*method.channels, *channels), observers=observers)


def make_engine(recipe: Recipe, method: Method, task: Any) -> Simulator:
    """The recipe's simulator."""
    e = recipe.engine
    faults = Faults(e.dropout, e.deadline, e.step_seconds, e.spread, e.bandwidth)
    batches = Batches(recipe.train.size, recipe.train.epochs, recipe.train.steps)
    return Simulator(method, task, recipe.seed, batches, e.way, e.chunk, faults, Limits(e.weight, e.entry), e.quorum)


def _evaluation(found: Evaluation) -> dict[str, Any]:
    out = {"global": found.overall, "personal": found.personal, "clients": found.clients}
    out |= {"bytes": found.bytes} if found.bytes else {}
    return out | ({"tuned": found.tuned} if found.tuned else {}) | ({"roles": found.roles} if found.roles else {})


def _freeze(server: Server) -> dict[str, Any]:
    return {
        "round": server.round,
        "seen": list(server.seen),
        "versions": dict(server.versions),
        "published": sorted(server.published),
        "seed": server.seed,
    }


def _thaw(meta: dict[str, Any], tensors: Tensors) -> Server:
    return Server(
        under(tensors, "shared/"),
        under(tensors, "state/"),
        int(meta["round"]),
        tuple(meta["seen"]),
        dict(meta["versions"]),
        frozenset(meta["published"]),
        int(meta["seed"]),
    )


def train(
    recipe: Recipe,
    task: Any,
    folder: Path,
    name: str,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    engine: Any = None,
) -> Line:
    """All rounds of one method on one task, a checkpoint after each.

    With ``resume`` it goes on from the newest readable checkpoint in ``folder``, and ends bit for bit where an uninterrupted run does.
    ``engine`` is the recipe's simulator unless it is given.
    """
    method = make_method(recipe) if engine is None else engine.method
    if method.pooled:
        # the same number of passes over all data, at one client
        task = task.pooled()
    engine = engine or make_engine(recipe, method, task)
    server = server_start(method, task, recipe.seed)
    ledger, checkpoints = Ledger(folder / "ledger.jsonl"), folder / "checkpoints"
    if resume:
        found, problems = checkpoint.latest(checkpoints)
        for problem in problems:
            print(f"resume: {problem}; going on from an older one", file=sys.stderr)
        if found is not None:
            _, tensors, meta = found
            server = _thaw(meta, tensors)
            engine.restore(under(tensors, "memory/"))
    ledger.cut(server.round)
    for c in callbacks:
        c.begin(name, recipe, server.round)
    ending: dict[str, Any] = {}
    while server.round < recipe.rounds:
        started = time.perf_counter()
        try:
            server, record = server_round(method, task, server, engine)
        except Finished as over:
            print(f"after {server.round} rounds: {over}", file=sys.stderr)
            done = ledger.rows()
            if not done:
                raise RunError(f"the run was over before its first round: {over}") from None
            if not done[-1]["evaluation"]:
                at_end = engine.evaluate(server, True)
                ending = _evaluation(at_end) if at_end else {}
            break
        last = server.round == recipe.rounds
        due = last or server.round % recipe.evaluate.every == 0
        analyse = {"analyse": roles_of} if recipe.evaluate.products else {}
        found_now = engine.evaluate(server, last, recipe.evaluate.tuned, **analyse) if due else None
        tensors = prefixed(server.shared, "shared/") | prefixed(server.state, "state/") | prefixed(engine.state(), "memory/")
        row = ledger.append(record, _evaluation(found_now) if found_now else {}, time.perf_counter() - started)
        checkpoint.save(checkpoints, server.round, tensors, _freeze(server))
        for c in callbacks:
            c.round(name, row)
    for c in callbacks:
        c.end(name)
    return Line(method, engine, server, ledger.rows(), ending)


def new_folder(recipe: Recipe, runs: Path) -> Path:
    """A fresh folder below ``runs``: ``newsroom-001``, ``newsroom-002``, ..."""
    runs.mkdir(parents=True, exist_ok=True)
    for i in range(1, 100_000):
        folder = runs / f"{recipe.name}-{i:03d}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise RecipeError(f"{runs} is full of runs of {recipe.name}")


def run(
    recipe: Recipe,
    folder: Path | None = None,
    root: Path | None = None,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    runs: Path = Path("runs"),
    task: Any = None,
    engine: Any = None,
) -> Result:
    """Run a recipe and its reference lines, and write the run folder.

    Args:
        recipe: what to run.
        folder: where; a new one below ``runs`` by default.
        root: where relative data paths start from, beside here and ``$ISTHMUS_DATA``.
        callbacks: progress, loggers.
        resume: go on in ``folder``.
        task: the recipe's task, where it is loaded already.
        engine: of the recipe's own line; its simulator by default.

    Raises:
        RecipeError, DataError, ModelError, CompositionError, RunError, CheckpointError: naming what is wrong.
    """
    if recipe.engine.threads:
        torch.set_num_threads(recipe.engine.threads)
    started = time.perf_counter()
    make_method(recipe)  # a method that does not fit fails before anything is loaded
    task = make_task(recipe, root) if task is None else task
    folder = folder or new_folder(recipe, runs)
    checkpoint.write_atomic(folder / "recipe.toml", tomli_w.dumps(recipe.table()).encode())
    line = train(recipe, task, folder, recipe.method.kind, callbacks, resume, engine)
    references: dict[str, Line] = {}
    if recipe.evaluate.references:
        for name in REFERENCES:
            if name == recipe.method.kind or (name == "pooled" and task.private):
                continue
            other = recipe.updated(
                {"method.kind": name, "channels": [], "participation": 1.0, "engine.dropout": 0.0, "evaluate.every": recipe.rounds}
                | {"evaluate.tuned": False, "evaluate.products": False}
            )
            references[name] = train(other, task, folder / "reference" / name, name, callbacks, resume)
    document = summary(recipe, folder, line, references) | {"seconds": round(time.perf_counter() - started, 2)}
    result = Result(recipe, folder, line, task, document, references)
    if isinstance(getattr(task, "host", None), Host) and all(isinstance(a, Lora) for a in task.host.adapters) and not task.private:
        export_adapter(result, folder / "adapter")
    if hasattr(task, "write"):
        task.write(folder, line.engine.global_params(line.server))
    checkpoint.write_atomic(folder / "split.json", json.dumps(split_table(task)).encode())
    checkpoint.write_atomic(folder / "result.json", json.dumps(document, indent=1).encode())
    return result


def split_table(task: Any) -> dict[str, Any]:
    """How many training rows of each label each client has."""
    labels = task.data.label if hasattr(task, "data") else task.y
    if labels.dim() > 1:  # targets that are no labels
        labels = torch.zeros(len(labels), dtype=torch.long)
    count = max(int(labels.max()) + 1 if len(labels) else 0, len(task.label_names))
    rows = [torch.bincount(labels[task.rows(c, "train")], minlength=count).tolist() for c in range(task.clients)]
    return {
        "labels": list(task.label_names) or [str(i) for i in range(count)],
        "clients": list(task.client_names) or [f"client {c}" for c in range(task.clients)],
        "rows": rows,
        "notes": list(task.notes),
    }


def summary(recipe: Recipe, folder: Path, line: Line, references: dict[str, Line]) -> dict[str, Any]:
    """The ``--json`` document of a run, without its seconds."""

    def metric(of: Line | None, which: str, name: str) -> float | None:
        value = None if of is None else of.last.get(which, {}).get(name)
        return None if value is None else round(float(value), 6)

    local, pooled = references.get("local"), references.get("pooled")
    further = {
        f"{n}_{w}": metric(line, w, n) for w in ("global", "personal") for n in line.last.get(w, {}) if n not in ("accuracy", "loss")
    }
    told = line.rows[-1]["metrics"]
    further |= {n: told[n] for o in line.method.observers for n in o.headlines if n in told}
    return {
        "method": recipe.method.kind,
        "task": recipe.task.kind,
        "rounds": recipe.rounds,
        "seeds": [recipe.seed],
        "accuracy_global": metric(line, "global", "accuracy"),
        "accuracy_personal": metric(line, "personal", "accuracy"),
        "accuracy_local_only": metric(local, "personal", "accuracy"),
        "accuracy_local_only_global": metric(local, "global", "accuracy"),
        "accuracy_pooled": metric(pooled, "global", "accuracy"),
        "loss_global": metric(line, "global", "loss"),
        "loss_personal": metric(line, "personal", "loss"),
        "loss_local_only": metric(local, "personal", "loss"),
        "loss_pooled": metric(pooled, "global", "loss"),
        **further,
        "further": list(further),
        "accuracy_tuned": metric(line, "tuned", "accuracy"),
        "loss_tuned": metric(line, "tuned", "loss"),
        "bytes_up": total(line.rows, "up"),
        "bytes_down": total(line.rows, "down"),
        "payload_bytes_up": total(line.rows, "up", wire=False),
        "payload_bytes_down": total(line.rows, "down", wire=False),
        "run_dir": str(folder),
    }


def about(recipe: Recipe, task: Any) -> dict[str, Any]:
    """What is written beside an exported adapter."""
    return {
        "base_model": recipe.model.path,
        "task": recipe.task.kind,
        "pooling": recipe.model.pooling,
        "labels": list(task.label_names),
        "max_length": recipe.model.max_length,
        "run": recipe.name,
    }


def export_adapter(result: Result, folder: Path, client: int | None = None, merge: bool = False) -> Path:
    """The aggregated model's adapter, or one client's, in peft's format; or, with ``merge``, the whole model with the update in it."""
    engine, server = result.line.engine, result.line.server
    params = engine.global_params(server) if client is None else engine.personal_params(server, client)
    write = export.merge if merge else export.save
    return write(folder, result.task.host, params, about(result.recipe, result.task))


def reopen(folder: Path) -> Result:
    """A finished or interrupted run from its folder, as it stands at its last checkpoint.

    Raises:
        RecipeError: no run folder.
        CheckpointError: no readable checkpoint.
    """
    import tomllib

    try:
        recipe = parse(tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8")), "recipe.toml")
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"{folder} is not a run folder: {error}") from None
    found, problems = checkpoint.latest(folder / "checkpoints")
    if found is None:
        raise checkpoint.CheckpointError(f"{folder} has no readable checkpoint" + (f" ({problems[0]})" if problems else ""))
    method, task = make_method(recipe), make_task(recipe, folder)
    task = task.pooled() if method.pooled else task
    engine = make_engine(recipe, method, task)
    _, tensors, meta = found
    if memory := under(tensors, "memory/"):  # of a deployment, it lies with the clients
        engine.restore(memory)
    line = Line(method, engine, _thaw(meta, tensors), Ledger(folder / "ledger.jsonl").rows())
    document = json.loads((folder / "result.json").read_text()) if (folder / "result.json").exists() else {}
    return Result(recipe, folder, line, task, document)


def bytes_to(rows: list[dict[str, Any]], which: str, target: float) -> int | None:
    """Bytes up and down over all clients until the accuracy ("global" or "personal") first reaches ``target``; None if never."""
    spent = 0
    for row in rows:
        spent += sum(size[1] for way in ("up", "down") for size in row[way].values())
        if row["evaluation"] and row["evaluation"][which].get("accuracy", -1.0) >= target:
            return spent
    return None
