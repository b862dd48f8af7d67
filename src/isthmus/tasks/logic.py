"""Logic-gate networks: layers of two-input gates with fixed random wiring, trained as mixtures of the 16 Boolean functions (Petersen et al., NeurIPS 2022).

Function t of two bits has the value ``t >> (3 - 2 a - b) & 1`` at inputs a, b: 1 is AND, 3 passes a, 6 is XOR, 15 is true.  While training a gate
is ``sum_t softmax(w)_t f_t`` with f_t extended to [0, 1]; hardened it is the function of the largest weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import seeds
from ..core.recipe import Recipe, RecipeError
from ..core.seeds import generator
from ..core.tensors import Tensors
from .arrays import ArrayTask, owned
from .build import deal
from .sources import Corpus

PASS = 3
TABLE = torch.tensor([[t >> (3 - i) & 1 for i in range(4)] for t in range(16)], dtype=torch.float32)
"""Values (16, 4) of the functions at (a, b) = 00, 01, 10, 11."""
# f(a, b) = c0 + ca a + cb b + cab a b, from the values at the corners
_CORNERS = torch.tensor([[1.0, 0, 0, 0], [-1, 0, 1, 0], [-1, 1, 0, 0], [1, -1, -1, 1]])
COEFFICIENTS = TABLE @ _CORNERS.T
"""(16, 4): c0, ca, cb, cab."""


@dataclass(frozen=True)
class Shape:
    """A network of ``layers`` x ``width`` gates over ``bits`` inputs, the last layer in ``labels`` equal groups."""

    bits: int
    width: int
    layers: int
    labels: int

    def inputs(self, layer: int) -> int:
        """Signals that a layer may take."""
        return self.bits if layer == 0 else self.width

    def wiring(self, seed: int, client: Tensor) -> Tensor:
        """Inputs of every gate (layers, 2, width), each client's its own: a random order of the inputs, again and again, so that all are used."""
        out = []
        for layer in range(self.layers):
            n, key = self.inputs(layer), seeds.key(seed, client, layer, "wiring")
            rounds = -(-2 * self.width // n)
            order = torch.argsort(seeds.uniform(key, (rounds, n)), dim=1).reshape(-1)[: 2 * self.width]
            out.append(order.reshape(2, self.width))
        return torch.stack(out)


def soft(weights: Tensor, wiring: Tensor, x: Tensor) -> Tensor:
    """Last layer (B, width) of gates with weights (layers, width, 16), on x (B, bits) in [0, 1]."""
    mix = weights.softmax(-1) @ COEFFICIENTS
    for layer in range(len(weights)):
        a, b = x[:, wiring[layer, 0]], x[:, wiring[layer, 1]]
        c = mix[layer]
        x = c[:, 0] + c[:, 1] * a + (c[:, 2] + c[:, 3] * a) * b
    return x


def hard(types: Tensor, wiring: Tensor, x: Tensor) -> Tensor:
    """Last layer (B, width) of 0 and 1 of gates of these functions (layers, width)."""
    for layer in range(len(types)):
        a, b, c = x[:, wiring[layer, 0]], x[:, wiring[layer, 1]], COEFFICIENTS[types[layer].long()]
        x = c[:, 0] + c[:, 1] * a + (c[:, 2] + c[:, 3] * a) * b
    return x


def pack(bits: np.ndarray) -> np.ndarray:
    """Rows (n, s) of bits to words (s, ceil(n / 64)): 64 rows a word, the first in the lowest bit."""
    n, s = bits.shape
    padded = np.zeros((-(-n // 64) * 64, s), dtype=np.uint8)
    padded[:n] = bits
    return np.ascontiguousarray(np.packbits(padded.T, axis=1, bitorder="little")).view("<u8")


def unpack(words: np.ndarray, rows: int) -> np.ndarray:
    """The inverse of `pack`: (s, w) to (rows, s)."""
    return np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :rows].T


def packed(types: np.ndarray, wiring: np.ndarray, words: np.ndarray) -> np.ndarray:
    """`hard` on words (bits, w): 64 rows at once, (width, w)."""
    for t, (left, right) in zip(types.astype(np.uint64), wiring, strict=True):
        a, b = words[left], words[right]
        # all ones where the function is 1 at this corner
        at = [(np.uint64(0) - (t >> np.uint64(3 - i) & np.uint64(1)))[:, None] for i in range(4)]
        words = (at[0] & ~a & ~b) | (at[1] & ~a & b) | (at[2] & a & ~b) | (at[3] & a & b)
    return words


def votes(fires: Tensor, sign: Tensor, bias: Tensor) -> Tensor:
    """Scores (n, labels) of chosen gates' values (n, labels, m): signed sums less an integer each."""
    return (fires * sign).sum(-1) - bias


@dataclass
class LogicTask(ArrayTask):
    """Bits x (N, F) with labels; trainable tensor ``gates.weight`` (layers, width, 16).

    A fifth of every client's training rows, the same ones always, is held out of training: statistics are counted there.  A model that
    holds ``select.*`` (see `federated.fbfs`) is the selection from all clients' gates; any other its own hardened network.
    """

    shape: Shape = Shape(1, 1, 1, 1)
    seed: int = 0
    tau: float = 10.0

    def init(self, seed: int) -> Tensors:
        """Every gate passes its first input, a little (Petersen et al., 2024)."""
        s = self.shape
        weight = torch.randn(s.layers, s.width, 16, generator=generator(seed, "gates")) * 0.1
        weight[..., PASS] += 2.0
        return {"gates.weight": weight}

    def wiring(self, params: Tensors) -> Tensor:
        """The wiring of the client whose the gates are (``gates.owner``), or the one that all share."""
        return self.shape.wiring(self.seed, params.get("gates.owner", torch.tensor(-1)))

    def held(self, rows: Tensor) -> Tensor:
        """Rows that no training sees."""
        return seeds._mix(rows.clamp_min(0) + 12345) % 5 == 0

    def batch(self, rows: Tensor) -> Tensors:
        """With ``held``."""
        return super().batch(rows) | {"held": self.held(rows)}

    def loss(self, params: Tensors, batch: Tensors) -> Tensor:
        """Cross-entropy of the groups' sums over tau, over the rows that are not held out."""
        out = soft(params["gates.weight"], self.wiring(params), batch["x"])
        logits = out.reshape(len(out), self.shape.labels, -1).sum(-1) / self.tau
        each = F.cross_entropy(logits, batch["y"], reduction="none")
        counts = (batch["valid"] & ~batch["held"]).to(each.dtype)
        return (each * counts).sum() / counts.sum().clamp_min(1)

    def statistics(self, params: Tensors, batch: Tensors) -> Tensors:
        """Of the held-out rows: ``fires`` (C, G) of every candidate gate by class, ``rows`` (C,); int32."""
        fires = self.candidates(params["pool.types"], batch["x"])
        counted = batch["valid"] & batch["held"]
        one = F.one_hot(batch["y"], self.shape.labels) * counted[:, None]
        return {"fires": (one.to(fires.dtype).mT @ fires).round().to(torch.int32), "rows": one.sum(0).to(torch.int32)}

    @torch.no_grad()
    def score(self, params: Tensors, rows: Tensor, owner: Tensor | None = None) -> Tensors:
        """Per-row ``loss`` (one minus accuracy: there are no probabilities) and ``accuracy``, of hardened gates."""
        right = torch.empty(len(rows))
        for mine, own in owned(params, _DIMS, owner, len(rows)):
            right[mine] = (self.predict(own, self.x[rows[mine]]) == self.y[rows[mine]]).float()
        return {"loss": 1 - right, "accuracy": right, "weight": torch.ones(len(rows))}

    def predict(self, params: Tensors, x: Tensor) -> Tensor:
        """Labels (n,), the first of equals."""
        if "select.sign" in params and params["select.sign"].any():
            fires = self.candidates(params["pool.types"], x)
            chosen = fires[:, params["select.index"].long()]
            return votes(chosen, params["select.sign"].float(), params["select.bias"].float()).argmax(1)
        out = hard(params["gates.weight"].argmax(-1), self.wiring(params), x)
        return out.reshape(len(out), self.shape.labels, -1).sum(-1).argmax(1)

    def candidates(self, pool: Tensor, x: Tensor) -> Tensor:
        """All clients' last layers side by side (n, K width), from the gates of all (K, layers, width)."""
        each = [hard(pool[k], self.shape.wiring(self.seed, torch.tensor(k)), x) for k in range(len(pool))]
        return torch.cat(each, 1)


_DIMS = {
    "gates.weight": 3,
    "gates.owner": 0,
    "pool.types": 3,
    "select.index": 2,
    "select.sign": 2,
    "select.bias": 1,
    "count.fires": 2,
    "count.rows": 1,
}


def thermometer(x: Tensor, thresholds: Sequence[float]) -> Tensor:
    """Values (n, d) to bits (n, d len(thresholds)): whether each is above each threshold."""
    return torch.cat([(x > t).float() for t in thresholds], 1)


def logic(recipe: Recipe, root: object = None) -> LogicTask:
    """The task of a recipe: digits as thermometer bits, ``task.layers`` x ``task.width`` gates, ``task.thresholds``.

    Raises:
        RecipeError: naming the field.
    """
    from sklearn.datasets import load_digits

    options: dict[str, Any] = {"layers": 3, "width": 1000, "thresholds": [0.125, 0.375, 0.625, 0.875], "tau": 10.0} | recipe.task.options
    if unknown := set(options) - {"layers", "width", "thresholds", "tau"}:
        raise RecipeError(f"task.{sorted(unknown)[0]}: no such field; accepted are layers, width, thresholds, tau")
    for name in ("layers", "width"):
        if not isinstance(options[name], int) or options[name] < 1:
            raise RecipeError(f"task.{name} = {options[name]!r}: must be a whole number from 1 on")
    if options["width"] % 10:
        raise RecipeError(f"task.width = {options['width']}: must be a multiple of the 10 labels")
    if not options["thresholds"] or not all(isinstance(t, int | float) for t in options["thresholds"]):
        raise RecipeError(f"task.thresholds = {options['thresholds']!r}: must be numbers between 0 and 1")
    found = load_digits()
    x, y = torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)
    if recipe.data.limit is not None and recipe.data.limit < len(x):
        some = torch.randperm(len(x), generator=generator(recipe.seed, "digits", "limit"))[: recipe.data.limit]
        x, y = x[some], y[some]
    train, test, clients = deal(recipe, [Corpus("digits", [""] * len(y))], y, torch.zeros(len(y), dtype=torch.long))
    bits = thermometer(x, options["thresholds"])
    shape = Shape(bits.shape[1], options["width"], options["layers"], 10)
    names = [str(i) for i in range(10)]
    return LogicTask(
        torch.nn.Identity(),
        bits,
        y,
        train,
        test,
        label_names=names,
        client_names=clients,
        shape=shape,
        seed=recipe.seed,
        tau=float(options["tau"]),
    )
