"""A federation around one frozen transformer, whose rows may be texts or images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from ..adapters.grouped import grouped
from ..adapters.host import Host
from ..adapters.rows import Rows
from ..core.tensors import Tensors
from ..parts.factors import A, B, within_rank


class Rowed(Protocol):
    """Rows that a frozen model takes: texts or images."""

    @property
    def length(self) -> Tensor:
        """Tokens or patches of each row, (N,)."""
        ...

    @property
    def label(self) -> Tensor:
        """(N,)."""
        ...

    @property
    def longest(self) -> int:
        """The largest length there may be."""
        ...

    def __len__(self) -> int: ...

    def take(self, at: Tensor, cut: bool) -> tuple[Tensor, Tensor]:
        """Input of the rows ``at`` (R,) and mask (R, L); ``cut``: no wider than the longest of them."""
        ...


class Head(Protocol):
    """What turns hidden states into losses."""

    @property
    def budget(self) -> int:
        """Tokens in one pass."""
        ...

    def init(self) -> Tensors:
        """Tensors that train beside the adapters."""
        ...

    def __call__(self, params: Tensors, hidden: Tensor, at: Tensor, mask: Tensor, rows: Rows) -> Tensors:
        """Hidden (R, L, d) of the rows ``at`` (R,) to ``loss``, ``accuracy`` and ``weight``, each (R,)."""
        ...


@dataclass
class HostTask:
    """A federation around one frozen model; see `core.types.Task` for the interface.

    Args:
        host: the model with its adapters.
        head: what its hidden states are for.
        data: every row of every client.
        train, test: row numbers of each client.
        private: patterns of names that stay with each client.
        rank: each client's LoRA rank, or None.
        buckets: lay rows of about the same length together and cut the padding.
        keep: bytes that the activations below the lowest adapter may take; 0 keeps none.
    """

    host: Host
    head: Head
    data: Rowed
    train: Sequence[Tensor]
    test: Sequence[Tensor]
    private: tuple[str, ...] = ()
    rank: Tensor | None = None
    buckets: bool = True
    keep: int = 2 << 30
    label_names: Sequence[str] = ()
    client_names: Sequence[str] = ()
    notes: Sequence[str] = ()
    vmappable: bool = True
    _below: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        known = tuple(f"{s.name}." for s, _ in self.host.sites)
        self.loss = grouped(self._value_and_grads, lambda n: n.startswith(("head.", *known)))

    @property
    def clients(self) -> int:
        """How many take part."""
        return len(self.train)

    def pooled(self) -> HostTask:
        """The same task with all clients' rows at one client; each client's test rows stay recognisable in ``test_of``."""
        return replace(self, train=[torch.cat(list(self.train))], test=[torch.cat(list(self.test))], rank=None, _below=self._below)

    def init(self, seed: int) -> Tensors:
        """Adapters as they start, and the head at zero."""
        return self.host.init(seed) | self.head.init()

    def statistics(self, params: Tensors, batch: Tensors) -> Tensors:
        """None: what it learns is trained."""
        raise NotImplementedError("this task has no statistics; the method needs one that counts")

    def rows(self, client: int, split: str) -> Tensor:
        """Row numbers of ``split`` "train" or "test"."""
        return (self.train if split == "train" else self.test)[client]

    def batch(self, rows: Tensor) -> Tensors:
        """The rows themselves; the loss looks their tokens up."""
        return {"row": rows.clamp_min(0), "valid": rows >= 0}

    def ranks(self) -> Tensor | None:
        """Each client's LoRA rank (clients,), or None where all are equal."""
        return self.rank

    def trim(self, params: Tensors, rank: Tensor | int) -> Tensors:
        """Zeros beyond the rank."""
        rank = torch.as_tensor(rank)
        return {n: within_rank(t, rank, n) if n.endswith((A, B)) else t for n, t in params.items()}

    def crop(self, params: Tensors, rank: int) -> Tensors:
        """Factors cut to the rank."""
        return {n: t[:rank] if n.endswith(A) else t[:, :rank] if n.endswith(B) else t for n, t in params.items()}

    # How rows run

    def _chunks(self, at: Tensor) -> list[Tensor]:
        """Positions of the rows ``at`` in passes of at most the head's budget of tokens, padded to the longest of each."""
        length = self.data.length[at]
        order = torch.argsort(length, stable=True) if self.buckets else torch.arange(len(at))
        out, first = [], 0
        lengths = length[order].tolist() if self.buckets else [self.data.longest] * len(at)
        for i in range(len(at) + 1):
            if i == len(at) or (i > first and (i - first + 1) * lengths[i] > self.head.budget):
                if i > first:
                    out.append(order[first:i])
                first = i
        return out

    def _start(self, at: Tensor, width: int) -> Tensor | None:
        """Kept hidden states (R, width, d) below the lowest adapter.  All rows are computed once, in one fixed order."""
        if not self.host.lowest or not self.keep:
            return None
        if self._below is None:
            n, longest = len(self.data), self.data.longest
            size = n * longest * self.host.width * self.host.dtype.itemsize
            if size > self.keep:
                self.keep = 0
                return None
            below = torch.zeros(n, longest, self.host.width, dtype=self.host.dtype)
            everything = torch.arange(n)
            for chunk in self._chunks(everything):
                ids, mask = self.data.take(everything[chunk], self.buckets)
                below[chunk, : mask.shape[1]] = self.host.below(ids, mask)
            self._below = below
        return self._below[at, :width]

    def _run(self, params: Tensors, owner: Tensor, clients: int, at: Tensor) -> Tensors:
        """Metrics of the rows ``at`` (R,), row i with the tensors of client ``owner[i]``, in one pass."""
        rows = Rows.of(owner, clients)
        ids, mask = self.data.take(at, self.buckets)
        hidden = self.host.hidden(params, rows, ids, mask, self._start(at, mask.shape[1]))
        return self.head(params, hidden, at, mask, rows)

    def _value_and_grads(self, params: Tensors, wanted: tuple[str, ...], batch: Tensors) -> tuple[Tensor, Tensors]:
        """Mean loss of each client over its valid rows (K,), and gradients; rows that are padding are not run."""
        clients = batch["row"].shape[0]
        valid = batch["valid"]
        owner, place = valid.nonzero(as_tuple=True)
        at = batch["row"][owner, place]
        weight = 1.0 / valid.sum(1).clamp_min(1)
        losses = torch.zeros(clients)
        leaves = {n: params[n].detach().requires_grad_() for n in wanted}
        grads = {n: torch.zeros_like(t) for n, t in leaves.items()}
        with torch.enable_grad():
            for chunk in self._chunks(at):
                who = owner[chunk]
                loss = self._run({**params, **leaves}, who, clients, at[chunk])["loss"] * weight[who]
                losses.index_add_(0, who, loss.detach())
                if wanted:
                    for n, g in zip(wanted, torch.autograd.grad(loss.sum(), [leaves[n] for n in wanted], allow_unused=True), strict=True):
                        if g is not None:
                            grads[n] += g
        return losses, grads

    @torch.no_grad()
    def score(self, params: Tensors, rows: Tensor, owner: Tensor | None = None) -> Tensors:
        """Per-row metrics (n,): ``loss``, ``accuracy``, ``weight``."""
        clients = 1 if owner is None else int(owner.max()) + 1
        who = torch.zeros(len(rows), dtype=torch.long) if owner is None else owner
        out: Tensors = {}
        for chunk in self._chunks(rows):
            for n, t in self._run(params, who[chunk], clients, rows[chunk]).items():
                out.setdefault(n, torch.zeros(len(rows)))[chunk] = t
        return out

    @torch.no_grad()
    def represent(self, params: Tensors, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Last hidden layer (n, width) of the rows ``rows`` (n,), and predicted labels (n,), of one model.

        Raises:
            ValueError: for a head that does not classify.
        """
        pool, logits = getattr(self.head, "pool", None), getattr(self.head, "logits", None)
        if pool is None or logits is None:
            raise ValueError("only classifiers have a last hidden layer and labels")
        hidden, labels = torch.zeros(len(rows), self.host.width), torch.zeros(len(rows), dtype=torch.long)
        for chunk in self._chunks(rows):
            at = rows[chunk]
            ids, mask = self.data.take(at, self.buckets)
            mine = Rows.of(torch.zeros(len(at), dtype=torch.long), 1)
            states = self.host.hidden(params, mine, ids, mask, self._start(at, mask.shape[1]))
            hidden[chunk], labels[chunk] = pool(states, mask), logits(params, states, mask, mine).argmax(1)
        return hidden, labels
