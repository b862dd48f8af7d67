"""Hostile clients, to measure what a defence is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ...core import seeds
from ...core.tensors import Tensors
from ...core.types import Channel, Inbox

What = Literal["sign_flip", "scale", "noise", "nan"]


@dataclass(frozen=True)
class Attack(Channel):
    """Some clients send something else than what they learned: "sign_flip": -factor x, "scale": factor x, "noise": factor N(0, 1), "nan"."""

    clients: tuple[int, ...]
    what: What = "sign_flip"
    factor: float = 1.0
    name = "attack"

    def encode(self, payload: Tensors, inbox: Inbox) -> Tensors:
        """Honest clients' payloads pass unchanged."""
        hostile = (inbox.client == torch.tensor(self.clients, dtype=torch.long)).any()
        return {n: torch.where(hostile, self._false(n, t, inbox), t) if t.is_floating_point() else t for n, t in payload.items()}

    def _false(self, name: str, t: torch.Tensor, inbox: Inbox) -> torch.Tensor:
        if self.what == "nan":
            return torch.full_like(t, torch.nan)
        if self.what == "noise":
            return self.factor * seeds.normal(seeds.key(inbox.seed, inbox.round, inbox.client, name, "attack"), t.shape)
        return t * (-self.factor if self.what == "sign_flip" else self.factor)
