"""Frozen linear maps at the machine's speed.

torch's default fp32 product goes to a library that leaves wide vector units alone on some processors; oneDNN's does not.  The op is
not public API, so it is chosen by a short measurement at start, only where it gives the same result, and `F.linear` is always there.
"""

from __future__ import annotations

import functools
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Product(torch.autograd.Function):
    """x W' + b through oneDNN, with the gradient for x only: the weight is frozen."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, weight_t: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.weight_t = weight_t
        return _onednn(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        return _onednn(grad.contiguous(), ctx.weight_t, None), None, None, None


class FrozenLinear(nn.Module):
    """x (..., in) to (..., out); ``fast`` keeps the weight a second time, transposed."""

    def __init__(self, weight: Tensor, bias: Tensor | None, fast: bool) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().contiguous(), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        self.register_buffer("weight_t", weight.detach().t().contiguous() if fast else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The frozen product."""
        if self.weight_t is None:
            return F.linear(x, self.weight, self.bias)
        return _Product.apply(x, self.weight, self.weight_t, self.bias)


def _seconds(fn, repeats: int = 5) -> float:  # type: ignore[no-untyped-def]
    fn()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        fn()
        best = min(best, time.perf_counter() - start)
    return best


@functools.cache
def measure(dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """GFLOP/s of the default product and of oneDNN's at a transformer's size; the latter is 0 where it does not run or differs."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(2048, 384, generator=g).to(dtype), torch.randn(1536, 384, generator=g).to(dtype)
    work = 2 * x.shape[0] * w.numel() / 1e9
    speeds = {"default": work / _seconds(lambda: F.linear(x, w)), "onednn": 0.0}
    try:
        if torch.allclose(_onednn(x, w, None), F.linear(x, w), rtol=1e-3, atol=1e-2):
            speeds["onednn"] = work / _seconds(lambda: _onednn(x, w, None))
    except (RuntimeError, AttributeError):
        pass
    return speeds


def fast_product(choice: str = "auto") -> bool:
    """Whether frozen fp32 layers should go through oneDNN: measured ("auto"), or said ("onednn", "default")."""
    if choice != "auto":
        return choice == "onednn"
    speeds = measure()
    return speeds["onednn"] > 1.1 * speeds["default"]


def replace_linears(model: nn.Module, fast: bool) -> None:
    """Put `FrozenLinear` in the place of every linear map below ``model``, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, FrozenLinear(child.weight, child.bias, fast))
            elif type(child).__name__ == "Conv1D":
                setattr(parent, name, FrozenLinear(child.weight.t(), child.bias, fast))  # type: ignore[union-attr, operator, arg-type]
