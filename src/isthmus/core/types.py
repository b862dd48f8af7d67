"""The nouns.  Everything that a federated method is made of, as small frozen values and one-purpose parts.

Client code is written for ONE client and is pure: no ``.item()``, no branch on a tensor, no writes into its inputs.  The simulator
maps it over clients, a deployment calls it as it is.  A part that cannot promise this sets ``vmappable = False``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from .batches import Batches
from .tensors import Tensors, matches
from .wire import Schema

Loss = Callable[[Tensors, Tensors], Any]
"""(trainable tensors, batch) to a scalar; where a work counts, to sums by name."""


class CompositionError(ValueError):
    """Parts that do not fit together; says which and what to do."""


class Task(Protocol):
    """What the clients optimise: a loss over named trainable tensors, data for each client, and how a model is scored."""

    clients: int
    vmappable: bool

    def init(self, seed: int) -> Tensors:
        """Where every client starts: name to tensor, without a client axis."""
        ...

    def loss(self, params: Tensors, batch: Tensors) -> Tensor:
        """One client's mean loss over the valid rows of a batch, shape ()."""
        ...

    def statistics(self, params: Tensors, batch: Tensors) -> Tensors:
        """Sums over the valid rows of one client's batch, for methods that count; tasks that have none raise."""
        ...

    def rows(self, client: int, split: str) -> Tensor:
        """Numbers of the client's rows, shape (n,), in ``split`` "train" or "test"."""
        ...

    def batch(self, rows: Tensor) -> Tensors:
        """Rows (..., B), -1 for padding, to batch tensors (..., B, ...), among them ``valid`` (..., B)."""
        ...

    def score(self, params: Tensors, rows: Tensor, owner: Tensor | None = None) -> Tensors:
        """Per-row metrics (n,), with a ``weight``; ``owner`` (n,) says which client of stacked params scores a row."""
        ...

    def ranks(self) -> Tensor | None:
        """Adapter rank of each client (clients,), or None where all are equal or there is none."""
        ...

    def trim(self, params: Tensors, rank: Tensor | int) -> Tensors:
        """Zero what lies beyond a client's rank."""
        ...

    def crop(self, params: Tensors, rank: int) -> Tensors:
        """Cut off what lies beyond a client's rank: what such a client really sends."""
        ...

    @property
    def private(self) -> tuple[str, ...]:
        """Patterns of names that stay with the client whatever the method (heads over different label sets)."""
        ...


@dataclass(frozen=True)
class Inbox:
    """What the server tells one client this round."""

    shared: Tensors
    round: int
    client: Tensor  # ()
    directive: Mapping[str, str] = field(default_factory=dict)
    published: frozenset[str] = frozenset()  # shared names that nobody trains
    seed: int = 0
    rank: Tensor | None = None  # (), of the client's adapter, where ranks differ
    weight: Tensor | None = None  # (), examples of the client, known to itself only


@dataclass(frozen=True)
class Update:
    """What a client answers; on the server and in the simulator the same value holds a cohort, with a leading axis K."""

    payload: Tensors  # name to delta against what was received (statistics: against zero)
    weight: Tensor  # ()
    report: Tensors  # scalars
    client: Tensor  # ()
    rank: Tensor | None = None  # ()

    def take(self, index: Tensor) -> Update:
        """The clients ``index`` of a cohort."""
        rank = None if self.rank is None else self.rank[index]
        rows = lambda tree: {n: t[index] for n, t in tree.items()}  # noqa: E731
        return Update(rows(self.payload), self.weight[index], rows(self.report), self.client[index], rank)

    @property
    def shares(self) -> Tensor:
        """Weights that sum to one (K,)."""
        return self.weight / self.weight.sum()


@dataclass(frozen=True)
class Server:
    """All that the server knows between two rounds."""

    shared: Tensors
    state: Tensors  # named by part: ``aggregate/...``, ``apply/...``
    round: int
    seen: tuple[int, ...]  # per client: the last round that it took part in, -1 before the first
    versions: Mapping[str, int]  # per shared name: the round that changed it last, -2 for its start
    published: frozenset[str]  # shared names that parts added and nobody trains (control variates, a merged base)
    seed: int


