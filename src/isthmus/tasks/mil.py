"""Multiple-instance learning: a row is a bag of instances, a label belongs to the bag, attention says which instances it comes from.

A bag is (I, F + 1): its instances padded to the longest bag's number, the last column 1 where there is one.  The network is gated attention (Ilse et al., ICML 2018):

    h_i = relu(W x_i),   a = softmax_i(w (tanh(V h_i) * sigmoid(U h_i))),   logits = head(sum_i a_i h_i).

Where the model holds ``memory.*`` (see `federated.fedsem`), the loss also pulls evidence to the anchors of the bag's class.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ..core.recipe import Recipe, RecipeError
from ..core.seeds import generator
from ..core.tensors import Tensors
from .arrays import ArrayTask, cross_entropy, owned
from .build import deal
from .partition import Partition
from .sources import Corpus, package_file

PACKAGED = {
    "musk1": "musk1",
    "musk2": "musk2",
    "elephant": "elephant",
    "breast": "ucsb_breast_cancer",
    "birds": "birds_brown_creeper",
    "dogs": "corel_dogs",
    "protein": "protein",
    "web": "web_recommendation_1",
}
ANCHORS, SCORES = "memory.anchors", "memory.scores"


class GatedAttention(nn.Module):
    """Bags (B, I, F + 1) to logits (B, labels)."""

    def __init__(self, features: int, labels: int, width: int = 64, attention: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.value, self.gate = nn.Linear(width, attention), nn.Linear(width, attention)
        self.weigh = nn.Linear(attention, 1)
        self.head = nn.Linear(width, labels)

    def forward(self, x: Tensor, parts: bool = False) -> Any:
        """Logits; with ``parts`` (attention (B, I), embeddings (B, I, width), logits)."""
        there = x[..., -1] > 0
        h = F.relu(self.embed(x[..., :-1]))
        raw = self.weigh(torch.tanh(self.value(h)) * torch.sigmoid(self.gate(h)))[..., 0]
        a = raw.masked_fill(~there, -1e9).softmax(-1) * there
        logits = self.head((a[..., None] * h).sum(-2))
        return (a, h, logits) if parts else logits


def likeness(h: Tensor, anchors: Tensor, scores: Tensor) -> Tensor:
    """Cosine (B, I, C) of instances h (B, I, d) with the nearest anchor (C, P, d) of each class; -1 where a class has none (score 0)."""
    cosine = torch.einsum("bid,cpd->bicp", F.normalize(h, dim=-1, eps=1e-6), F.normalize(anchors, dim=-1, eps=1e-6))
    return cosine.masked_fill(scores[None, None] <= 0, -1.0).amax(-1)


BINS = 512


def area(places: Tensor) -> float:
    """Area under the ROC curve from how many negative and positive rows (2, BINS) have a score in each place: the chance that a positive row scores higher, equals half; 0.5 without both."""
    negative, positive = places.double()
    pairs = negative.sum() * positive.sum()
    if not pairs > 0:
        return 0.5
    below = negative.cumsum(0) - negative
    return float((positive * (below + negative / 2)).sum() / pairs)


@dataclass
class BagTask(ArrayTask):
    """Bags x (N, I, F + 1) with labels; ``keys`` (N, I) marks the instances that make a bag positive, where it is known.

    Args:
        evidence: instances of a bag that `statistics` gives, those of largest attention.
    """

    keys: Tensor | None = None
    evidence: int = 3

    def _parts(self, params: Tensors, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own = {n: params[n] for n, _ in self.net.named_parameters()}
        return functional_call(self.net, own, (x,), {"parts": True})  # type: ignore[return-value]

    def batch(self, rows: Tensor) -> Tensors:
        """With the rows' numbers, so that who looks can tell a bag that it has seen."""
        return super().batch(rows) | {"row": rows}

    def loss(self, params: Tensors, batch: Tensors) -> Tensor:
        """Cross-entropy of bags; with a memory, ``evidence.pull`` and ``evidence.agree`` times its two terms.

        Pull: instances, each by its attention, to the nearest anchor of the bag's class against those of the others (softmax over classes at
        ``evidence.temperature``).  Agree: KL(a || q) of the attention a from q = softmax_i(how much nearer i is to the class's
        anchors than to others', over the temperature), for bags of a label above 0.
        """
        if ANCHORS not in params:
            return super().loss(params, batch)
        a, h, logits = self._parts(params, batch["x"])
        valid = batch["valid"].to(logits.dtype)
        mean = lambda each: (each * valid).sum() / valid.sum().clamp_min(1)  # noqa: E731
        scores, heat = params[SCORES], params["evidence.temperature"]
        like = likeness(h, params[ANCHORS], scores)
        known = ((scores > 0).any(-1).sum() >= 2).to(logits.dtype)  # before there are anchors of two classes nothing is pulled
        own = (batch["y"][:, None] == torch.arange(logits.shape[-1])).to(logits.dtype)
        toward = ((like / heat).log_softmax(-1) * own[:, None]).sum(-1)  # (B, I)
        pull = -(a * toward).sum(-1)
        there = batch["x"][..., -1] > 0
        margin = (like * own[:, None]).sum(-1) - like.masked_fill(own[:, None] > 0, -1.0).amax(-1)
        log_q = (margin / heat).masked_fill(~there, -1e9).log_softmax(-1).detach()
        agree = (a * (a.clamp_min(1e-12).log() - log_q)).sum(-1) * (batch["y"] > 0)
        extra = params["evidence.pull"] * mean(pull) + params["evidence.agree"] * mean(agree)
        return mean(F.cross_entropy(logits, batch["y"], reduction="none")) + known * extra

    def statistics(self, params: Tensors, batch: Tensors) -> Tensors:
        """Evidence, not sums: ``instances`` (B, q, d) of largest attention, ``importance`` (B, q) = attention x probability of the bag's label, 0 for padding; ``label``, ``row`` (B,)."""
        a, h, logits = self._parts(params, batch["x"])
        sure = logits.softmax(-1).gather(-1, batch["y"][:, None])
        most, at = a.topk(min(self.evidence, a.shape[-1]), -1)
        instances = h.gather(-2, at[..., None].expand(*at.shape, h.shape[-1]))
        return {"instances": instances, "importance": most * sure * batch["valid"][:, None], "label": batch["y"], "row": batch["row"]}

    @torch.no_grad()
    def score(self, params: Tensors, rows: Tensor, owner: Tensor | None = None) -> Tensors:
        """Also which of `BINS` places its score has, by label, of which `overall` makes ``auc``."""
        margin = torch.logit(self._probability(params, rows, owner).double(), 1e-12)
        place = ((0.5 + torch.atan(margin / 2) / torch.pi) * BINS).long().clamp(0, BINS - 1)
        one = F.one_hot(place, BINS).float()
        positive = (self.y[rows] == 1).float()[:, None]
        return super().score(params, rows, owner) | {"of.places": torch.stack([one * (1 - positive), one * positive], 1)}

    def overall(self, scores: Tensors) -> dict[str, float]:
        """Area under the ROC curve, to the width of a place."""
        return {"auc": area(scores["of.places"].reshape(2, BINS))} if len(scores["of.places"]) else {}

    def _probability(self, params: Tensors, rows: Tensor, owner: Tensor | None) -> Tensor:
        shape, out = {n: p.dim() for n, p in self.net.named_parameters()}, torch.empty(len(rows))
        for mine, own in owned(params, shape, owner, len(rows)):
            out[mine] = functional_call(self.net, own, (self.x[rows[mine]],)).softmax(-1)[:, 1]
        return out

    @torch.no_grad()
    def attention(self, params: Tensors, rows: Tensor) -> Tensor:
        """Attention (n, I) of one model on bags."""
        return self._parts(params, self.x[rows])[0]


