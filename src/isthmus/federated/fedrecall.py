"""FedReCall: a client-private plug-in around any federated LoRA method that recalls what averaging diluted.

After a participation the client knows its own contribution to the weights, D = (B_k A_k + P_k) - B_start A_start, and keeps its singular
directions.  When it next takes part it sees how far the federation's new model moved along them.  A direction of which less than
``retention`` arrived, and which the client had found diluted at the participation before as well, is put into a private frozen
low-rank bypass P with exactly what is missing, so that u_i' (dW_now + P) v_i = u_i' dW_start v_i + sigma_i.  One private batch decides
whether, and how strongly, P is used.  What travels, what is aggregated and what trains stay those of the wrapped method.

No public text of the source was found; the contribution D (rather than B_k A_k), the two-participation test and the choice among
strengths are derived.  Units are those of B A throughout: the adapter's scale multiplies both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core import lowrank
from ..core.tensors import Tensors, prefixed, under
from ..core.types import Inbox, Loss, Method, Plugin, Trained
from ..parts.factors import BYPASS_A, BYPASS_B, DELTA, A, B, layers


@dataclass(frozen=True)
class ReCall(Plugin):
    """Memory per layer, never sent, with m = min(2 r + q, out, in) and w = min(q, m).

    ``u`` (out, m), ``v`` (in, m), ``s`` (m,): directions and strengths of the last contribution, strongest first; ``before`` (m,): how much of
    each the model held when that participation began; ``old_u`` (out, w), ``old_v`` (in, w): what was diluted at the one before.
    For reports: ``seen`` (2, m), strengths and the share of each that came back; ``strength``, of the bypass now.
    """

    q: int = 8
    retention: float = 0.5
    reliability: float = 0.3
    strengths: tuple[float, ...] = (1.0, 0.5)
    inside: bool = True
    name = "fedrecall"
    names = ("*.lora_b",)
    probe = True

    def init(self, params: Tensors) -> Tensors:
        """No contribution yet, so nothing is missing."""
        if not self.q:
            return {}
        memory: Tensors = {"strength": torch.zeros(())}
        for n in layers(params):
            (r, i), o = params[n + A].shape, params[n + B].shape[0]
            m = min(2 * r + self.q, o, i)
            shapes = {"u": (o, m), "v": (i, m), "s": (m,), "before": (m,), "seen": (2, m)}
            shapes |= {"old_u": (o, min(self.q, m)), "old_v": (i, min(self.q, m))}
            memory |= {f"{n}.{what}": torch.zeros(shape) for what, shape in shapes.items()}
        return memory

    def begin(self, params: Tensors, memory: Tensors, inbox: Inbox, loss: Loss, probe: Tensors) -> tuple[Tensors, Tensors]:
        """Find what is missing; the probe chooses how much of it to add, nothing unless the loss falls."""
        if not self.q:
            return params, memory
        missing: Tensors = {}
        memory = dict(memory)
        for n in layers(params):
            found, kept = self._missing(under(memory, f"{n}."), params[n + B], params[n + A], inbox.shared.get(n + DELTA))
            missing |= prefixed(found, n)
            memory |= prefixed(kept, f"{n}.")
        trials = torch.tensor([0.0, *self.strengths])
        losses = torch.stack([loss(params | _times(missing, x), probe) for x in trials.unbind()])
        chosen = trials.gather(0, losses.argmin()[None])[0]  # the first of equals is 0
        bypass = _times(missing, chosen)
        start = {n: t for n, t in params.items() if n.endswith((A, B))}
        return params | bypass, memory | {"strength": chosen} | prefixed(start | bypass, "start/")

    def wrap(self, loss: Loss, anchor: Tensors, memory: Tensors, inbox: Inbox) -> Loss:
        """Where training must not see the bypass, the model without it."""
        if self.inside or not self.q:
            return loss
        without = {n: torch.zeros_like(t) for n, t in under(memory, "start/").items() if n.endswith((BYPASS_A, BYPASS_B))}
        return lambda p, batch: loss(p | without, batch)

    def _missing(self, memory: Tensors, b: Tensor, a: Tensor, delta: Tensor | None) -> tuple[Tensors, Tensors]:
        """Of one layer: the bypass that restores its diluted and reliable directions, and what to keep."""
        u, v, s = memory["u"], memory["v"], memory["s"]
        gap = s - (held(u, v, b, a, delta) - memory["before"])
        diluted = (gap > (1 - self.retention) * s) & (s > 1e-3 * s.amax())
        met = ((u.mT @ memory["old_u"]).abs() * (v.mT @ memory["old_v"]).abs()).amax(-1)
        wide = memory["old_u"].shape[-1]
        recalled, at = torch.where(diluted & (met >= self.reliability), gap, 0.0).topk(wide)
        found = {BYPASS_B: u[:, at] * recalled, BYPASS_A: v[:, at].mT}
        marked, at = torch.where(diluted, gap, 0.0).topk(wide)
        kept = {"old_u": u[:, at] * (marked > 0), "old_v": v[:, at] * (marked > 0)}
        return found, kept | {"seen": torch.stack([s, 1 - gap / s.clamp_min(1e-12)])}

    def end(self, params: Tensors, memory: Tensors, inbox: Inbox, trained: Trained) -> tuple[Tensors, Tensors, Tensors]:
        """Keep the directions of this participation's contribution, the bypass included."""
        if not self.q:
            return params, memory, {}
        start = under(memory, "start/")
        memory = {n: t for n, t in memory.items() if not n.startswith("start/")}
        for n in layers(params):
            p_b = start[n + BYPASS_B] if self.inside else torch.zeros_like(start[n + BYPASS_B])
            u, s, vh = contribution(params[n + B], params[n + A], p_b, *(start[n + f] for f in (BYPASS_A, B, A)))
            real = s > 1e-6 * s.amax().clamp_min(1e-12)  # directions of what is zero are arbitrary
            u, v, s = u * real, vh.mT * real, s * real
            before = held(u, v, start[n + B], start[n + A], inbox.shared.get(n + DELTA))
            memory |= {f"{n}.u": u, f"{n}.v": v, f"{n}.s": s, f"{n}.before": before}
        return params, memory, {}