@dataclass(frozen=True)
class Trained:
    """What local work gives back."""

    params: Tensors
    report: Tensors
    gradient: Tensors  # mean gradient over the steps taken, for parts that keep control variates
    counts: Tensors = field(default_factory=dict)  # what was counted where nothing was trained


class Part:
    """What every filling of a slot declares about itself, checked when a method is built.

    ``needs`` and ``takes`` are properties of a payload on its way: it starts as "exact" (not rounded or thinned out), "individual" (the
    server may look at one client's), "aligned" (an entry stands at the same place in every round), "unbound" (nobody counts on its length) and "reported" (losses come beside it).  ``names`` are patterns that
    the task's trainable tensors must have, ``travels`` patterns that the server must hold.  ``relies`` says what the aggregate must offer,
    for parts that make sense with some aggregates only.
    """

    name: ClassVar[str] = ""
    vmappable: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset()
    takes: ClassVar[frozenset[str]] = frozenset()
    names: ClassVar[tuple[str, ...]] = ()
    travels: ClassVar[tuple[str, ...]] = ()
    relies: ClassVar[frozenset[str]] = frozenset()

    def publish(self, params: Tensors, clients: int) -> Tensors:
        """Further tensors that the server holds and hands out, with their start, in a federation of so many clients."""
        return {}

    def deployed(self) -> Self:
        """As it runs between machines: noise comes from the operating system instead of the run's seed."""
        return self


class Work(Part):
    """Slot: local training, or statistics without gradients."""

    def counts(self, round: int) -> bool:
        """Whether in this round it is given the task's `statistics` in place of the loss."""
        return False

    def plan(self, batches: Batches, round: int) -> Batches:
        """How it wants a client's rows to become steps in a round; statistics see every row once."""
        return batches

    def __call__(self, params: Tensors, loss: Loss, batches: Tensors, inbox: Inbox, rates: Tensors) -> Trained:
        """Batches are (steps, B, ...); ``rates`` multiply the learning rates of the tensors that they name."""
        raise NotImplementedError


@runtime_checkable
class Share(Protocol):
    """Slot: which names leave a client."""

    def scope(self, names: Sequence[str]) -> list[str]:
        """Names that the server holds at all; the rest are private for good."""
        ...

    def __call__(self, names: Sequence[str], inbox: Inbox) -> list[str]:
        """Names that leave this round, a subset of the scope."""
        ...


class Aggregate(Part):
    """Slot: K payloads to one step."""

    @property
    def offers(self) -> frozenset[str]:
        """What other parts may rely on."""
        return frozenset()

    def fits(self, cohort: int) -> None:
        """Raise `CompositionError` where rounds of so many clients are too small for it."""

    def init(self, shared: Tensors) -> Tensors:
        """Its state before the first round."""
        return {}

    def __call__(self, update: Update, server: Server, state: Tensors) -> tuple[Tensors, Tensors]:
        """Decoded payloads (K, *shape) to a step for the shared tensors (*shape), and its next state."""
        raise NotImplementedError


