"""Routing as a task: a query's embedding says which model to ask, from what clients asked before and what came of it.

A row is a query: its embedding (384,), and for each of M models quality (1: right), cost, and whether this client has asked it.  Clients have asked some models only.
The network gives each model's quality (logit) and cost; a model that holds ``router.*`` (see `federated.router`) is a table over clusters of queries instead.  A query goes to

    argmax_m  quality_m - trade x cost_m     (costs in units of the most expensive model's mean).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ..core.recipe import Recipe, RecipeError
from ..core.seeds import generator
from ..core.tensors import Tensors
from .arrays import ArrayTask, owned
from .build import deal, load_pretrained
from .sources import Corpus, DataError, load, read_table

TRADES = (0.0, *(round(0.01 * 1.35**i, 4) for i in range(24)), 1e6)
"""Prices at which the frontier is drawn: 0, a geometric row, and one that asks the cheapest."""
CENTRES, RIGHT, SPENT, ASKED = "router.centres", "router.right", "router.spent", "router.asked"
MICRO = 1e6
"""Costs are summed as whole millionths, so that sums are exact."""


class Encoder:
    """MiniLM's sentence embeddings, of unit length."""

    def __init__(self, path: str = "minilm", layers: int | None = None, length: int = 64) -> None:
        self.net, self.tokenizer = load_pretrained(path, causal=False)
        self.net.eval()
        if layers is not None:
            self.net.encoder.layer = self.net.encoder.layer[:layers]  # type: ignore[union-attr, index]
        self.length = length

    @torch.no_grad()
    def __call__(self, texts: Sequence[str], batch: int = 64) -> Tensor:
        """(n,) texts to (n, width); those of similar length together."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        out = torch.empty(len(texts), int(self.net.config.hidden_size))  # type: ignore[union-attr, arg-type]
        for i in range(0, len(order), batch):
            some = order[i : i + batch]
            got = self.tokenizer([texts[j] for j in some], truncation=True, max_length=self.length, padding=True, return_tensors="pt")
            hidden = self.net(**got).last_hidden_state
            mask = got["attention_mask"][..., None].to(hidden.dtype)
            out[some] = F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
        return out


class RouterNet(nn.Module):
    """inputs -> width -> quality (logit) and cost of each model."""

    def __init__(self, inputs: int, models: int, width: int = 128) -> None:
        super().__init__()
        self.body, self.quality, self.cost = nn.Linear(inputs, width), nn.Linear(width, models), nn.Linear(width, models)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs) to (B, 2 M)."""
        h = F.relu(self.body(x))
        return torch.cat([self.quality(h), self.cost(h)], -1)


def estimates(params: Tensors, x: Tensor, back: float = 8.0) -> tuple[Tensor, Tensor]:
    """Quality and cost (n, M) from the table over clusters: means, drawn towards the model's overall mean by ``back`` imagined queries; a model nobody asked: quality -1."""
    near = torch.cdist(x, params[CENTRES]).argmin(-1)
    right, spent, asked = (params[n].double() for n in (RIGHT, SPENT, ASKED))
    known = asked.sum(0)
    overall = right.sum(0) / known.clamp_min(1)
    quality = (right + back * overall) / (asked + back)
    price = spent.sum(0) / known.clamp_min(1) / MICRO
    cost = (spent / MICRO + back * price) / (asked + back)
    quality = torch.where(known > 0, quality, -1.0)
    return quality[near].float(), cost[near].float()


def choose(quality: Tensor, cost: Tensor, trade: float) -> Tensor:
    """Which model (n,) each query goes to; of equals the cheaper, then the first."""
    value = quality - trade * cost
    best = value.amax(-1, keepdim=True)
    return torch.where(value >= best - 1e-9, cost, torch.inf).argmin(-1)


def frontier(quality: Tensor, cost: Tensor, top: float) -> float:
    """Area under the accuracy-cost frontier: points (L,), the best quality at no more than a cost, mean over costs from 0 to ``top``."""
    order = torch.argsort(cost)
    cost, best = cost[order].clamp(max=top), torch.cummax(quality[order], 0).values
    edges = torch.cat([cost, torch.tensor([top], dtype=cost.dtype)])
    return float((best * edges.diff()).sum() / top)


