"""Local work: minibatch training with a functional optimiser, the same for one client and for all under ``vmap``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad_and_value

from ..core.tensors import Tensors
from ..core.types import Inbox, Loss, Share, Trained, Work
from .share import ByName

Optimiser = Literal["adamw", "sgd"]


@dataclass(frozen=True)
class LocalTraining(Work):
    """``optimiser`` steps over the batches that the engine drew; padded steps change nothing.

    What trains is one flat vector, so that a step costs a handful of operations however many tensors there are.  Optimiser moments
    start at zero each round (derived; the federated LoRA literature resets them too).
    """

    optimiser: Optimiser = "adamw"
    lr: float = 3e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip: float | None = None
    trains: Share = field(default_factory=ByName)

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"train.lr = {self.lr!r}: must be above 0")

    def __call__(self, params: Tensors, loss: Loss, batches: Tensors, inbox: Inbox, rates: Tensors) -> Trained:
        """Batches are (steps, B, ...) with ``valid`` (steps, B)."""
        names = self.trains(list(params), inbox)
        fixed = {n: t for n, t in params.items() if n not in names}
        shapes, sizes = [params[n].shape for n in names], [params[n].numel() for n in names]

        def split(flat: Tensor) -> Tensors:
            return {n: t.view(s) for n, t, s in zip(names, flat.split(sizes), shapes, strict=True)}

        flat = torch.cat([params[n].reshape(-1) for n in names])
        step = grad_and_value(lambda vector, batch: loss({**fixed, **split(vector)}, batch))
        lr: Tensor | float = self.lr
        if rates:
            one = torch.ones(())
            lr = self.lr * torch.cat([rates.get(n, one).expand(size) for n, size in zip(names, sizes, strict=True)])
        state, update = self._optimiser(flat)
        real = batches["valid"].any(1).to(flat.dtype)  # (steps,), 0 for padding
        total, losses = torch.zeros_like(flat), torch.zeros(())
        for i in range(len(real)):
            gradient, value = step(flat, {n: t[i] for n, t in batches.items()})
            if self.clip is not None:
                gradient = gradient * torch.clamp(self.clip / (gradient.norm() + 1e-12), max=1.0)
            flat, state = update(flat, gradient, state, i + 1, lr * real[i])
            total, losses = torch.addcmul(total, gradient, real[i]), losses + value.detach() * real[i]
        taken = real.sum().clamp_min(1)
        return Trained(fixed | split(flat), {"loss": losses / taken, "steps": taken}, split(total / taken))

    def _optimiser(self, flat: Tensor) -> tuple[tuple[Tensor, ...], Callable[..., tuple[Tensor, tuple[Tensor, ...]]]]:
        """Start state and (flat, gradient, state, step, learning rate) -> (flat, state).

        A padded step has the learning rate 0.  Padded steps come last, so the state that they spoil is never used.
        """
        decay = self.weight_decay
        if self.optimiser == "sgd":

            def sgd(x: Tensor, g: Tensor, state: tuple[Tensor, ...], t: int, lr: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
                g = g + decay * x if decay else g
                if not self.momentum:
                    return torch.addcmul(x, g, lr, value=-1), ()
                velocity = self.momentum * state[0] + g
                return torch.addcmul(x, velocity, lr, value=-1), (velocity,)

            return (torch.zeros_like(flat),) if self.momentum else (), sgd
        if self.optimiser != "adamw":
            raise ValueError(f"train.optimiser = {self.optimiser!r}: accepted are 'adamw' and 'sgd'")
        b1, b2 = self.betas

        def adamw(x: Tensor, g: Tensor, state: tuple[Tensor, ...], t: int, lr: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            m = b1 * state[0] + (1 - b1) * g
            v = b2 * state[1] + (1 - b2) * g * g
            x = x - lr * decay * x if decay else x
            return x - lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + self.eps), (m, v)

        return (torch.zeros_like(flat), torch.zeros_like(flat)), adamw


@dataclass(frozen=True)
class NoTraining(Work):
    """Gives back what it received: measures what the platform itself costs."""

    def __call__(self, params: Tensors, loss: Loss, batches: Tensors, inbox: Inbox, rates: Tensors) -> Trained:
        """Nothing is trained; the report says so."""
        return Trained(params, {"loss": torch.zeros(()), "steps": torch.zeros(())}, {})
