"""Concept-based models: a label predicted from concepts that people can read and correct, which not everybody has annotated.

An encoder gives z (B, h) of a row; a module for each concept c its probability p_c; the label module sees the concepts only.  Three families:

- "bottleneck": p_c = sigmoid(w_c z + b_c), the label is linear in p (Koh et al., ICML 2020);
- "embedding": each concept has two vectors u_c, v_c of z, and the label is linear in p_c u_c + (1 - p_c) v_c (Espinosa Zarlenga et al., NeurIPS 2022);
- "graph": p_c = sigmoid(w_c z + b_c + sum_j P_cj a_cj p_j) over its parents P_c among the concepts before it, the label linear in p.

To intervene is to put the truth in p_c's place, where its children see it too.  Tensors of a concept are rows of ``concept.*`` and columns of ``label.*``; what a model holds
as ``concepts.active`` (M,) takes part in the label, all where it holds none.  A client has annotated some concepts, each from some round on.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core import seeds
from ..core.recipe import Recipe, RecipeError
from ..core.seeds import generator
from ..core.tensors import Tensors
from .arrays import ArrayTask, owned
from .build import deal
from .pairs import animals
from .sources import Corpus, package_file

FAMILIES = ("bottleneck", "embedding", "graph")
NETWORKS = {"asia": "dysp", "sachs": "Akt", "insurance": "PropCost", "alarm": "BP"}
"""Bayesian networks that come with the package ``pgmpy``, and the node that is the label."""
ACTIVE, PARENTS, ROUND = "concepts.active", "concepts.parents", "concepts.round"

DIGITS = {
    "loop": {0, 6, 8, 9}, "two loops": {8}, "even": {0, 2, 4, 6, 8}, "prime": {2, 3, 5, 7}, "above four": {5, 6, 7, 8, 9},
    "straight stroke": {1, 4, 7}, "open to the left": {2, 3, 5, 7, 9}, "mirrored top and bottom": {0, 1, 3, 8},
}  # fmt: skip
# Bear, Bird, Cat, Cow, Dog, Elephant, Giraffe, Horse, Sheep, Zebra
ANIMALS = {
    "hooves": {3, 6, 7, 8, 9}, "wings": {1}, "carnivore": {0, 2, 4}, "kept by people": {2, 3, 4, 7, 8}, "larger than a person": {0, 3, 5, 6, 7, 9},
    "long neck": {6}, "trunk": {5}, "mane": {7, 9}, "pattern": {6, 9}, "wool": {8}, "claws": {0, 1, 2, 4}, "of Africa": {5, 6, 9},
}  # fmt: skip


def known(params: Tensors, z: Tensor, family: str, truth: Tensor | None = None, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Logits (B, M) of the concepts and what the label module sees (B, M, e), e = 1 but for embeddings.

    Args:
        params: ``concept.*``, and ``concepts.parents`` (M, M) for the graph.
        z: (B, h).
        truth: (B, M) of concepts.
        given: (B, M), 1 where ``truth`` stands in a prediction's place.
    """

    def replaced(p: Tensor, c: Any) -> Tensor:
        return p if given is None or truth is None else torch.where(given[..., c] > 0, truth[..., c], p)

    logits = z @ params["concept.weight"].mT + params["concept.bias"]
    if family == "graph":
        parents = params.get(PARENTS, torch.tril(torch.ones_like(params["concept.edges"]), -1))
        edges = params["concept.edges"] * parents
        each: list[Tensor] = []
        p: list[Tensor] = []
        for c in range(logits.shape[-1]):
            one = logits[..., c]
            if c:
                one = one + torch.stack(p, -1) @ edges[c, :c]
            each.append(one)
            p.append(replaced(one.sigmoid(), c))
        return torch.stack(each, -1), torch.stack(p, -1)[..., None]
    probability = replaced(logits.sigmoid(), slice(None))
    if family == "embedding":
        up, down = (torch.einsum("bh,meh->bme", z, params[f"concept.{n}"]) for n in ("up", "down"))
        return logits, F.leaky_relu(probability[..., None] * up + (1 - probability[..., None]) * down)
    return logits, probability[..., None]


