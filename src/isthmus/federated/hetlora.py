"""HetLoRA (Cho et al., EMNLP 2024): clients of different ranks; truncate what they get, pad what they send, weigh by norm, prune ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core import lowrank
from ..core.tensors import Tensors
from ..core.types import Inbox, Loss, Method, Plugin, Trained
from ..parts.aggregate import ByNorm
from ..parts.factors import A, B, layers, within_rank


@dataclass(frozen=True)
class RankPruning(Plugin):
    """Drop the last ``1 - keep`` of a client's rank once local training shrinks that part of its update.

    ``penalty`` times the norm of that part joins the loss.  The rank lives in the client's memory and never grows.
    """

    keep: float = 0.99
    penalty: float = 5e-3
    name = "hetlora"
    names = ("*.lora_a", "*.lora_b")

    def init(self, params: Tensors) -> Tensors:
        """Starts from the full rank of the adapter; a client's own smaller rank is cut before."""
        return {"rank": torch.tensor(next(t.shape[0] for n, t in params.items() if n.endswith(A)))}

    def _tail(self, params: Tensors, rank: Tensor) -> Tensor:
        """Norm of what lies beyond ``keep`` of the rank, summed over layers, ()."""
        kept = (rank * self.keep).floor().long()
        total = torch.zeros(())
        for n in layers(params):
            if n + A in params and n + B in params:
                a, b = params[n + A], params[n + B]
                total = total + lowrank.norm(b - within_rank(b, kept, n + B), a - within_rank(a, kept, n + A))
        return total

    def begin(self, params: Tensors, memory: Tensors, inbox: Inbox, loss: Loss, probe: Tensors) -> tuple[Tensors, Tensors]:
        """Cut to the rank left."""
        params = {n: within_rank(t, memory["rank"], n) if n.endswith((A, B)) else t for n, t in params.items()}
        return params, memory | {"tail": self._tail(params, memory["rank"])}

    def wrap(self, loss: Loss, anchor: Tensors, memory: Tensors, inbox: Inbox) -> Loss:
        """The penalty draws the tail to zero; its norm is smoothed at zero by 1e-6."""

        def penalised(p: Tensors, batch: Tensors) -> Tensor:
            kept, total = (memory["rank"] * self.keep).floor().long(), torch.zeros(())
            for n in layers(p):
                a, b = p[n + A] - within_rank(p[n + A], kept, n + A), p[n + B] - within_rank(p[n + B], kept, n + B)
                total = total + (a.square().sum() * b.square().sum() + 1e-12).sqrt()
            return loss(p, batch) + self.penalty * total

        return penalised if self.penalty else loss

    def end(self, params: Tensors, memory: Tensors, inbox: Inbox, trained: Trained) -> tuple[Tensors, Tensors, Tensors]:
        """Prune when the tail got smaller; at least rank 1 stays."""
        rank, before = memory["rank"], memory["tail"]
        pruned = (rank * self.keep).floor().long().clamp_min(1)
        smaller = (self._tail(params, rank) < before) & (before > 0)
        kept = {n: t for n, t in memory.items() if n != "tail"}
        return params, kept | {"rank": torch.where(smaller, pruned, rank)}, {}


def hetlora(base: Method, keep: float = 0.99, penalty: float = 5e-3, prune: bool = False) -> Method:
    """HetLoRA: clients of different ranks, truncated, padded and weighted by norm; ``prune`` adds self-pruning of ranks."""
    if not 0 < keep <= 1:
        raise ValueError(f"hetlora: keep = {keep!r}: must be above 0 and at most 1")
    plugins = (*base.plugins, RankPruning(keep, penalty)) if prune else base.plugins
    return replace(base, aggregate=ByNorm(), plugins=plugins)
