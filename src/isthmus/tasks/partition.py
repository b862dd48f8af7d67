"""Who has which rows: data that came with clients, or shares drawn over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.seeds import generator, globally, seed_of
from .sources import DataError

Kind = Literal["dirichlet", "classes", "quantity", "iid", "source"]


@dataclass(frozen=True)
class Partition:
    """How rows are dealt to ``clients``.

    Args:
        kind: "dirichlet": each label's rows by shares ~ Dirichlet(alpha) (Hsu et al., 2019); "classes": each client gets ``classes``
            labels; "quantity": the same labels everywhere, sizes ~ Dirichlet(alpha); "iid"; "source": one client per corpus or per value
            of the client column.
        clients: how many.
        alpha: small is skewed.
        classes: labels per client.
        smallest: rows that every client must have; shares are drawn again until it holds.
    """

    kind: Kind = "dirichlet"
    clients: int = 8
    alpha: float = 0.5
    classes: int = 2
    smallest: int = 10

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise DataError(f"partition.clients = {self.clients!r}: must be at least 1")
        if self.alpha <= 0:
            raise DataError(f"partition.alpha = {self.alpha!r}: must be above 0")

    def shares(self, labels: int, attempt: int, seed: int) -> Tensor:
        """Share of each label's rows for each client, (labels, clients), rows sum to 1."""
        k = self.clients
        with globally(seed_of(seed, attempt, "partition")):
            if self.kind == "dirichlet":
                return torch.distributions.Dirichlet(torch.full((k,), float(self.alpha))).sample((labels,))
            if self.kind == "quantity":
                return torch.distributions.Dirichlet(torch.full((k,), float(self.alpha))).sample().expand(labels, k)
            if self.kind == "classes":
                if not 1 <= self.classes <= labels:
                    raise DataError(f"partition.classes = {self.classes!r}: there are {labels} labels")
                # deal the labels round and round, so that every label has an owner where clients * classes allows
                deck = torch.cat([torch.randperm(labels) for _ in range(-(-k * self.classes // labels) + 1)])
                has, at = torch.zeros(labels, k), 0
                for c in range(k):
                    while has[:, c].sum() < self.classes:
                        has[deck[at % len(deck)], c] = 1
                        at += 1
                has[has.sum(1) == 0] = 1.0  # a label without an owner goes to everybody rather than being lost
                return has / has.sum(1, keepdim=True)
            return torch.full((labels, k), 1 / k)

    def deal(self, label: Tensor, test: Tensor, seed: int) -> Tensor:
        """The client of each row (N,).

        Args:
            label: label numbers (N,).
            test: rows of an official test split (N,) bool; they are dealt by the same shares as the others.

        Raises:
            DataError: more clients than rows, or shares that leave a client with fewer than ``smallest`` rows.
        """
        n = len(label)
        if n < self.clients * max(1, min(self.smallest, 2)):
            raise DataError(f"partition.clients = {self.clients}: only {n} rows; there must be more rows than clients")
        labels = int(label.max()) + 1
        for attempt in range(500):
            shares, g = self.shares(labels, attempt, seed), generator(seed, attempt, "deal")
            client = torch.empty(n, dtype=torch.long)
            for part in (test, ~test):
                for c in range(labels):
                    rows = (part & (label == c)).nonzero().flatten()
                    rows = rows[torch.randperm(len(rows), generator=g)]
                    edges = (shares[c].cumsum(0) * len(rows)).round().long().clamp(max=len(rows))
                    edges[-1] = len(rows)
                    client[rows] = torch.bucketize(torch.arange(len(rows)), edges, right=True)
            counts = torch.bincount(client[~test], minlength=self.clients)
            enough = counts.min() >= self.smallest
            if enough and (not test.any() or torch.bincount(client[test], minlength=self.clients).min() >= 1):
                return client
        raise DataError(
            f"partition: 500 draws of kind {self.kind!r} all left a client with fewer than smallest = {self.smallest} rows "
            f"(last: {int(counts.min())}); raise alpha, take fewer clients, or lower partition.smallest"
        )


def by_value(values: Sequence[str]) -> tuple[Tensor, list[str]]:
    """The client of each row from a column: (N,) and the clients' names, sorted."""
    names = sorted(set(values))
    number = {v: i for i, v in enumerate(names)}
    return torch.tensor([number[v] for v in values]), names


def split(
    client: Tensor, clients: int, test: Tensor | None, fraction: float, seed: int, label: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Each client's train and test rows: the official split, or ``fraction`` of its rows drawn label by label.

    Raises:
        DataError: a client without training or test rows.
    """
    train_rows, test_rows = [], []
    for c in range(clients):
        mine = client == c
        if test is not None:
            a, b = (mine & ~test).nonzero().flatten(), (mine & test).nonzero().flatten()
        else:
            g = generator(seed, c, "split")
            rows = mine.nonzero().flatten()
            rows = rows[torch.randperm(len(rows), generator=g)]
            rows = rows[torch.argsort(label[rows], stable=True)]
            # every 1/fraction-th row of the rows sorted by label
            take = ((torch.arange(1, len(rows) + 1) * fraction).floor() - (torch.arange(len(rows)) * fraction).floor()).bool()
            a, b = rows[~take].sort().values, rows[take].sort().values
        if not len(a) or not len(b):
            raise DataError(f"client {c} has {len(a)} training and {len(b)} test rows; each needs at least one")
        train_rows.append(a)
        test_rows.append(b)
    return train_rows, test_rows
