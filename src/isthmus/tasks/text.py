"""Text with a frozen transformer: classification with an encoder, language modelling with a causal model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..adapters.grouped import grouped
from ..adapters.host import Host
from ..adapters.rows import Rows
from ..core.tensors import Tensors
from ..parts.factors import A, B, within_rank

Pooling = Literal["mean", "cls", "last"]


@dataclass(frozen=True)
class Texts:
    """Tokenised rows: ids (N, L), length (N,), label (N,), and which label set a row belongs to, (N,)."""

    ids: Tensor
    length: Tensor
    label: Tensor
    group: Tensor

    def __len__(self) -> int:
        return len(self.ids)


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


@dataclass(frozen=True)
class Classifier:
    """A pooled hidden state, a linear map to the labels, cross-entropy.

    ``allowed`` (groups, labels): a row is scored among its group's labels only; for clients with label sets of their own.
    """

    width: int
    texts: Texts
    allowed: Tensor
    pooling: Pooling = "mean"
    budget: int = 4096

    def init(self) -> Tensors:
        """A head that starts at zero."""
        labels = self.allowed.shape[1]
        return {"head.weight": torch.zeros(labels, self.width), "head.bias": torch.zeros(labels)}

    def pool(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """(R, L, d) to (R, d) in fp32."""
        if self.pooling == "cls":
            return hidden[:, 0].float()
        if self.pooling == "last":
            return hidden[torch.arange(len(hidden)), mask.sum(1) - 1].float()
        weight = mask.to(hidden.dtype)
        return torch.bmm(weight[:, None], hidden)[:, 0].float() / mask.sum(1, keepdim=True)

    def logits(self, params: Tensors, hidden: Tensor, mask: Tensor, rows: Rows) -> Tensor:
        """(R, labels)."""
        pooled = self.pool(hidden, mask)[:, None]
        return (rows.product(pooled, params["head.weight"]) + rows.vector(params["head.bias"], pooled.dtype)[:, None])[:, 0]

    def __call__(self, params: Tensors, hidden: Tensor, at: Tensor, mask: Tensor, rows: Rows) -> Tensors:
        """Every row weighs 1."""
        logits = self.logits(params, hidden, mask, rows).masked_fill(~self.allowed[self.texts.group[at]], -1e9)
        label = self.texts.label[at]
        loss = F.cross_entropy(logits, label, reduction="none")
        return {"loss": loss, "accuracy": (logits.argmax(1) == label).float(), "weight": torch.ones(len(at))}


@dataclass(frozen=True)
class NextToken:
    """Cross-entropy of the next token through the frozen output layer; a row weighs as many tokens as it predicts."""

    output: nn.Module
    texts: Texts
    budget: int = 1024

    def init(self) -> Tensors:
        """Nothing beside the adapters trains."""
        return {}

    def __call__(self, params: Tensors, hidden: Tensor, at: Tensor, mask: Tensor, rows: Rows) -> Tensors:
        """Mean loss and next-token accuracy of each row."""
        logits = self.output(hidden[:, :-1]).float()
        target, real = self.texts.ids[at][:, 1 : hidden.shape[1]], mask[:, 1:].float()
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(real) * real
        count = real.sum(1).clamp_min(1)
        right = ((logits.argmax(-1) == target) * real).sum(1)
        return {"loss": loss.sum(1) / count, "accuracy": right / count, "weight": real.sum(1)}


@dataclass
class TextTask:
    """A federation of texts around one frozen model; see `core.types.Task` for the interface.

    Args:
        host: the model with its adapters.
        head: what its hidden states are for.
        texts: every row of every client.
        train, test: row numbers of each client.
        private: patterns of names that stay with each client.
        rank: each client's LoRA rank, or None.
        buckets: lay rows of about the same length together and cut the padding.
        keep: bytes that the activations below the lowest adapter may take; 0 keeps none.
    """

    host: Host
    head: Head
    texts: Texts
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

    def pooled(self) -> TextTask:
        """The same task with all clients' rows at one client; each client's test rows stay recognisable in ``test_of``."""
        return replace(self, train=[torch.cat(list(self.train))], test=[torch.cat(list(self.test))], rank=None, _below=self._below)

    def init(self, seed: int) -> Tensors:
        """Adapters as they start, and the head at zero."""
        return self.host.init(seed) | self.head.init()

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
        length = self.texts.length[at]
        order = torch.argsort(length, stable=True) if self.buckets else torch.arange(len(at))
        out, first = [], 0
        lengths = length[order].tolist() if self.buckets else [int(self.texts.ids.shape[1])] * len(at)
        for i in range(len(at) + 1):
            if i == len(at) or (i > first and (i - first + 1) * lengths[i] > self.head.budget):
                if i > first:
                    out.append(order[first:i])
                first = i
        return out

    def _tokens(self, at: Tensor) -> tuple[Tensor, Tensor]:
        width = int(self.texts.length[at].max()) if self.buckets else self.texts.ids.shape[1]
        return self.texts.ids[at, :width], (torch.arange(width) < self.texts.length[at][:, None]).long()

    def _start(self, at: Tensor, width: int) -> Tensor | None:
        """Kept hidden states (R, width, d) below the lowest adapter.  All rows are computed once, in one fixed order."""
        if not self.host.lowest or not self.keep:
            return None
        if self._below is None:
            n, longest = self.texts.ids.shape
            size = n * longest * self.host.width * self.host.dtype.itemsize
            if size > self.keep:
                self.keep = 0
                return None
            below = torch.zeros(n, longest, self.host.width, dtype=self.host.dtype)
            everything = torch.arange(n)
            for chunk in self._chunks(everything):
                ids, mask = self._tokens(everything[chunk])
                below[chunk, : ids.shape[1]] = self.host.below(ids, mask)
            self._below = below
        return self._below[at, :width]

    def _run(self, params: Tensors, owner: Tensor, clients: int, at: Tensor) -> Tensors:
        """Metrics of the rows ``at`` (R,), row i with the tensors of client ``owner[i]``, in one pass."""
        rows = Rows.of(owner, clients)
        ids, mask = self._tokens(at)
        hidden = self.host.hidden(params, rows, ids, mask, self._start(at, ids.shape[1]))
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