@dataclass
class RoutingTask(ArrayTask):
    """Embeddings x (N, d), y (N, 3 M): quality, cost, asked.

    Args:
        models: their names.
        trade: price of a unit of cost at which ``accuracy`` and ``cost`` are told; ``frontier`` looks at all of `TRADES`.
    """

    models: Sequence[str] = ()
    trade: float = 0.1
    encoder: dict[str, Any] = field(default_factory=dict)

    def loss(self, params: Tensors, batch: Tensors) -> Tensor:
        """Over the models asked only: cross-entropy of quality and squared error of cost."""
        out = functional_call(self.net, {n: params[n] for n, _ in self.net.named_parameters()}, (batch["x"],))
        logit, price = out.chunk(2, -1)
        quality, cost, asked = batch["y"].chunk(3, -1)
        asked = asked * batch["valid"][:, None]
        each = F.binary_cross_entropy_with_logits(logit, quality, reduction="none") + (price - cost).square()
        return (each * asked).sum() / asked.sum().clamp_min(1)

    def statistics(self, params: Tensors, batch: Tensors) -> Tensors:
        """By the clusters of ``router.centres`` (K, d): ``right``, ``spent`` (millionths), ``asked`` (K, M) and of queries ``rows`` (K,), ``sums`` (K, d) of embeddings (millionths); int64, so that any split has the same."""
        near = torch.cdist(batch["x"], params[CENTRES]).argmin(-1)
        mine = (near[:, None] == torch.arange(params[CENTRES].shape[0])) & batch["valid"][:, None]
        quality, cost, asked = batch["y"].double().chunk(3, -1)
        one = mine.double().mT
        whole = lambda t: (one @ t).round().to(torch.int64)  # noqa: E731
        out = {"right": whole(quality * asked), "spent": whole((cost * MICRO).round() * asked), "asked": whole(asked)}
        return out | {"rows": mine.sum(0), "sums": whole((batch["x"].double() * MICRO).round())}

    def predict(self, params: Tensors, x: Tensor) -> tuple[Tensor, Tensor]:
        """Quality and cost (n, M) that the router expects."""
        if ASKED in params and bool(params[ASKED].any()):
            return estimates(params, x)
        out = functional_call(self.net, {n: params[n] for n, _ in self.net.named_parameters()}, (x,))
        logit, cost = out.chunk(2, -1)
        return logit.sigmoid(), cost

    @torch.no_grad()
    def score(self, params: Tensors, rows: Tensor, owner: Tensor | None = None) -> Tensors:
        """Of the model that each query goes to at ``trade``: ``accuracy``, ``cost``, ``regret`` of value against the best model; ``loss`` is one minus accuracy."""
        dims = {n: p.dim() for n, p in self.net.named_parameters()} | {CENTRES: 2, RIGHT: 2, SPENT: 2, ASKED: 2}
        quality, cost = (torch.empty(len(rows), len(self.models)) for _ in range(2))
        for mine, own in owned(params, dims, owner, len(rows)):
            quality[mine], cost[mine] = self.predict(own, self.x[rows[mine]])
        true_quality, true_cost, _ = self.y[rows].chunk(3, -1)
        value = true_quality - self.trade * true_cost
        at = choose(quality, cost, self.trade)[:, None]
        right = true_quality.gather(-1, at)[:, 0]
        out = {"loss": 1 - right, "accuracy": right, "cost": true_cost.gather(-1, at)[:, 0], "weight": torch.ones(len(rows))}
        out["regret"] = value.amax(-1) - value.gather(-1, at)[:, 0]
        every = torch.stack([choose(quality, cost, t) for t in TRADES], 1)
        return out | {"at.quality": true_quality.gather(-1, every), "at.cost": true_cost.gather(-1, every)}

    def overall(self, scores: Tensors) -> dict[str, float]:
        """``frontier``: the area under it, costs up to the most expensive model's."""
        return {"frontier": frontier(scores["at.quality"], scores["at.cost"], 1.0)}

    def write(self, folder: Path, params: Tensors) -> None:
        """Write ``router/`` into a run folder: what `isthmus route` needs."""
        from safetensors.torch import save_file

        (folder / "router").mkdir(exist_ok=True)
        names = {n for n, _ in self.net.named_parameters()} | {CENTRES, RIGHT, SPENT, ASKED}
        save_file({n: t.contiguous() for n, t in params.items() if n in names}, folder / "router" / "router.safetensors")
        about = {"models": list(self.models), "trade": self.trade, "encoder": self.encoder, "width": len(params["body.bias"])}
        (folder / "router" / "router.json").write_text(json.dumps(about, indent=1) + "\n")