@dataclass
class ConceptTask(ArrayTask):
    """Rows x (N, F) with labels y (N,) and concepts.

    Args:
        truth: (N, M), 0 or 1.
        since: (clients, M), the round from which a client has a concept annotated; a large number: never.
        family: see above.
        alpha: weight of the label's loss beside the concepts'.
        correct: share of annotated concepts that stand corrected in training (Espinosa Zarlenga et al.).
        use: (M,) which concepts the label may see.
        width, size: of z; of a concept's embedding.
    """

    truth: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    since: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    family: str = "bottleneck"
    alpha: float = 1.0
    correct: float = 0.25
    use: Tensor = field(default_factory=lambda: torch.zeros(0))
    width: int = 64
    size: int = 8
    concepts: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.home = torch.zeros(len(self.x), dtype=torch.long)
        for c in range(len(self.train)):
            for rows in (self.train[c], self.test[c]):
                self.home[rows] = min(c, len(self.since) - 1)

    def pooled(self) -> ConceptTask:
        """All rows at one client; each row keeps its own client's annotations."""
        one, home = super().pooled(), self.home
        one.home = home  # type: ignore[attr-defined]
        return one  # type: ignore[return-value]

    def init(self, seed: int) -> Tensors:
        """Uniform as for linear layers; the label module and edges start at zero, so that a concept that joins changes no prediction."""
        g, m, h, labels = generator(seed, "concepts"), self.truth.shape[1], self.width, len(self.label_names)
        uniform = lambda *shape: (torch.rand(*shape, generator=g) * 2 - 1) / shape[-1] ** 0.5  # noqa: E731
        slots = m * (self.size if self.family == "embedding" else 1)
        out = {
            "encoder.one.weight": uniform(2 * h, self.x.shape[1]),
            "encoder.one.bias": torch.zeros(2 * h),
            "encoder.two.weight": uniform(h, 2 * h),
        }
        out |= {"encoder.two.bias": torch.zeros(h), "concept.weight": uniform(m, h), "concept.bias": torch.zeros(m)}
        if self.family == "embedding":
            out |= {"concept.up": uniform(m, self.size, h), "concept.down": uniform(m, self.size, h)}
        if self.family == "graph":
            out["concept.edges"] = torch.zeros(m, m)
        return out | {"label.weight": torch.zeros(labels, slots), "label.bias": torch.zeros(labels)}

    def batch(self, rows: Tensor) -> Tensors:
        """With the rows' numbers, ``truth`` and ``since`` (B, M)."""
        at = rows.clamp_min(0)
        return super().batch(rows) | {"row": rows, "truth": self.truth[at], "since": self.since[self.home[at]]}

    def encode(self, params: Tensors, x: Tensor) -> Tensor:
        """Rows to z (B, h)."""
        z = F.relu(x @ params["encoder.one.weight"].mT + params["encoder.one.bias"])
        return F.relu(z @ params["encoder.two.weight"].mT + params["encoder.two.bias"])

    def outputs(
        self, params: Tensors, x: Tensor, truth: Tensor | None = None, given: Tensor | None = None, own: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits of concepts (B, M) and of labels (B, labels); ``own`` (M,): concepts that are active beside the model's."""
        logits, seen = known(params, self.encode(params, x), self.family, truth, given)
        active = self.use if ACTIVE not in params else self.use * (params[ACTIVE] if own is None else torch.maximum(params[ACTIVE], own))
        return logits, (seen * active[:, None]).flatten(-2) @ params["label.weight"].mT + params["label.bias"]

    def annotated(self, params: Tensors, batch: Tensors) -> Tensor:
        """What of a batch is annotated in the model's round (``concepts.round``; later than all where it holds none), (B, M) of 0 and 1."""
        now = params.get(ROUND, torch.tensor(1e5))
        return ((batch["since"] <= now) & batch["valid"][:, None]).to(batch["truth"].dtype)

    def loss(self, params: Tensors, batch: Tensors) -> Tensor:
        """Cross-entropy of annotated concepts, mean over concepts of each one's mean, plus alpha times that of labels.

        A model that knows which concepts are active moves no module of a concept that the client has not annotated.
        """
        marked = self.annotated(params, batch)
        own = (marked.sum(0) > 0).to(marked.dtype)
        if ACTIVE in params:
            params = {n: _moves(t, own) if n.startswith("concept.") else t for n, t in params.items()}
        # of what is annotated, a random part stands corrected, so that the label learns from the truth too
        place = batch["row"][:, None] * marked.shape[1] + torch.arange(marked.shape[1])
        dice = seeds._mix(seeds._mix(place.clamp_min(0)) ^ params.get(ROUND, torch.zeros(())).long()) % 1000
        given = marked * (dice < 1000 * self.correct)
        logits, label = self.outputs(params, batch["x"], batch["truth"], given, own)
        each = F.binary_cross_entropy_with_logits(logits, batch["truth"], reduction="none") * marked
        concept = (each.sum(0) / marked.sum(0).clamp_min(1)).sum() / own.sum().clamp_min(1)
        valid = batch["valid"].to(label.dtype)
        task = (F.cross_entropy(label, batch["y"], reduction="none") * valid).sum() / valid.sum().clamp_min(1)
        return concept + self.alpha * task

    def statistics(self, params: Tensors, batch: Tensors) -> Tensors:
        """``annotated`` (M,) rows, and ``pairs`` (M, M, 4) of rows in which both are annotated by their values 00, 01, 10, 11; int64."""
        marked = self.annotated(params, batch)
        yes, no = marked * batch["truth"], marked * (1 - batch["truth"])
        pairs = torch.stack([a.mT @ b for a in (no, yes) for b in (no, yes)], -1)
        return {"annotated": marked.sum(0).round().to(torch.int64), "pairs": pairs.round().to(torch.int64)}

    @torch.no_grad()
    def score(self, params: Tensors, rows: Tensor, owner: Tensor | None = None) -> Tensors:
        """``accuracy`` of the label, ``concepts``: of all concepts, ``unseen``: of those that the row's client has never annotated (weighed by `overall`), and with 0 to M corrected."""
        dims = {n: t.dim() for n, t in self.init(0).items()} | {ACTIVE: 1, PARENTS: 2, ROUND: 0}
        m, k = self.truth.shape[1], len(rows)
        loss, right, concept = torch.empty(k), torch.empty(k), torch.empty(k, m)
        corrected = torch.empty(k, m + 1)
        order = torch.randperm(m, generator=generator(0, "interventions", m))
        for mine, own in owned(params, dims, owner, k):
            x, truth, y = self.x[rows[mine]], self.truth[rows[mine]], self.y[rows[mine]]
            logits, label = self.outputs(own, x)
            loss[mine], right[mine] = F.cross_entropy(label, y, reduction="none"), (label.argmax(-1) == y).float()
            concept[mine] = ((logits > 0) == (truth > 0)).float()
            for i in range(m + 1):
                given = torch.zeros_like(truth)
                given[:, order[:i]] = 1.0
                corrected[mine, i] = (self.outputs(own, x, truth, given)[1].argmax(-1) == y).float()
        never = (self.since[self.home[rows]] > 1e5).float()
        return {
            "loss": loss, "accuracy": right, "concepts": concept.mean(1), "weight": torch.ones(k), "of.corrected": corrected,
            "of.unseen": concept * never, "of.never": never,
        }  # fmt: skip

    def overall(self, scores: Tensors) -> dict[str, float]:
        """``intervened``: accuracy with k concepts corrected, mean over k; ``corrected``: with all; ``unseen``."""
        curve, never = scores["of.corrected"], scores["of.never"].sum()
        out = {"intervened": float(curve.mean()), "corrected": float(curve[-1])}
        return out | ({"unseen": float(scores["of.unseen"].sum() / never)} if never else {})


def _moves(t: Tensor, own: Tensor) -> Tensor:
    """Rows of ``t`` (M, ...) that train: those of annotated concepts."""
    mask = own.reshape(-1, *[1] * (t.dim() - 1))
    return mask * t + (1 - mask) * t.detach()


def network(name: str) -> tuple[list[str], list[int], list[list[int]], list[np.ndarray]]:
    """Nodes in an order in which parents come first, number of values, parents, and tables (*parents' values, values) of a packaged network."""
    path = package_file("pgmpy", "1.1.2", f"pgmpy/utils/example_models/{name}.bif.gz", plain=False)
    text = gzip.decompress(path.read_bytes()).decode()
    values = {
        n: [v.strip() for v in vs.split(",")] for n, vs in re.findall(r"variable\s+(\S+)\s*\{\s*type discrete \[ \d+ \] \{([^}]*)\}", text)
    }
    found: dict[str, tuple[list[str], np.ndarray]] = {}
    for head, body in re.findall(r"probability\s*\(([^)]*)\)\s*\{(.*?)\n\}", text, re.S):
        child, _, rest = (x.strip() for x in head.partition("|"))
        parents = [p.strip() for p in rest.split(",") if p.strip()]
        table = np.zeros([len(values[p]) for p in parents] + [len(values[child])])
        if not parents:
            table[:] = [float(x) for x in re.search(r"table\s+([^;]*);", body).group(1).split(",")]  # type: ignore[union-attr]
        for key, row in re.findall(r"\(([^)]*)\)\s*([^;]*);", body) if parents else ():
            at = tuple(values[p].index(v.strip()) for p, v in zip(parents, key.split(","), strict=True))
            table[at] = [float(x) for x in row.split(",")]
        found[child] = (parents, table)
    order: list[str] = []
    while len(order) < len(found):
        order += [n for n, (parents, _) in found.items() if n not in order and all(p in order for p in parents)]
    place = {n: i for i, n in enumerate(order)}
    return order, [len(values[n]) for n in order], [[place[p] for p in found[n][0]] for n in order], [found[n][1] for n in order]


def sample(name: str, rows: int, seed: int) -> tuple[np.ndarray, list[str]]:
    """Rows of a packaged network (rows, nodes) of value numbers, and the nodes' names."""
    nodes, _, parents, tables = network(name)
    draw = np.random.default_rng(generator(seed, name, "sample").initial_seed())
    out = np.zeros((rows, len(nodes)), dtype=np.int64)
    for i, (mine, table) in enumerate(zip(parents, tables, strict=True)):
        p = table[tuple(out[:, j] for j in mine)] if mine else np.broadcast_to(table, (rows, table.shape[-1]))
        out[:, i] = (draw.random((rows, 1)) > p.cumsum(-1)).sum(-1).clip(max=p.shape[-1] - 1)
    return out, nodes


def _rows(name: str, limit: int, seed: int) -> tuple[Tensor, Tensor, Tensor, list[str], list[str]]:
    """x (N, F), truth (N, M), y (N,), concepts, labels of a set."""
    if name in NETWORKS:
        found, nodes = sample(name, limit, seed)
        at = nodes.index(NETWORKS[name])
        y = torch.from_numpy(found[:, at])
        truth = torch.from_numpy((np.delete(found, at, 1) > 0).astype(np.float32))
        often = (np.delete(sample(name, 4000, 0)[0], at, 1) > 0).mean(0)
        common = torch.from_numpy((often > 0.05) & (often < 0.95))  # one that is nearly always the same says nothing
        truth, names = truth[:, common], [n for n, keep in zip(np.delete(nodes, at), common.tolist(), strict=True) if keep]
        g = generator(seed, name, "view")
        whole = torch.cat([F.one_hot(torch.from_numpy(found[:, i])).float() for i in range(len(nodes)) if i != at], 1)
        # what is seen of it: a random network's output, with noise
        one, two = torch.randn(whole.shape[1], 64, generator=g) / whole.shape[1] ** 0.5, torch.randn(64, 32, generator=g) / 8
        x = torch.tanh(torch.tanh(2 * whole @ one) @ two)
        x = x + 0.5 * x.std() * torch.randn(x.shape, generator=g)
        return (x - x.mean(0)) / x.std(0), truth, y, names, [str(i) for i in range(network(name)[1][at])]
    if name == "digits":
        from sklearn.datasets import load_digits

        data = load_digits()
        x, y = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
        table, labels = DIGITS, [str(i) for i in range(10)]
    else:
        shapes, y = animals()
        x = F.avg_pool2d(shapes[:, None].float(), 2).flatten(1)
        table, labels = ANIMALS, ["bear", "bird", "cat", "cow", "dog", "elephant", "giraffe", "horse", "sheep", "zebra"]
    if limit < len(y):
        some = torch.randperm(len(y), generator=generator(seed, name, "limit"))[:limit]
        x, y = x[some], y[some]
    truth = torch.stack([torch.isin(y, torch.tensor(sorted(s))).float() for s in table.values()], 1)
    return x, truth, y, list(table), labels


def dealt(clients: int, concepts: int, share: float, joins: Sequence[int], seed: int) -> Tensor:
    """Rounds (clients, concepts) from which a client has a concept annotated, 1e6: never.

    Each has a share of them, every one somebody; concepts are dealt round and round over ``joins``: with [0, 10] every other one begins in round 10.
    """
    count = max(1, round(share * concepts))
    out = torch.full((clients, concepts), 1e6)
    start = torch.tensor([float(joins[i % len(joins)]) for i in range(concepts)])
    start = start[torch.randperm(concepts, generator=generator(seed, "joins"))]
    for c in range(clients):
        mine = torch.randperm(concepts, generator=generator(seed, c, "annotations"))[:count]
        out[c, mine] = start[mine]
    for m in (out >= 1e6).all(0).nonzero().flatten().tolist():
        out[m % clients, m] = start[m]
    return out


def concepts(recipe: Recipe, root: Path | None = None) -> ConceptTask:
    """The task of a recipe: ``task.set`` = digits, animals, asia, sachs, insurance or alarm; ``task.family``; ``task.annotated`` = share of concepts that a client annotates; ``task.joins`` =
    rounds at which concepts begin; ``task.use`` = "all" or "common" (the label sees what at least half of the clients annotate); ``task.alpha``, ``task.correct``.

    Raises:
        RecipeError, DataError: naming the field.
    """
    options: dict[str, Any] = {
        "set": "digits",
        "family": "bottleneck",
        "annotated": 0.4,
        "joins": [0],
        "use": "all",
        "alpha": 1.0,
        "correct": 0.25,
    } | recipe.task.options
    if unknown := set(options) - {"set", "family", "annotated", "joins", "use", "alpha", "correct"}:
        raise RecipeError(f"task.{sorted(unknown)[0]}: no such field; accepted are set, family, annotated, joins, use, alpha, correct")
    for name, accepted in (("set", ("digits", "animals", *NETWORKS)), ("family", FAMILIES), ("use", ("all", "common"))):
        if options[name] not in accepted:
            raise RecipeError(f"task.{name} = {options[name]!r}: accepted are {', '.join(accepted)}")
    if type(options["annotated"]) not in (int, float) or not 0 < options["annotated"] <= 1:
        raise RecipeError(f"task.annotated = {options['annotated']!r}: must be above 0 and at most 1")
    if type(options["alpha"]) not in (int, float) or options["alpha"] < 0:
        raise RecipeError(f"task.alpha = {options['alpha']!r}: must be a number from 0 on")
    if type(options["correct"]) not in (int, float) or not 0 <= options["correct"] <= 1:
        raise RecipeError(f"task.correct = {options['correct']!r}: must be from 0 to 1")
    joins = options["joins"]
    if not isinstance(joins, list) or not joins or not all(type(j) is int and j >= 0 for j in joins) or min(joins) > 0:
        raise RecipeError(f"task.joins = {joins!r}: must be rounds, among them 0")
    x, truth, y, names, labels = _rows(options["set"], recipe.data.limit or 4000, recipe.seed)
    train, test, clients = deal(recipe, [Corpus("concepts", [""] * len(y))], y, torch.zeros_like(y))
    since = dealt(len(train), len(names), options["annotated"], joins, recipe.seed)
    common = ((since < 1e6).float().mean(0) >= 0.5).float()
    use = torch.ones(len(names)) if options["use"] == "all" else common
    return ConceptTask(
        nn.Identity(),
        x,
        y,
        train,
        test,
        label_names=labels,
        client_names=clients,
        truth=truth,
        since=since,
        family=options["family"],
        alpha=float(options["alpha"]),
        correct=float(options["correct"]),
        use=use,
        width=recipe.model.width,
        concepts=names,
    )
