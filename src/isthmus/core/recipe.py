"""Recipes: a TOML file that names everything a run is made of, checked before anything is loaded."""

from __future__ import annotations

import difflib
import inspect
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from . import registry


class RecipeError(ValueError):
    """A recipe that cannot run: names the field, the value and what is accepted."""


class Section(BaseModel):
    """A table of a recipe; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Open(BaseModel):
    """A table with a ``kind`` whose other keys belong to that part, which checks them."""

    model_config = ConfigDict(extra="allow", frozen=True)
    kind: str

    @property
    def options(self) -> dict[str, Any]:
        """The keys beside ``kind``."""
        return dict(self.model_extra or {})


class Task(Open):
    """What is learned: "classification", "language", "digits", "pairs", "forecast", or a registered one."""

    kind: str = "classification"


class AdapterTable(Open):
    """Which tensors of the model train."""

    kind: str = "lora"


class MethodTable(Open):
    """The federated method: one name, or several joined by "+", each changing what stands before it."""

    kind: str = "fedavg"


class Data(Section):
    """Where rows come from."""

    source: str | list[str] = Field("bbc", description="a packaged set, a file or a folder; several: a list")
    text: str = Field("text", description="column")
    label: str | None = Field("label", description="column")
    client: str | None = Field(None, description='column that says whose row it is, or "folder"')
    split: str | None = Field(None, description='column with "train" and "test"')
    test_fraction: float = Field(0.2, gt=0, lt=1, description="of each client's rows, where there is no split")
    limit: int | None = Field(None, ge=1, description="rows at most, drawn from the seed")
    labels: list[str] | None = Field(None, min_length=2, description="all labels, where no place sees rows of every one")
    own_labels: bool = Field(False, description="several sources: each keeps its label set, with a private head")


class Deal(Section):
    """Who has which rows, see `tasks.partition`."""

    kind: Literal["dirichlet", "classes", "quantity", "iid", "source", "seat"] = "dirichlet"
    clients: int = Field(8, ge=1)
    alpha: float = Field(0.5, gt=0, description="dirichlet and quantity: small is skewed")
    classes: int = Field(2, ge=1, description="labels a client")
    smallest: int = Field(10, ge=1, description="rows that every client has at least")
    seat: int | None = Field(None, ge=0, description="seat: the client whose rows these are, the others' being elsewhere")


class Model(Section):
    """The pretrained model: a packaged one, a folder, or a hub name."""

    path: str = Field("minilm", description="minilm, smollm2, a folder, or a hub name")
    max_length: int = Field(64, ge=2, le=8192, description="tokens; longer texts are cut")
    pooling: Literal["mean", "cls", "last"] = Field("mean", description="hidden states to one vector")
    precision: Literal["fp32", "bf16"] = Field("bf16", description="of the frozen model")
    product: Literal["auto", "onednn", "default"] = Field("auto", description="fp32 product; auto measures")
    buckets: bool = Field(True, description="rows of similar length together")
    keep_bytes: int = Field(2 << 30, ge=0, description="memory for activations below the lowest adapter")
    family: dict[str, str] | None = Field(None, description="module paths of an unknown model family")
    width: int = Field(128, ge=1, description="of a small network")
    network: Literal["perceptron", "convolutional"] = Field("perceptron", description="small network")


class Train(Section):
    """Local work."""

    optimiser: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(3e-3, gt=0, description="learning rate")
    size: int = Field(16, ge=1, description="rows in a batch")
    epochs: int = Field(1, ge=1, description="passes over a client's rows in a round")
    steps: int | None = Field(None, ge=1, description="steps a round, instead of epochs")
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    clip: float | None = Field(None, gt=0, description="longest gradient")


class EngineTable(Section):
    """How clients run, and what goes wrong on the way."""

    way: Literal["auto", "together", "loop"] = Field("auto", description="all clients at once, or one by one")
    chunk: int | None = Field(None, ge=1, description="clients in one mapped call, instead of as many as 64 MiB of tensors")
    threads: int | None = Field(None, ge=1, description="of torch")
    dropout: float = Field(0.0, ge=0, lt=1, description="chance that an invited client does not answer")
    deadline: float | None = Field(
        None, gt=0, description="seconds that a round waits for clients: on the simulated clock, or real ones in a deployment"
    )
    quorum: int = Field(0, ge=0, description="clients that must answer in a round, or the run stops")
    weight: float | None = Field(None, gt=0, description="most examples that a client may claim; an update that claims more is refused")
    entry: float | None = Field(None, gt=0, description="largest magnitude of an update's entries; an update beyond it is refused")
    step_seconds: float = Field(0.1, gt=0, description="of an ordinary client")
    spread: float = Field(0.0, ge=0, description="standard deviation of clients' log slowness")
    bandwidth: float = Field(1e6, gt=0, description="bytes a second")


class Evaluate(Section):
    """When models are scored, and against what."""

    every: int = Field(1, ge=1, description="rounds")
    references: bool = Field(True, description="also run local-only and pooled data")
    tuned: bool = Field(False, description="also score clients after a further round of local work")
    products: bool = Field(False, description="also change and dispersion of each role's update")


class Compare(Section):
    """What `isthmus compare` sets side by side."""

    methods: list[str] = Field(default_factory=lambda: ["local", "fedavg", "pooled"])
    seeds: list[int] = Field(default_factory=lambda: [0, 1, 2], min_length=1)
    settings: dict[str, dict[str, Any]] = Field(default_factory=dict, description="per method: dotted field to value")


class Logs(Section):
    """Optional loggers."""

    tensorboard: bool = False
    mlflow: str | None = Field(None, description="tracking URI")


class Recipe(Section):
    """A whole recipe."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    description: str = ""
    rounds: int = Field(8, ge=1)
    seed: int = Field(0, ge=0)
    participation: float = Field(1.0, gt=0, le=1, description="share of all clients in a round")
    task: Task = Task()
    data: Data = Data()
    partition: Deal = Deal()
    model: Model = Model()
    adapter: AdapterTable = AdapterTable()
    train: Train = Train()
    method: MethodTable = MethodTable()
    channels: list[Open] = Field(default_factory=list)
    engine: EngineTable = EngineTable()
    evaluate: Evaluate = Evaluate()
    compare: Compare = Compare()
    logs: Logs = Logs()

    def updated(self, changes: Mapping[str, Any]) -> Recipe:
        """A copy with dotted fields set: ``recipe.updated({"train.lr": 0.01})``."""
        table = self.table()
        for key, value in changes.items():
            _assign(table, key, value)
        return parse(table, "--set")

    def table(self) -> dict[str, Any]:
        """As nested tables, without what is unset (TOML has no null)."""
        return _without_none(self.model_dump())


