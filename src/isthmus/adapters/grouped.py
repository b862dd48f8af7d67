"""A loss with its own vmap rule: client code is written for one client, and under ``vmap`` all clients' rows run at once.

``torch.func.vmap`` cannot go through a Hugging Face model (its mask code branches on data).  So the loss is one autograd function
that computes value and gradient together.  Called plainly it serves one client; under ``vmap`` it gets every client's tensors on a
leading axis and may lay their rows behind each other.  Whatever a plug-in does to the parameters before the loss stays ordinary
torch code and is differentiated as usual.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.tensors import Tensors
from ..core.types import Loss

ValueAndGrads = Callable[[Tensors, tuple[str, ...], Tensors], tuple[Tensor, Tensors]]
"""(params, names to differentiate, batch) to losses (K,) and gradients (K, *shape).

Differentiated params and batch tensors are (K, ...); other params are (K, *shape), or (*shape) where all clients have the same.
"""


class _Spec:
    """The static part of a call; a class so that ``vmap`` treats it as a leaf that is no tensor."""

    def __init__(self, fn: ValueAndGrads, wanted: tuple[str, ...], fixed: tuple[str, ...], batch: tuple[str, ...]) -> None:
        self.fn, self.wanted, self.fixed, self.batch = fn, wanted, fixed, batch

    def __call__(self, tensors: list[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        names = (*self.wanted, *self.fixed)
        params = dict(zip(names, tensors, strict=False))
        batch = dict(zip(self.batch, tensors[len(names) :], strict=True))
        losses, grads = self.fn(params, self.wanted, batch)
        return losses, tuple(grads[n] for n in self.wanted)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(spec: _Spec, *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        wanted, fixed = len(spec.wanted), len(spec.wanted) + len(spec.fixed)
        full = [t if wanted <= i < fixed else t[None] for i, t in enumerate(tensors)]
        losses, grads = spec(full)
        return losses[0], *(g[0] for g in grads)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def, override]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:])
        ctx.rest = len(inputs) - len(output)

    @staticmethod
    def backward(ctx, grad, *_):  # type: ignore[no-untyped-def, override]
        return None, *(grad * g for g in ctx.saved_tensors), *[None] * ctx.rest

    @staticmethod
    def vmap(info, in_dims, spec: _Spec, *tensors: Tensor):  # type: ignore[no-untyped-def]
        k, wanted, fixed = info.batch_size, len(spec.wanted), len(spec.wanted) + len(spec.fixed)
        full = []
        for i, (t, d) in enumerate(zip(tensors, in_dims[1:], strict=True)):
            if d is not None:
                full.append(t.movedim(d, 0))
            else:
                full.append(t if wanted <= i < fixed else t.expand(k, *t.shape))
        losses, grads = spec(full)
        return (losses, *grads), (0,) * (1 + len(grads))


def grouped(fn: ValueAndGrads, accepts: Callable[[str], bool]) -> Loss:
    """(params, batch) to a scalar for one client, differentiable in those params that are being differentiated.

    Args:
        fn: computes values and gradients for K clients.
        accepts: which parameter names ``fn`` knows; others (control variates) are left out.
    """

    def loss(params: Tensors, batch: Tensors) -> Tensor:
        names = [n for n in sorted(params) if accepts(n)]
        wanted = tuple(n for n in names if params[n].requires_grad)
        fixed, fields = tuple(n for n in names if n not in wanted), tuple(sorted(batch))
        spec = _Spec(fn, wanted, fixed, fields)
        tensors = [params[n] for n in (*wanted, *fixed)] + [batch[n] for n in fields]
        return _Loss.apply(spec, *tensors)[0]

    return loss
