"""A private LoRA beside the shared one (as in FedDPA, Yang et al., NeurIPS 2024, and others): some ranks travel, the others stay.

An adapter of rank r is the sum of r products; the last ``ranks`` of them belong to the client, who trains all r together.  Simple, and what methods
that recall or personalise must be held against.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.tensors import Tensors, prefixed
from ..core.types import Channel, CompositionError, Inbox, Loss, Method, Plugin, Send, Server, Trained
from ..core.wire import Schema
from ..parts.aggregate import WeightedMean
from ..parts.factors import FACTORS, A, B
from ..parts.observe import AggregationError


def _parts(name: str, t: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """What is shared of a factor, and what is the client's."""
    axis = 0 if name.endswith(A) else 1
    first, last = t.tensor_split([t.shape[axis] - own], axis)
    return first, last


def _whole(name: str, shared: Tensor, own: Tensor) -> Tensor:
    return torch.cat([shared, own], 0 if name.endswith(A) else 1)


@dataclass(frozen=True)
class Beside(Plugin):
    """Memory: the client's part of every factor."""

    ranks: int
    name = "beside"
    names = FACTORS

    def init(self, params: Tensors) -> Tensors:
        """As the adapter starts."""
        factors = {n: t for n, t in params.items() if n.endswith((A, B))}
        if factors and self.ranks >= (most := min(t.shape[0] for n, t in factors.items() if n.endswith(A))):
            raise CompositionError(f"beside: ranks = {self.ranks}: the adapter has rank {most}; some of it must be shared")
        return prefixed({n: _parts(n, t, self.ranks)[1].clone() for n, t in factors.items()}, "own.")

    def begin(self, params: Tensors, memory: Tensors, inbox: Inbox, loss: Loss, probe: Tensors) -> tuple[Tensors, Tensors]:
        """The shared part as it came, the own as it was left."""
        if inbox.rank is not None:
            raise CompositionError("beside: needs equal ranks; a smaller one would cut the client's own part off")
        own = {n: _whole(n, _parts(n, t, self.ranks)[0], memory["own." + n]) for n, t in params.items() if n.endswith((A, B))}
        return params | own, memory

    def end(self, params: Tensors, memory: Tensors, inbox: Inbox, trained: Trained) -> tuple[Tensors, Tensors, Tensors]:
        """The own part is kept; for the payload it is as it began."""
        out, kept = dict(params), dict(memory)
        for n, t in params.items():
            if n.endswith((A, B)):
                shared, own = _parts(n, t, self.ranks)
                kept["own." + n], out[n] = own, _whole(n, shared, memory["own." + n])
        return out, kept, {}


@dataclass(frozen=True)
class SharedPart(Channel):
    """Of every factor only the shared ranks travel."""

    ranks: int
    name = "shared_part"

    def encode(self, payload: Tensors, inbox: Inbox) -> Tensors:
        """The rest is zero."""
        return {n: _parts(n, t, self.ranks)[0] if n.endswith((A, B)) else t for n, t in payload.items()}

    def decode(self, payload: Tensors, like: Schema) -> Tensors:
        """Zeros where nothing travelled."""
        out = {}
        for n, t in payload.items():
            out[n] = (
                _whole(n, t, t.new_zeros((self.ranks, t.shape[1]) if n.endswith(A) else (t.shape[0], self.ranks)))
                if n.endswith((A, B))
                else t
            )
        return out


_MARK = "@shared"


@dataclass(frozen=True)
class SendShared(Send):
    """Only the shared ranks travel downwards, too; the server's own last ranks stay as they started."""

    ranks: int = 1
    carries = ("*" + _MARK,)

    def message(self, server: Server, seen: int) -> Tensors:
        """Parts of factors, all else whole."""
        whole = super().message(server, seen)
        return {n + _MARK if n.endswith((A, B)) else n: _parts(n, t, self.ranks)[0] if n.endswith((A, B)) else t for n, t in whole.items()}

    def receive(self, message: Tensors, cache: Tensors, round: int, seed: int) -> Tensors:
        """Parts beside what the client has of the rest."""
        out = cache | {n: t for n, t in message.items() if not n.endswith(_MARK)}
        for n in [n.removesuffix(_MARK) for n in message if n.endswith(_MARK)]:
            out[n] = _whole(n, message[n + _MARK], _parts(n, cache[n], self.ranks)[1])
        return out


def beside(base: Method, ranks: int = 4) -> Method:
    """A private LoRA beside the shared one: the last ``ranks`` of the adapter's rank stay with each client."""
    if ranks < 1:
        raise ValueError(f"beside: ranks = {ranks!r}: must be at least 1")
    if not isinstance(base.aggregate, WeightedMean):
        raise CompositionError(f"beside: {type(base.aggregate).__name__} mixes the ranks; beside goes with a mean of factors")
    return replace(
        base,
        plugins=(*base.plugins, Beside(ranks)),
        channels=(*base.channels, SharedPart(ranks)),
        send=SendShared(ranks),
        observers=tuple(o for o in base.observers if not isinstance(o, AggregationError)),
    )