def fields(model: type[BaseModel] = Recipe, prefix: str = "") -> list[tuple[str, str, str, str]]:
    """(dotted name, accepted, default, meaning) of every field of a recipe, for ``isthmus list --fields`` and the documentation."""
    out = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            out += fields(kind, f"{prefix}{name}.")
            continue
        default = field.get_default(call_default_factory=True)
        shown = "required" if field.is_required() else "" if default is None else literal_of(default)
        bounds = [f"{sign} {getattr(m, a)}" for m in field.metadata for a, sign in _BOUNDS.items() if getattr(m, a, None) is not None]
        out.append((prefix + name, ", ".join([_accepted(kind), *bounds]), shown, field.description or ""))
    return out


_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _accepted(kind: Any) -> str:
    origin, inner = typing.get_origin(kind), [k for k in typing.get_args(kind) if k is not type(None)]
    if origin is Literal:
        return " or ".join(map(literal_of, inner))
    if origin is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return "table"
    if origin is list:
        return f"list of {_accepted(inner[0])}"
    if inner:
        return " or ".join(map(_accepted, inner))
    return {str: "text", int: "whole number", float: "number", bool: "true or false"}[kind]


def literal_of(value: Any) -> str:
    """A value as TOML writes it."""
    import json

    return json.dumps(value)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_without_none(v) for v in value]
    return value


