"""Text for a frozen transformer: classification with an encoder, language modelling with a causal model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..adapters.rows import Rows
from ..core.tensors import Tensors

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

    @property
    def longest(self) -> int:
        """Width of the padded rows."""
        return int(self.ids.shape[1])

    def take(self, at: Tensor, cut: bool) -> tuple[Tensor, Tensor]:
        """Token numbers and mask (R, L)."""
        width = int(self.length[at].max()) if cut else self.longest
        return self.ids[at, :width], (torch.arange(width) < self.length[at][:, None]).long()


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
