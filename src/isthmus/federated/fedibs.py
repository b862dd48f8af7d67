"""FedIBS: only biases of the feed-forward projections train; each client keeps those that matter to it and shares the rest.

A client estimates the diagonal Fisher information of its biases on its own data.  Coordinates whose overwriting by the federation's
value would cost it most become personal: in round t a fraction ``rho (1 - cos(pi min(t, horizon) / horizon)) / 2`` of each bias,
and one that is personal stays so.  It sends the shareable coordinates and a bit mask; the server averages each over the clients that
sent it.  No public text of the source was found: schedule and score are derived (Laplace: the loss rises by about F_i (b_i - g_i)^2
when client's b_i is replaced by the federation's g_i).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad

from ..core import seeds
from ..core.tensors import Tensors, matches, prefixed, tmap, under
from ..core.types import Channel, CompositionError, Inbox, Loss, Method, Plugin, Trained
from ..core.wire import Schema
from ..parts.aggregate import MASK, MeanWherePresent

Score = Literal["laplace", "fisher", "change", "random"]


@dataclass(frozen=True)
class Schedule:
    """How many coordinates of a tensor are personal in a round."""

    rho: float
    horizon: int

    def count(self, entries: int, round: int) -> int:
        """0 in round 0, floor(rho entries) from round ``horizon`` on."""
        return math.floor(self.rho * entries * (1 - math.cos(math.pi * min(round, self.horizon) / self.horizon)) / 2 + 1e-9)


@dataclass(frozen=True)
class Selection(Plugin):
    """Memory, per bias: ``fisher.*`` (exponential mean of squared gradients), ``mask.*`` (1 = personal), ``own.*`` (its values)."""

    schedule: Schedule
    score: Score = "laplace"
    decay: float = 0.5
    told: bool = True  # whether masks travel
    names = travels = ("*.bias",)
    name = "fedibs"
    probe = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "relies", frozenset({"masks"}) if self.told else frozenset())

    def _biases(self, params: Tensors) -> Tensors:
        return {n: t for n, t in params.items() if matches(n, self.names) and not n.startswith("head.")}

    def publish(self, params: Tensors, clients: int) -> Tensors:
        """The masks' place in a payload; the server's own stay at 0."""
        if not self.told:
            return {}
        return prefixed(tmap(lambda t: torch.zeros_like(t, dtype=torch.bool), self._biases(params)), MASK)

    def init(self, params: Tensors) -> Tensors:
        """Nothing is personal."""
        biases = self._biases(params)
        out = prefixed(biases, "own.") | prefixed(tmap(torch.zeros_like, biases), "fisher.")
        return out | prefixed(tmap(lambda t: torch.zeros_like(t, dtype=torch.bool), biases), MASK)

    def begin(self, params: Tensors, memory: Tensors, inbox: Inbox, loss: Loss, probe: Tensors) -> tuple[Tensors, Tensors]:
        """Personal coordinates keep their own value; the Fisher estimate gains one batch."""
        biases = self._biases(params)
        params = params | {n: torch.where(memory[MASK + n], memory["own." + n], t) for n, t in biases.items()}
        slope = grad(lambda b: loss(params | b, probe))({n: params[n] for n in biases})
        fisher = {n: self.decay * memory["fisher." + n] + (1 - self.decay) * g.square() for n, g in slope.items()}
        return params, memory | prefixed(fisher, "fisher.")

    def end(self, params: Tensors, memory: Tensors, inbox: Inbox, trained: Trained) -> tuple[Tensors, Tensors, Tensors]:
        """Choose this round's personal coordinates; the mask in the payload marks the others."""
        memory, extra, params = dict(memory), {}, dict(params)
        for n, own in self._biases(params).items():
            count = self.schedule.count(own.numel(), inbox.round)
            score = torch.where(memory[MASK + n], torch.inf, self._score(n, own, memory, inbox))
            chosen = score.topk(count).indices
            mask = torch.zeros_like(own).scatter(0, chosen, 1.0) > 0
            if self.told:
                extra[MASK + n] = ~mask
            else:  # a personal coordinate does not change, the others by as much more as the schedule says is missing in their mean
                start = torch.where(memory[MASK + n], memory["own." + n], inbox.shared[n])
                share = max(own.numel() - count, 1) / own.numel()
                params[n] = torch.where(mask, start, start + (own - start) / share)
            memory |= {MASK + n: mask, "own." + n: own}
        return params, memory, extra

    def _score(self, name: str, own: Tensor, memory: Tensors, inbox: Inbox) -> Tensor:
        change = (own - inbox.shared[name]).square()
        if self.score == "random":
            return seeds.uniform(seeds.key(inbox.seed, inbox.client, name), own.shape)
        return {"laplace": memory["fisher." + name] * change, "fisher": memory["fisher." + name], "change": change}[self.score]