def packaged(name: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Bags [(n, F)] and labels (N,) of a data set of the package ``mil``, read without importing it."""
    path = package_file("mil", "1.0.5", f"mil/data/datasets/csv/{PACKAGED[name]}.csv", plain=False)
    table = np.loadtxt(path, delimiter=",")
    ids, first = np.unique(table[:, 1], return_index=True)
    return [table[table[:, 1] == i, 2:] for i in ids], (table[first, 0] > 0).astype(np.int64)


def digit_bags(bags: int, key: list[int], seed: int) -> tuple[list[np.ndarray], np.ndarray, list[np.ndarray]]:
    """Bags of 6 to 14 handwritten digits, half of them with one or two of ``key``: (bags, kind, marks); kind 0: none, i: of ``key[i - 1]``."""
    from sklearn.datasets import load_digits

    found, g = load_digits(), np.random.default_rng(generator(seed, "bags").initial_seed())
    others = np.flatnonzero(~np.isin(found.target, key))
    out, kind, marks = [], [], []
    for b in range(bags):
        size, which = int(g.integers(6, 15)), b % (2 * len(key))
        rows = g.choice(others, size)
        mark = np.zeros(size, dtype=bool)
        if which < len(key):
            mark[: int(g.integers(1, 3))] = True
            rows[mark] = g.choice(np.flatnonzero(found.target == key[which]), int(mark.sum()))
        order = g.permutation(size)
        out.append(found.data[rows[order]] / 16)
        marks.append(mark[order])
        kind.append(which + 1 if which < len(key) else 0)
    return out, np.asarray(kind), marks


def _folds(kind: Tensor, folds: int, fold: int, seed: int) -> Tensor:
    """Whether a bag is in the test part of a fold: bags dealt round and round, label by label, in a random order."""
    test = torch.zeros(len(kind), dtype=torch.bool)
    for c in kind.unique().tolist():
        rows = (kind == c).nonzero().flatten()
        rows = rows[torch.randperm(len(rows), generator=generator(seed, c, "folds"))]
        test[rows[fold::folds]] = True
    return test


def bags(recipe: Recipe, root: Path | None = None) -> BagTask:
    """The task of a recipe: ``task.set`` = one of the packaged sets or "digits"; ``task.folds``, ``task.fold`` for cross-validation.

    Features are standardised by mean and deviation of all training instances (sums over clients).

    Raises:
        RecipeError, DataError: naming the field.
    """
    options: dict[str, Any] = {"set": "musk1", "folds": 5, "fold": 0, "evidence": 3, "bags": 400, "keys": [9, 3], "attention": 32}
    if unknown := set(recipe.task.options) - set(options):
        raise RecipeError(f"task.{sorted(unknown)[0]}: no such field; accepted are {', '.join(options)}")
    options |= recipe.task.options
    for name, least in (("folds", 2), ("fold", 0), ("evidence", 1), ("bags", 8), ("attention", 1)):
        if type(options[name]) is not int or options[name] < least:
            raise RecipeError(f"task.{name} = {options[name]!r}: must be a whole number from {least} on")
    if options["fold"] >= options["folds"]:
        raise RecipeError(f"task.fold = {options['fold']}: there are folds 0 to {options['folds'] - 1}")
    marks: list[np.ndarray] | None = None
    if options["set"] == "digits":
        key = options["keys"]
        if not isinstance(key, list) or not 1 <= len(set(key)) == len(key) <= 9 or not all(type(k) is int and 0 <= k <= 9 for k in key):
            raise RecipeError(f"task.keys = {key!r}: must be one to nine different digits")
        found, kinds, marks = digit_bags(options["bags"], key, recipe.seed)
    elif options["set"] in PACKAGED:
        found, kinds = packaged(options["set"])
    else:
        raise RecipeError(f"task.set = {options['set']!r}: accepted are digits, {', '.join(PACKAGED)}")
    kind = torch.from_numpy(kinds)
    longest, features = max(map(len, found)), found[0].shape[1]
    x = torch.zeros(len(found), longest, features + 1)
    for i, bag in enumerate(found):
        x[i, : len(bag), :-1], x[i, : len(bag), -1] = torch.from_numpy(bag).float(), 1.0
    test = _folds(kind, options["folds"], options["fold"], recipe.seed)
    p = recipe.partition
    part = Partition(p.kind if p.kind != "seat" else "iid", p.clients, p.alpha, p.classes, p.smallest)
    if recipe.partition.kind == "seat":
        train, tests, names = deal(recipe, [Corpus("bags", [""] * len(kind))], kind, torch.zeros_like(kind))
    else:
        client = part.deal(kind, test, recipe.seed)
        train = [(~test & (client == c)).nonzero().flatten() for c in range(p.clients)]
        tests = [(test & (client == c)).nonzero().flatten() for c in range(p.clients)]
        names = [f"client {c}" for c in range(p.clients)]
    inside = x[torch.cat(train)] if any(map(len, train)) else x
    known = inside[inside[..., -1] > 0][:, :-1]
    scale = known.std(0).clamp_min(1e-6) if len(known) > 1 else torch.ones(features)
    there = x[..., -1:] > 0
    x[..., :-1] = torch.where(there, (x[..., :-1] - known.mean(0)) / scale, 0.0).clamp(-10, 10)
    keys = None
    if marks is not None:
        keys = torch.zeros(len(found), longest, dtype=torch.bool)
        for i, mark in enumerate(marks):
            keys[i, : len(mark)] = torch.from_numpy(mark)
    net = GatedAttention(features, 2, recipe.model.width, options["attention"])
    return BagTask(
        net,
        x,
        (kind > 0).long(),
        train,
        tests,
        label_names=["without", "with"],
        client_names=names,
        measure=cross_entropy,
        keys=keys,
        evidence=options["evidence"],
    )
