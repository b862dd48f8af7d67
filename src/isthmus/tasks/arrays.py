"""Arrays with a small network of which everything trains: digits, series, and whatever fits ``functional_call``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ..core.seeds import globally, seed_of
from ..core.tensors import Tensors


class Perceptron(nn.Module):
    """inputs -> width -> labels, with a ReLU; the last layer is called ``head``."""

    def __init__(self, inputs: int, labels: int, width: int = 128) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(inputs, width), nn.Linear(width, labels)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, ...) to logits (B, labels)."""
        return self.head(F.relu(self.body(x.flatten(1))))


class Convolutional(nn.Module):
    """Two 3 x 3 convolutions, a pooled map, a ``head``; for images (B, 1, h, w)."""

    def __init__(self, side: int, labels: int, width: int = 16) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, padding=1)
        self.head = nn.Linear(2 * width * (side // 2) ** 2, labels)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, 1, side, side) to logits (B, labels)."""
        return self.head(F.max_pool2d(F.relu(self.two(F.relu(self.one(x)))), 2).flatten(1))


def owned(params: Tensors, dims: Mapping[str, int], owner: Tensor | None, rows: int) -> Iterator[tuple[Tensor, Tensors]]:
    """Each model of a stack with the rows (rows,) that it scores: of ``dims`` dimensions a tensor is everybody's, with one more each client's; ``owner`` None: one model."""
    for k in [None] if owner is None else owner.unique().tolist():
        mine = torch.ones(rows, dtype=torch.bool) if k is None else owner == k
        yield mine, {n: params[n] if params[n].dim() == d else params[n][k or 0] for n, d in dims.items() if n in params}


def cross_entropy(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (B, labels) and labels (B,): loss (B,), accuracy (B,)."""
    return F.cross_entropy(logits, y, reduction="none"), (logits.argmax(-1) == y).float()


@dataclass
class ArrayTask:
    """Rows x (N, ...) with targets y (N, ...), and a network that trains as a whole.

    Args:
        net: its parameters' names are the names that travel.
        x, y: every row of every client.
        train, test: row numbers of each client.
        private: patterns of names that stay with each client.
        measure: outputs and targets of a batch to each row's loss and accuracy.
    """

    net: nn.Module
    x: Tensor
    y: Tensor
    train: Sequence[Tensor]
    test: Sequence[Tensor]
    private: tuple[str, ...] = ()
    label_names: Sequence[str] = ()
    client_names: Sequence[str] = ()
    notes: Sequence[str] = ()
    vmappable: bool = True
    measure: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = cross_entropy

    @property
    def clients(self) -> int:
        """How many take part."""
        return len(self.train)

    def pooled(self) -> ArrayTask:
        """All rows at one client."""
        return replace(self, train=[torch.cat(list(self.train))], test=[torch.cat(list(self.test))])

    def init(self, seed: int) -> Tensors:
        """The network's own initialisation under the seed."""
        with globally(seed_of(seed, "net")):
            for module in self.net.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()  # type: ignore[operator]
        return {n: p.detach().clone() for n, p in self.net.named_parameters()}

    def loss(self, params: Tensors, batch: Tensors) -> Tensor:
        """Mean loss over the valid rows."""
        out = functional_call(self.net, {n: params[n] for n, _ in self.net.named_parameters()}, (batch["x"],))
        each, _ = self.measure(out, batch["y"])
        valid = batch["valid"].to(each.dtype)
        return (each * valid).sum() / valid.sum().clamp_min(1)

    def statistics(self, params: Tensors, batch: Tensors) -> Tensors:
        """None: what it learns is trained."""
        raise NotImplementedError("this task has no statistics; the method needs one that counts")

    def rows(self, client: int, split: str) -> Tensor:
        """Row numbers of ``split`` "train" or "test"."""
        return (self.train if split == "train" else self.test)[client]

    def batch(self, rows: Tensor) -> Tensors:
        """Rows gathered, so that mapped code sees arrays."""
        at = rows.clamp_min(0)
        return {"x": self.x[at], "y": self.y[at], "valid": rows >= 0}

    @torch.no_grad()
    def score(self, params: Tensors, rows: Tensor, owner: Tensor | None = None) -> Tensors:
        """Per-row ``loss`` and ``accuracy``; every row weighs 1."""
        shape = {n: p.dim() for n, p in self.net.named_parameters()}
        loss, accuracy = torch.empty(len(rows)), torch.empty(len(rows))
        for mine, own in owned(params, shape, owner, len(rows)):
            out = functional_call(self.net, own, (self.x[rows[mine]],))
            loss[mine], accuracy[mine] = self.measure(out, self.y[rows[mine]])
        return {"loss": loss, "accuracy": accuracy, "weight": torch.ones(len(rows))}

    @torch.no_grad()
    def represent(self, params: Tensors, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What the network's ``head`` sees of the rows ``rows`` (n,), (n, width), and predicted labels (n,).

        Raises:
            ValueError: for a network without a ``head``.
        """
        if not hasattr(self.net, "head"):
            raise ValueError("only classifiers have a last hidden layer and labels")
        seen: list[Tensor] = []
        handle = self.net.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))  # type: ignore[union-attr]
        try:
            out = functional_call(self.net, {n: params[n] for n, _ in self.net.named_parameters()}, (self.x[rows],))
        finally:
            handle.remove()
        return seen[0], out.argmax(1)

    def ranks(self) -> Tensor | None:
        """No adapter, no rank."""
        return None

    def trim(self, params: Tensors, rank: Tensor | int) -> Tensors:
        """No adapter, no rank."""
        return params

    def crop(self, params: Tensors, rank: int) -> Tensors:
        """No adapter, no rank."""
        return params