class Router:
    """A trained router, from a run folder: `Router(run)("question")`.

    Raises:
        RecipeError: a folder without a router.
    """

    def __init__(self, run: Path) -> None:
        from safetensors.torch import load_file

        try:
            about = json.loads((run / "router" / "router.json").read_text(encoding="utf-8"))
            self.params = load_file(run / "router" / "router.safetensors")
        except (OSError, ValueError) as error:
            raise RecipeError(f"{run} holds no trained router (isthmus run routing makes one): {error}") from None
        self.models: list[str] = list(about["models"])
        self.trade = float(about["trade"])
        self.encoder = Encoder(about["encoder"]["path"], length=about["encoder"]["length"])
        net = RouterNet(self.params["body.weight"].shape[1], len(self.models), int(about["width"]))
        self.task = RoutingTask(net, torch.zeros(0, 1), torch.zeros(0, 3), [], [], models=self.models)

    @torch.no_grad()
    def __call__(self, query: str, trade: float | None = None) -> dict[str, Any]:
        """The model to ask, what is expected of it, and of all others, best first."""
        price = self.trade if trade is None else trade
        quality, cost = (t[0] for t in self.task.predict(self.params, self.encoder([query])))
        at = int(choose(quality[None], cost[None], price)[0])
        order = torch.argsort(quality - price * cost, descending=True).tolist()
        rows = [{"model": self.models[i], "quality": round(float(quality[i]), 4), "cost": round(float(cost[i]), 4)} for i in order]
        return {
            "model": self.models[at],
            "quality": round(float(quality[at]), 4),
            "cost": round(float(cost[at]), 4),
            "trade": price,
            "all": rows,
        }


def _packaged(limit: int | None, seed: int) -> tuple[list[str], list[str], Tensor, Tensor, list[str], list[str]]:
    """Texts, kinds, quality (N, M), cost (N, M), names of models, notes of the table that comes with the package."""
    found = json.loads(resources.files("isthmus").joinpath("tables/newsdesk.json").read_text(encoding="utf-8"))
    texts, kinds = [], []
    for part in found["queries"]:
        corpus = load(part["set"])
        texts += [corpus.text[i] for i in part["rows"]]
        kinds += [f"{part['set']}: {(corpus.label or [])[i]}" for i in part["rows"]]
    quality = torch.tensor([[float(b) for b in a["right"]] for a in found["answers"]]).T
    cost = torch.tensor([[a["milliseconds"] for a in found["answers"]]]).expand(len(texts), -1)
    if limit is not None and limit < len(texts):
        some = sorted(torch.randperm(len(texts), generator=generator(seed, "queries", "limit"))[:limit].tolist())
        texts, kinds, quality, cost = [texts[i] for i in some], [kinds[i] for i in some], quality[some], cost[some]
    names = [a["model"] for a in found["answers"]]
    return texts, kinds, quality, cost, names, []