@dataclass(frozen=True)
class OnlyPresent(Channel):
    """Of a tensor with a mask beside it, the marked values (in order) and the mask as bits travel: 4 p + ceil(n / 8) bytes."""

    schedule: Schedule
    name = "present"
    takes = frozenset({"exact", "aligned"})
    relies = frozenset({"masks"})

    def encode(self, payload: Tensors, inbox: Inbox) -> Tensors:
        """``<name>`` (n,) and ``mask.<name>`` (n,) to (p,) and (ceil(n / 8),) bytes."""
        out = dict(payload)
        for n, mask in under(payload, MASK).items():
            p = mask.numel() - self.schedule.count(mask.numel(), inbox.round)
            places = torch.argsort((~mask).to(torch.uint8), stable=True)[:p]
            out |= {n: payload[n].gather(0, places), MASK + n: _bits(mask)}
        return out

    def decode(self, payload: Tensors, like: Schema) -> Tensors:
        """Zeros where nothing travelled."""
        out = dict(payload)
        for n, bits in under(payload, MASK).items():
            mask = _unbits(bits, like[n][1][0])
            if not payload[n].numel():
                out |= {n: torch.zeros(mask.shape, dtype=like[n][0]), MASK + n: mask}
                continue
            place = (torch.cumsum(mask, 0) - 1).clamp(0, payload[n].shape[0] - 1)
            out |= {n: torch.where(mask, payload[n].gather(0, place), 0.0), MASK + n: mask}
        return out


_POWERS = torch.tensor([1 << i for i in range(8)], dtype=torch.int32)


def _bits(mask: Tensor) -> Tensor:
    """(n,) bool to (ceil(n / 8),) uint8, lowest bit first."""
    whole = torch.cat([mask, mask.new_zeros(-mask.shape[0] % 8)]).reshape(-1, 8)
    return (whole * _POWERS).sum(1).to(torch.uint8)


def _unbits(bits: Tensor, n: int) -> Tensor:
    """The inverse of `_bits`."""
    return ((bits[:, None] & _POWERS.to(torch.uint8)) != 0).reshape(-1)[:n]


def fedibs(
    base: Method, rho: float = 0.5, horizon: int = 10, score: Score = "laplace", decay: float = 0.5, private_masks: bool = False
) -> Method:
    """FedIBS: biases alone; each client keeps the ``rho`` that matter most to it and shares the rest; ``rho`` = 0 is the base.

    ``private_masks``: masks do not travel, so that noise and secure sums can protect all that does; every bias is sent whole, and the mean over
    those who shared a coordinate becomes what the schedule says it is on average (derived).
    """
    if not 0 <= rho <= 1:
        raise ValueError(f"fedibs: rho = {rho!r}: must be between 0 and 1")
    if horizon < 1 or not 0 <= decay < 1:
        raise ValueError(f"fedibs: horizon = {horizon!r} must be at least 1, decay = {decay!r} at least 0 and below 1")
    schedule = Schedule(rho, horizon)
    if base.private and not private_masks:
        raise CompositionError("fedibs: its masks would leave beside what is protected; set private_masks = true")
    if private_masks:
        return replace(base, plugins=(*base.plugins, Selection(schedule, score, decay, told=False)))
    return replace(
        base,
        plugins=(*base.plugins, Selection(schedule, score, decay)),
        channels=(*base.channels, OnlyPresent(schedule)),
        aggregate=MeanWherePresent(base.aggregate),
    )