def contribution(b: Tensor, a: Tensor, p_b: Tensor, p_a: Tensor, start_b: Tensor, start_a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """SVD (u, s, vh) of ``b a + p_b p_a - start_b start_a`` from its factors: the local contribution of one participation."""
    return lowrank.svd(torch.cat([b, p_b, -start_b], -1), torch.cat([a, p_a, start_a], -2))


def held(u: Tensor, v: Tensor, b: Tensor, a: Tensor, delta: Tensor | None) -> Tensor:
    """``u_i' (b a + delta) v_i`` for each column of u (out, m) and v (in, m): (m,)."""
    along = ((u.mT @ b) * (a @ v).mT).sum(-1)
    return along if delta is None else along + ((u.mT @ delta) * v.mT).sum(-1)


def _times(bypass: Tensors, strength: Tensor) -> Tensors:
    return {n: t * strength if n.endswith(BYPASS_B) else t for n, t in bypass.items()}


def fedrecall(
    base: Method,
    q: int = 8,
    retention: float = 0.5,
    reliability: float = 0.3,
    strengths: tuple[float, ...] = (1.0, 0.5),
    inside: bool = True,
) -> Method:
    """FedReCall around a method: clients recall, privately, the ``q`` directions that averaging diluted most; ``q`` = 0 is the method."""
    if q < 0:
        raise ValueError(f"fedrecall: q = {q!r}: must be at least 0")
    if not 0 < retention <= 1 or not 0 <= reliability <= 1 or not strengths or min(strengths) <= 0:
        raise ValueError(
            f"fedrecall: retention = {retention!r}, reliability = {reliability!r} must be shares, strengths = {strengths!r} above 0"
        )
    return replace(base, plugins=(*base.plugins, ReCall(q, retention, reliability, tuple(strengths), inside)))