class Apply(Part):
    """Slot: the server's step and state."""

    def init(self, shared: Tensors) -> Tensors:
        """Its state before the first round."""
        return {}

    def __call__(self, server: Server, step: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        """Returns the shared tensors that the step changes, and its next state."""
        raise NotImplementedError


class Invite(Part):
    """Slot: who takes part."""

    def __call__(self, server: Server) -> list[int]:
        """Client numbers, ascending, of this round's cohort."""
        raise NotImplementedError

    def expected(self, clients: int) -> int:
        """Size of a cohort out of so many clients."""
        return clients


class Send(Part):
    """Slot: what each client gets.

    Logically every client sees the server's current shared tensors; ``message`` is what has to travel for that, and ``receive``
    undoes it on the client: ``receive(message(server, seen), cache) == server.shared`` for every client, exactly.  ``carries`` are
    patterns of names in a message beside those of shared tensors.
    """

    carries: ClassVar[tuple[str, ...]] = ()

    def directive(self, server: Server) -> dict[str, str]:
        """Words for this round, the same for all clients."""
        return {}

    def personal(self, server: Server, cohort: Sequence[int]) -> Tensors:
        """Shared tensors that differ from client to client, (K, *shape); they always travel."""
        return {}

    def message(self, server: Server, seen: int) -> Tensors:
        """Tensors for a client that took part in round ``seen`` last (-1: never)."""
        return {n: t for n, t in server.shared.items() if server.versions[n] >= seen}

    def receive(self, message: Tensors, cache: Tensors, round: int, seed: int) -> Tensors:
        """The shared tensors from a message and the client's copy of its last ones (before the first: the start values)."""
        return cache | message


class Plugin(Part):
    """Stack: a client-private wrapper around local work.  Override what you need; keep state in ``memory``, never on self."""

    probe: ClassVar[bool] = False

    def speaks(self, name: str, inbox: Inbox) -> bool:
        """Whether a tensor that it published is in this round's payload."""
        return True

    def init(self, params: Tensors) -> Tensors:
        """Its private memory before the client's first round."""
        return {}

    def begin(self, params: Tensors, memory: Tensors, inbox: Inbox, loss: Loss, probe: Tensors) -> tuple[Tensors, Tensors]:
        """Before local work; returns where it starts from, and the memory.  ``probe``: a batch of its own, if asked for.

        Tensors that it adds under new names are part of the model and frozen until the next round.
        """
        return params, memory

    def look(self, model: Tensors, memory: Tensors, inbox: Inbox, statistics: Loss, batches: Tensors) -> Tensors:
        """Before local work, with the task's statistics and all batches (steps, B, ...) of the round; returns the memory."""
        return memory

    def wrap(self, loss: Loss, anchor: Tensors, memory: Tensors, inbox: Inbox) -> Loss:
        """The loss that local work minimises; ``anchor`` is where it starts from."""
        return loss

    def rates(self, params: Tensors, memory: Tensors, inbox: Inbox) -> Tensors:
        """Factors for the learning rates of some tensors, by name, each ()."""
        return {}

    def end(self, params: Tensors, memory: Tensors, inbox: Inbox, trained: Trained) -> tuple[Tensors, Tensors, Tensors]:
        """After local work; returns params, memory, and further payload (name to delta of a published tensor)."""
        return params, memory, {}


class Channel(Part):
    """Stack: a payload transform; ``encode`` on the client in order, ``decode`` on the server in reverse, both for one client.

    A channel with ``feedback`` keeps what it lost in the client's memory and adds it to the next payload.  One that is
    ``private`` suppresses reports and example counts as well: nothing leaves around it.  Behind one that is ``summed`` the server has the
    sum over clients only, as integers that wrap around; it must be the last.
    """

    private: ClassVar[bool] = False
    summed: ClassVar[bool] = False
    feedback: bool = False

    def encode(self, payload: Tensors, inbox: Inbox) -> Tensors:
        """One client's payload to what travels."""
        return payload

    def decode(self, payload: Tensors, like: Schema) -> Tensors:
        """What travelled to one client's payload, which had the schema ``like`` before encoding."""
        return payload


class Observer(Part):
    """Stack: numbers for the ledger from one round's decoded updates; ``headlines`` are names that a run's summary shows too."""

    headlines: ClassVar[tuple[str, ...]] = ()

    def __call__(self, update: Update, before: Server, after: Server) -> dict[str, float]:
        """Name to value."""
        raise NotImplementedError


@dataclass(frozen=True)
class Method:
    """A federated method: six slots and three stacks.  A new one is usually ``replace(base, share=...)``.

    Raises:
        CompositionError: when a part needs what an earlier one took away (noise after rounding, a median over masked sums).
    """

    name: str
    work: Work
    share: Share
    aggregate: Aggregate
    apply: Apply
    invite: Invite
    send: Send
    plugins: tuple[Plugin, ...] = ()
    channels: tuple[Channel, ...] = ()
    observers: tuple[Observer, ...] = ()
    pooled: bool = False  # the reference line that sees all data at one client

    def __post_init__(self) -> None:
        names = [p.name for p in (*self.plugins, *self.channels)]
        if any(c.summed for c in self.channels[:-1]):
            raise CompositionError(f"method {self.name}: a channel stands behind one whose values are summed; make that one the last")
        if doubled := {n for n in names if names.count(n) > 1}:
            raise CompositionError(f"method {self.name}: {sorted(doubled)[0]!r} stands in its stacks twice")
        has: set[str] = {"exact", "individual", "aligned", "unbound", "reported"}
        took: dict[str, Part] = {}
        for part in (*self.channels, self.aggregate, *self.observers):
            feedback = {"aligned"} if isinstance(part, Channel) and part.feedback else set()
            if missing := (part.needs | feedback) - has:
                what = sorted(missing)[0]
                raise CompositionError(
                    f"method {self.name}: {_title(part)} needs the payload {what!r}, which {_title(took[what])} took away; "
                    f"put it before, or leave one of them out{' (or set feedback = false)' if what == 'aligned' else ''}"
                )
            takes = part.takes | ({"reported"} if isinstance(part, Channel) and (part.private or part.summed) else set())
            took |= dict.fromkeys(takes, part)
            has -= takes
        for part in (self.work, self.send, self.apply, *self.plugins, *self.channels, *self.observers):
            if lacking := part.relies - self.aggregate.offers:
                raise CompositionError(
                    f"method {self.name}: {_title(part)} relies on an aggregate that offers {sorted(lacking)[0]!r}; "
                    f"{_title(self.aggregate)} does not (join the methods the other way round, or leave one of them out)"
                )

    @property
    def private(self) -> bool:
        """Whether example counts must not leave the client, nor reports."""
        return any(c.private for c in self.channels)

    @property
    def summed(self) -> bool:
        """Whether the server has only the sum of the updates."""
        return any(c.summed for c in self.channels)

    @property
    def personal(self) -> bool:
        """Whether a client's model is more than its own tensors beside the shared ones: a plug-in changes where it begins."""
        return any(type(p).begin is not Plugin.begin for p in self.plugins)

    def deployed(self) -> Method:
        """As it runs between machines, see `Part.deployed`."""
        channels, plugins = tuple(c.deployed() for c in self.channels), tuple(p.deployed() for p in self.plugins)
        return replace(self, aggregate=self.aggregate.deployed(), apply=self.apply.deployed(), channels=channels, plugins=plugins)

    @property
    def vmappable(self) -> bool:
        """Whether all client parts can be mapped over clients."""
        return all(p.vmappable for p in (self.work, *self.plugins, *self.channels))

    def check(self, start: Tensors) -> None:
        """Raise `CompositionError` where a part asks for tensors that the task does not train, or the method does not share."""
        shared = self.share.scope(list(start))
        for part in (self.work, self.aggregate, self.apply, self.send, *self.plugins, *self.channels):
            for pattern in (*part.names, *part.travels):
                if not any(matches(n, (pattern,)) for n in start):
                    have = ", ".join(sorted(start)[:4])
                    raise CompositionError(
                        f"method {self.name}: {_title(part)} works on tensors named {pattern!r}; this task trains {have}, ... "
                        f"(choose another method, or another [adapter])"
                    )
            for pattern in part.travels:
                if not any(matches(n, (pattern,)) for n in shared):
                    raise CompositionError(
                        f"method {self.name}: {_title(part)} needs {pattern!r} on the server; another part keeps it with the clients"
                    )


def _title(part: object) -> str:
    return type(part).__name__


def scalar(x: float) -> Tensor:
    """A tensor of shape ()."""
    return torch.tensor(x)
