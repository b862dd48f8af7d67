"""LoRA factors on the server: which layers there are, and what each client's factors are after local work."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.tensors import Tensors
from ..core.types import Server, Update

A, B = ".lora_a", ".lora_b"
FACTORS = ("*" + A, "*" + B)
DELTA = ".delta"  # what methods merged into the base
BYPASS_A, BYPASS_B = ".bypass_a", ".bypass_b"  # frozen factors that a client adds for itself


def layers(names: Tensors) -> list[str]:
    """Layers that have a factor among the names, in order."""
    found = {n.removesuffix(A).removesuffix(B) for n in names if n.endswith((A, B))}
    return sorted(found)


def within_rank(factor: Tensor, rank: Tensor | None, name: str) -> Tensor:
    """``factor`` (K, r, in) or (K, out, r) with zeros beyond each client's rank (K,)."""
    if rank is None:
        return factor
    axis = factor.dim() - (2 if name.endswith(A) else 1)
    keep = torch.arange(factor.shape[axis]) < rank[..., None]
    shape = [1] * factor.dim()
    shape[axis] = factor.shape[axis]
    if rank.dim():
        shape[0] = len(rank)
    return factor * keep.reshape(shape).to(factor.dtype)


def trained(update: Update, server: Server, layer: str) -> tuple[Tensor, Tensor]:
    """Each client's factors after local work: b (K, out, r), a (K, r, in).

    What a client started from is what the server sent, cut to its rank; a factor that did not travel is still that.
    """
    k = len(update.weight)
    out = []
    for name in (layer + B, layer + A):
        start = within_rank(server.shared[name].expand(k, *server.shared[name].shape), update.rank, name)
        out.append(start + update.payload[name] if name in update.payload else start)
    return out[0], out[1]


def roles_of(before: Tensors, after: Tensors) -> dict[str, dict[str, float]]:
    """Of the clients' models (K, ...), for the update P = B A of each role, over all layers.

    ``change``: ||P_after - P_before|| / ||P_after||; ``dispersion``: mean_k ||P_k - mean||^2 / ||mean||^2 of P_after.
    """
    sums: dict[str, Tensor] = {}
    for n in layers(after):
        if n + A in after and n + B in after:
            p, q = after[n + B] @ after[n + A], before[n + B] @ before[n + A]
            mean = p.mean(0)
            now = torch.stack([(p - q).square().sum(), p.square().sum(), (p - mean).square().sum() / len(p), mean.square().sum()])
            role = n.rpartition(".")[2]
            sums[role] = sums.get(role, torch.zeros(4)) + now
    ratio = lambda x, y: float(x / y.clamp_min(1e-30))  # noqa: E731
    return {role: {"change": ratio(s[0], s[1]) ** 0.5, "dispersion": ratio(s[2], s[3])} for role, s in sums.items()}