def _own(path: Path) -> tuple[list[str], list[str], Tensor, Tensor, list[str], list[str]]:
    """The same of a table with columns query, model, quality, cost and optionally kind; a query that a model did not answer counts as not asked (quality NaN)."""
    table = read_table(path)
    if missing := {"query", "model", "quality", "cost"} - set(table):
        raise DataError(f"task.table: {path.name} has no column {sorted(missing)[0]!r}; it needs query, model, quality and cost")
    texts = sorted({str(q) for q in table["query"]})
    names = sorted({str(m) for m in table["model"]})
    at, place = {q: i for i, q in enumerate(texts)}, {m: i for i, m in enumerate(names)}
    quality, cost = torch.full((len(texts), len(names)), torch.nan), torch.zeros(len(texts), len(names))
    kinds = [""] * len(texts)
    for i, (q, m, a, c) in enumerate(zip(table["query"], table["model"], table["quality"], table["cost"], strict=True)):
        try:
            quality[at[str(q)], place[str(m)]], cost[at[str(q)], place[str(m)]] = float(str(a)), float(str(c))
        except ValueError:
            raise DataError(f"task.table: {path.name}, row {i + 1}: quality {a!r} or cost {c!r} is no number") from None
        if "kind" in table:
            kinds[at[str(q)]] = str(table["kind"][i])
    return texts, kinds, quality, cost, names, []


def routing(recipe: Recipe, root: Path | None = None) -> RoutingTask:
    """The task of a recipe: ``task.table`` = "newsdesk" or a file of (query, model, quality, cost), ``task.coverage`` = share of models that a client has asked, ``task.trade``.

    Queries are dealt by their kind; of the models, each client has asked a share of its own, drawn from the seed, every model by at least one client.

    Raises:
        RecipeError, DataError: naming the field.
    """
    options: dict[str, Any] = {"table": "newsdesk", "coverage": 0.4, "trade": 0.1} | recipe.task.options
    if unknown := set(options) - {"table", "coverage", "trade"}:
        raise RecipeError(f"task.{sorted(unknown)[0]}: no such field; accepted are table, coverage, trade")
    for name, most in (("coverage", 1.0), ("trade", float("inf"))):
        value = options[name]
        if type(value) not in (int, float) or not 0 <= value <= most or (name == "coverage" and value == 0):
            raise RecipeError(f"task.{name} = {value!r}: must be {'above 0 and at most 1' if name == 'coverage' else 'at least 0'}")
    if options["table"] == "newsdesk":
        texts, kinds, quality, cost, names, notes = _packaged(recipe.data.limit, recipe.seed)
    else:
        path = next((p for p in (Path(options["table"]), (root or Path()) / options["table"]) if p.is_file()), None)
        if path is None:
            raise DataError(f"task.table = {options['table']!r}: neither 'newsdesk' nor a file")
        texts, kinds, quality, cost, names, notes = _own(path)
    number = {k: i for i, k in enumerate(sorted(set(kinds)))}
    kind = torch.tensor([number[k] for k in kinds])
    there = ~quality.isnan()
    top = (cost * there).sum(0) / there.sum(0).clamp_min(1)
    cost = cost / top.max().clamp_min(1e-12)
    about = {"path": recipe.model.path, "length": recipe.model.max_length}
    x = Encoder(recipe.model.path, length=recipe.model.max_length)(texts)
    train, test, clients = deal(recipe, [Corpus("queries", [""] * len(kind))], kind, torch.zeros_like(kind))
    asked = there.float()
    own = coverage(len(train), len(names), options["coverage"], recipe.seed)
    for c, rows in enumerate(train):
        asked[rows] *= own[c]
    y = torch.cat([quality.nan_to_num(), cost, asked], 1)
    net = RouterNet(x.shape[1], len(names), recipe.model.width)
    return RoutingTask(
        net,
        x,
        y,
        train,
        test,
        label_names=[],
        client_names=clients,
        notes=notes,
        models=names,
        trade=float(options["trade"]),
        encoder=about,
    )


def coverage(clients: int, models: int, share: float, seed: int) -> Tensor:
    """Which models (clients, models) each client has asked: a share of them, every model by somebody."""
    count = max(1, round(share * models))
    out = torch.zeros(clients, models)
    for c in range(clients):
        out[c, torch.randperm(models, generator=generator(seed, c, "coverage"))[:count]] = 1.0
    for m in (out.sum(0) == 0).nonzero().flatten().tolist():
        out[m % clients, m] = 1.0
    return out