def _assign(table: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for name in path:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise RecipeError(f"--set {key}: {name!r} is not a table")
    if last == "kind" and table.get("kind") != value:
        table.clear()  # another part has other options
    table[last] = value


def explain(error: ValidationError, where: str, prefix: str = "", fields: Sequence[str] = ()) -> RecipeError:
    """A `RecipeError` that says field, value and what is accepted, for every mistake at once."""
    lines = []
    for e in error.errors():
        name = ".".join([*([prefix] if prefix else []), *(str(x) for x in e["loc"])])
        if e["type"] == "extra_forbidden":
            known = list(fields) or _fields_at(e["loc"][:-1])
            near = difflib.get_close_matches(str(e["loc"][-1]), known, 1)
            lines.append(
                f"{name} = {e['input']!r}: no such field{f', did you mean {near[0]!r}?' if near else ''} Accepted: {', '.join(known)}"
            )
        elif e["type"] == "missing":
            lines.append(f"{name}: is missing")
        else:
            lines.append(f"{name} = {e['input']!r}: {e['msg'][0].lower()}{e['msg'][1:]}")
    return RecipeError(f"{where}: " + "; ".join(lines))


def _fields_at(path: Sequence[int | str]) -> list[str]:
    model: type[BaseModel] = Recipe
    for name in path:
        found = model.model_fields.get(str(name))
        if found is None or not isinstance(found.annotation, type) or not issubclass(found.annotation, BaseModel):
            return []
        model = found.annotation
    return sorted(model.model_fields)


def parse(table: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """A checked recipe from nested tables.

    Raises:
        RecipeError: for unknown or missing fields, wrong values, parts that do not exist or do not take their options.
    """
    try:
        recipe = Recipe.model_validate(dict(table))
    except ValidationError as error:
        raise explain(error, where) from None
    try:
        for kind in recipe.method.kind.split("+"):
            build("methods", kind, method_options(recipe, kind), f"method.{kind}", skip=1)
        build("adapters", recipe.adapter.kind, recipe.adapter.options, "adapter")
        for i, channel in enumerate(recipe.channels):
            build("channels", channel.kind, channel.options, f"channels.{i}")
        registry.get("tasks", recipe.task.kind)
    except (RecipeError, registry.RegistryError, ValueError) as error:
        raise RecipeError(f"{where}: {error}") from None
    return recipe


def method_options(recipe: Recipe, kind: str) -> dict[str, Any]:
    """Options of one part of ``method.kind = "a+b"``: the table's own keys, or those of ``[method.a]`` where there are several."""
    kinds, options = recipe.method.kind.split("+"), recipe.method.options
    if len(kinds) == 1 and kind not in options:
        return options
    if unknown := set(options) - set(kinds):
        raise RecipeError(
            f"method.{sorted(unknown)[0]}: method.kind = {recipe.method.kind!r} has parts {', '.join(kinds)}; put options into [method.<part>]"
        )
    return dict(options.get(kind, {}))


def build(kind: str, name: str, options: Mapping[str, Any], where: str, skip: int = 0) -> Callable[..., Any]:
    """The registered part as a function of its first ``skip`` arguments, its options checked against its signature.

    Raises:
        RecipeError: an option that it does not have, or of the wrong type.
    """
    part = registry.get(kind, name)
    parameters = list(inspect.signature(part).parameters.values())[skip:]
    hints = typing.get_type_hints(part.__init__ if inspect.isclass(part) else part)
    fields = {p.name: (hints.get(p.name, Any), ... if p.default is p.empty else p.default) for p in parameters}
    checked = create_model(name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=True), **fields)  # type: ignore[call-overload]
    try:
        values = checked.model_validate(dict(options))
    except ValidationError as error:
        raise explain(error, "recipe", where, sorted(fields)) from None
    given = {n: getattr(values, n) for n in fields}
    if not skip:
        made = part(**given)
        return lambda: made
    return lambda *first: part(*first, **given)


def _folders() -> list[Path]:
    package = Path(__file__).resolve().parents[1]
    return [p for p in (package / "recipes", package.parents[1] / "recipes") if p.is_dir()]


def packaged() -> dict[str, Path]:
    """Recipes that come with the package, by name."""
    return {f.stem: f for folder in reversed(_folders()) for f in sorted(folder.glob("*.toml"))}


def load(name: str, changes: Sequence[str] = ()) -> tuple[Recipe, Path]:
    """A recipe by name or path with ``--set`` changes, and the folder that its relative paths start from.

    Raises:
        RecipeError: no such recipe, no TOML, or a mistake in it.
    """
    known = packaged()
    path = Path(name) if name.endswith(".toml") or Path(name).is_file() else known.get(name)
    if path is None or not path.is_file():
        near = difflib.get_close_matches(name, known, 1)
        raise RecipeError(
            f"no recipe {name!r}{f', did you mean {near[0]!r}?' if near else ''}; there are {', '.join(sorted(known))}, or give a .toml file"
        )
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path.name}: not valid TOML: {error}") from None
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals or not key:
            raise RecipeError(f"--set {change!r}: expected key=value, for example train.lr=0.01")
        _assign(table, key.strip(), literal(value.strip()))
    return parse(table, path.name), path.parent


def literal(text: str) -> Any:
    """A TOML value, or the text itself where it is none (so that ``--set method.kind=fedprox`` needs no quotes)."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
