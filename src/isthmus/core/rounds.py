"""The two halves of a round.  No engine, no transport, no clock: pure functions that every engine calls.

The order is fixed here, once.  Client: overlay what the server sent, cut to the client's rank, plug-ins begin (outside in), look, wrap
the loss, work, plug-ins end (inside out), share, encode.  Server: screen, decode in reverse, aggregate, apply.  No part calls another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.func import vmap

from .tensors import Tensors, matches, prefixed, select, under
from .types import Inbox, Loss, Method, Server, Task, Trained, Update
from .wire import Schema, schema, size


class RunError(RuntimeError):
    """A run cannot go on; says why, and what was saved stays."""


class Finished(Exception):
    """A run is over before its last round, as its recipe wants it; says why."""


def scope(method: Method, task: Task, names: Sequence[str]) -> list[str]:
    """Names that the server holds: the method's scope without what the task keeps private."""
    return [n for n in method.share.scope(names) if not matches(n, task.private)]


def client_start(method: Method, task: Task, seed: int, rank: Tensor | None = None) -> Tensors:
    """A client's private memory before its first round: its own tensors, its plug-ins', what lossy channels left, its rank."""
    params = task.init(seed)
    shared = scope(method, task, list(params))
    memory = prefixed({n: t for n, t in params.items() if n not in shared}, "kept/")
    for plugin in method.plugins:
        memory |= prefixed(plugin.init(params), f"{plugin.name}/")
    held = {n: params[n] for n in shared}
    sent = {
        n: torch.zeros_like(t) for n, t in (held | {n: t for p in method.plugins for n, t in p.publish(held, task.clients).items()}).items()
    }
    for i, channel in enumerate(method.channels):
        if channel.feedback:
            memory |= prefixed({n: t for n, t in sent.items() if t.is_floating_point()}, f"{channel.name}/")
        if any(c.feedback for c in method.channels[i + 1 :]):
            sent = channel.encode(sent, Inbox(held, 0, torch.tensor(0), seed=seed))
    ranks = [t for n, t in memory.items() if n.endswith("/rank")] + ([] if rank is None else [rank])
    return memory | ({"rank": torch.stack(ranks).amin()} if ranks else {})


@dataclass(frozen=True)
class Arrived:
    """A client that holds what it was sent, before it works."""

    inbox: Inbox
    params: Tensors  # what trains
    constants: Tensors  # what else its model is made of
    memory: Mapping[str, Tensors]  # of each plug-in
    loss: Loss  # without what plug-ins wrap around it
    task: Task

    @property
    def model(self) -> Tensors:
        """All tensors of its model."""
        return {**self.constants, **self.params}


def arrive(method: Method, task: Task, inbox: Inbox, memory: Tensors, probe: Tensors) -> Arrived:
    """Overlay what the server sent, cut to the client's rank, let plug-ins begin."""
    names = [n.removeprefix("kept/") for n in memory if n.startswith("kept/")]
    names += [n for n in inbox.shared if n not in inbox.published]
    own = under(memory, "kept/") | inbox.shared
    if "rank" in memory:
        own = task.trim(own, memory["rank"])
        inbox = replace(inbox, rank=memory["rank"], shared={n: own[n] for n in inbox.shared})
    constants, params = {n: t for n, t in own.items() if n not in names}, {n: own[n] for n in sorted(names)}

    def loss(p: Tensors, batch: Tensors) -> Tensor:
        return task.loss({**constants, **p}, batch)

    mine = {p.name: under(memory, f"{p.name}/") for p in method.plugins}
    for plugin in method.plugins:
        params, mine[plugin.name] = plugin.begin(params, mine[plugin.name], inbox, loss, probe)
        constants |= {n: params.pop(n) for n in list(params) if n not in names}
    return Arrived(inbox, params, constants, mine, loss, task)


def look(method: Method, at: Arrived, batches: Tensors) -> Arrived:
    """Let plug-ins look at the model that came, on the round's batches."""
    mine = {p.name: p.look(at.model, at.memory[p.name], at.inbox, at.task.statistics, batches) for p in method.plugins}
    return replace(at, memory=mine)


def learn(method: Method, at: Arrived, batches: Tensors) -> Trained:
    """Wrap the loss, work; or count."""
    if method.work.counts(at.inbox.round):
        return method.work(at.params, lambda p, batch: at.task.statistics({**at.constants, **p}, batch), batches, at.inbox, {})
    loss = at.loss
    rates: Tensors = {}
    for plugin in method.plugins:
        loss = plugin.wrap(loss, at.params, at.memory[plugin.name], at.inbox)
        for n, factor in plugin.rates(at.params, at.memory[plugin.name], at.inbox).items():
            rates[n] = rates[n] * factor if n in rates else factor
    return method.work(at.params, loss, batches, at.inbox, rates)


def client_round(
    method: Method, task: Task, inbox: Inbox, memory: Tensors, batches: Tensors, probe: Tensors, weight: Tensor
) -> tuple[Update, Tensors]:
    """One client's part of a round: pure, written for one client, mapped over clients by the simulator."""
    at = look(method, arrive(method, task, inbox, memory, probe), batches)
    trained = learn(method, at, batches)

    weight = torch.ones_like(weight) if method.private else weight
    inbox, anchor, mine, params = replace(at.inbox, weight=weight), at.params, dict(at.memory), trained.params
    extra: Tensors = {}
    for plugin in reversed(method.plugins):
        params, mine[plugin.name], more = plugin.end(params, mine[plugin.name], inbox, trained)
        extra |= more
    leaving = [n for n in method.share(list(anchor), inbox) if n in inbox.shared]
    payload = {n: params[n] - anchor[n] for n in leaving} | extra
    rest: Tensors = {}
    for channel in method.channels:
        if channel.feedback:
            payload = {n: t + memory[f"{channel.name}/{n}"] if t.is_floating_point() else t for n, t in payload.items()}
        sent = channel.encode(payload, inbox)
        if channel.feedback:
            back = channel.decode(sent, schema(payload))
            rest |= prefixed({n: t - back[n] for n, t in payload.items() if t.is_floating_point()}, f"{channel.name}/")
        payload = sent

    after = memory | prefixed({n: params[n] for n in params if f"kept/{n}" in memory}, "kept/") | rest
    for name, tensors in mine.items():
        after |= prefixed(tensors, f"{name}/")
        if "rank" in tensors:  # a plug-in that narrows the client's rank
            after["rank"] = torch.minimum(after["rank"], tensors["rank"])
    if method.summed:  # what is told beside the payload would tell of this client alone
        return Update(payload, torch.ones_like(weight), {}, inbox.client), after
    return Update(payload, weight, {} if method.private else trained.report, inbox.client, after.get("rank")), after


# The server's half


@dataclass(frozen=True)
class Outgoing:
    """What the server hands to an engine: a cohort and its inboxes."""

    cohort: list[int]
    personal: Tensors  # (K, *shape)
    directive: Mapping[str, str]
    server: Server

    @property
    def shared(self) -> Tensors:
        """What every client sees."""
        return self.server.shared

    @property
    def round(self) -> int:
        """Its number."""
        return self.server.round

    @property
    def seed(self) -> int:
        """Of the run."""
        return self.server.seed

    def inbox(self, client: Tensor, personal: Tensors) -> Inbox:
        """The inbox of one client, with its row of the personal tensors."""
        return Inbox(self.shared | personal, self.round, client, self.directive, self.server.published, self.seed)

    def messages(self, method: Method, task: Task) -> dict[int, Tensors]:
        """What has to travel to each client of the cohort; clients that missed the same rounds share one message."""
        ranks, known, out = task.ranks(), {}, {}
        for i, client in enumerate(self.cohort):
            rank, seen = None if ranks is None else int(ranks[client]), self.server.seen[client]
            if (seen, rank) not in known:
                message = method.send.message(self.server, seen)
                known[seen, rank] = message if rank is None else task.crop(message, rank)
            mine = select(self.personal, i)
            out[client] = known[seen, rank] | (mine if rank is None else task.crop(mine, rank))
        return out


@dataclass(frozen=True)
class Replies:
    """What an engine brings back: encoded payloads of those who answered, and why the others did not."""

    update: Update | None
    up: dict[int, tuple[int, int]]  # client to (payload, wire) bytes
    missing: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0  # on the simulated clock, or measured
    forgot: frozenset[int] = frozenset()  # clients that lost what they held: for them the run begins anew
    counted: tuple[int, ...] | None = None  # whose updates are in the one that came, where only their sum is known


class Engine(Protocol):
    """An exchange of inboxes for updates, and the place where client memory lives."""

    limits: Limits

    def exchange(self, outgoing: Outgoing) -> Replies:
        """Deliver inboxes, collect updates; the clients' new memory stays pending."""
        ...

    def commit(self, clients: Sequence[int]) -> None:
        """Make pending memory final for the clients whose update was accepted; drop the others'."""
        ...

    def state(self) -> Tensors:
        """Everything that a checkpoint needs to put the clients back; nothing where clients keep it themselves."""
        ...

    def restore(self, state: Tensors) -> None:
        """The inverse of `state`."""
        ...


@dataclass(frozen=True)
class RoundRecord:
    """One round in the ledger."""

    round: int
    cohort: list[int]
    missing: dict[int, str]
    up: dict[int, tuple[int, int]]
    down: dict[int, tuple[int, int]]
    metrics: dict[str, float]
    seconds: float


def server_start(method: Method, task: Task, seed: int) -> Server:
    """The server before the first round.

    Raises:
        CompositionError: when the method needs tensors that the task does not train.
    """
    params = task.init(seed)
    method.check(params)
    shared = {n: params[n] for n in scope(method, task, list(params))}
    more = {n: t for part in (*method.plugins, method.aggregate) for n, t in part.publish(shared, task.clients).items()}
    shared |= more
    state = prefixed(method.aggregate.init(shared), "aggregate/") | prefixed(method.apply.init(shared), "apply/")
    server = Server(shared, state, 0, (-1,) * task.clients, dict.fromkeys(shared, -2), frozenset(more), seed)
    method.aggregate.fits(method.invite.expected(task.clients))
    return server


def open_round(method: Method, server: Server, cohort: list[int] | None = None) -> Outgoing:
    """Invite a cohort (unless it is given) and say what each of it gets."""
    cohort = method.invite(server) if cohort is None else cohort
    personal, directive = method.send.personal(server, cohort), method.send.directive(server)
    return Outgoing(cohort, personal, directive, server)


def upload_schemas(method: Method, task: Task, outgoing: Outgoing, rank: int | None = None) -> list[Schema]:
    """The schema of one client's payload before each channel and after the last, found by sending an example of zeros through."""
    trained = {n: t for n, t in outgoing.shared.items() if n not in outgoing.server.published}
    inbox = outgoing.inbox(torch.tensor(0), {})
    more = [n for p in method.plugins for n in p.publish(trained, task.clients) if p.speaks(n, inbox)]
    names = [n for n in [*method.share(sorted(trained), inbox), *more] if n in outgoing.shared]
    example = {n: torch.zeros_like(outgoing.shared[n]) for n in names}
    example = example if rank is None or method.summed else task.crop(example, rank)
    out = []
    for channel in method.channels:
        out.append(schema(example))
        example = channel.encode(example, inbox)
    return [*out, schema(example)]


@dataclass(frozen=True)
class Limits:
    """What an update may hold at most; None: anything finite.

    Args:
        weight: examples that a client may claim.
        entry: magnitude of a payload's entries, as they travel.
    """

    weight: float | None = None
    entry: float | None = None


def screen(update: Update, limits: Limits | None = None) -> dict[int, str]:
    """Clients whose update must not be aggregated, and why."""
    limits = limits or Limits()
    k, most = len(update.weight), limits.weight or float("inf")
    fine = torch.isfinite(update.weight) & (update.weight > 0) & (update.weight <= most)
    bad = {int(c): f"example count {float(w)!r}" for c, w, f in zip(update.client, update.weight, fine, strict=True) if not f}
    for n, t in update.payload.items():
        if t.is_floating_point() and t.numel():
            # a sum is finite exactly when no value is NaN or infinite (barring overflow of finite values, which is refused too)
            flat = t.reshape(k, -1)
            for i in (~torch.isfinite(flat.sum(1, dtype=torch.float64))).nonzero().flatten().tolist():
                bad.setdefault(int(update.client[i]), f"non-finite values in {n}")
            if limits.entry is not None:
                for i in (flat.abs().amax(1) > limits.entry).nonzero().flatten().tolist():
                    bad.setdefault(int(update.client[i]), f"an entry of {n} beyond {limits.entry:g}")
    return bad


def summed(update: Update) -> Update:
    """Many updates as the one that a server sees which learns their sum only; integers wrap around, so that masks may cancel."""
    payload = {n: t.sum(0, keepdim=True, dtype=torch.int64) for n, t in update.payload.items()}
    return Update(payload, torch.full((1,), float(len(update.weight))), {}, torch.full((1,), -1))


def decode(method: Method, payload: Tensors, schemas: Sequence[Schema]) -> Tensors:
    """Encoded payloads (K, ...) back through the channels, last first; ``schemas`` as `upload_schemas` gives them."""
    for channel, like in zip(reversed(method.channels), reversed(schemas[:-1]), strict=True):
        if not payload:
            break
        payload = vmap(lambda p, c=channel, s=like: c.decode(p, s))(payload)
    return payload


def close_round(
    method: Method, task: Task, server: Server, outgoing: Outgoing, replies: Replies, limits: Limits | None = None
) -> tuple[Server, RoundRecord]:
    """Screen, decode, aggregate, apply.

    Raises:
        RunError: when clients answered and every single update had to be refused.
    """
    missing, update = dict(replies.missing), replies.update
    if update is not None:
        bad = screen(update, limits)
        missing |= {c: f"refused: {why}" for c, why in bad.items()}
        if len(bad) == len(update.client):
            first = next(iter(bad))
            raise RunError(
                f"round {server.round}: every update was refused (client {first}: {bad[first]}). "
                f"Training diverged or the data holds non-finite values; try a lower train.lr"
            )
        if bad:
            update = update.take(torch.tensor([i for i, c in enumerate(update.client.tolist()) if c not in bad]))
    down = {c: size(message) for c, message in outgoing.messages(method, task).items()}
    metrics: dict[str, float] = {}
    seen = tuple(-1 if c in replies.forgot else s for c, s in enumerate(server.seen))
    after = replace(server, round=server.round + 1, seen=seen)
    if update is not None:
        told = {n.removeprefix("@"): float(t.sum()) for n, t in update.payload.items() if n.startswith("@")}
        update = replace(update, payload=decode(method, update.payload, upload_schemas(method, task, outgoing)))
        step, aggregated = method.aggregate(update, server, under(server.state, "aggregate/"))
        changed, applied = method.apply(server, step, under(server.state, "apply/"))
        took_part = set(update.client.tolist() if replies.counted is None else replies.counted)
        after = Server(
            server.shared | changed,
            prefixed(aggregated, "aggregate/") | prefixed(applied, "apply/"),
            server.round + 1,
            tuple(server.round if c in took_part else s for c, s in enumerate(seen)),
            {**server.versions, **dict.fromkeys(changed, server.round)},
            server.published,
            server.seed,
        )
        metrics = told | {n: float((update.shares * t).sum()) for n, t in update.report.items()}
        for observer in method.observers:
            metrics |= observer(update, server, after)
    return after, RoundRecord(server.round, outgoing.cohort, missing, replies.up, down, metrics, replies.seconds)


def server_round(method: Method, task: Task, server: Server, engine: Engine) -> tuple[Server, RoundRecord]:
    """One round over an engine; client memory becomes final only where the update was accepted."""
    outgoing = open_round(method, server)
    replies = engine.exchange(outgoing)
    after, record = close_round(method, task, server, outgoing, replies, engine.limits)
    engine.commit([c for c in outgoing.cohort if c not in record.missing])
    return after, record


def zero_beyond(payload: Tensors, forms: Sequence[Schema]) -> Tensors:
    """Zero, per client of a stacked payload, what its trimmed message would not carry."""
    out = {}
    for n, t in payload.items():
        rows = [torch.zeros_like(t[i]) for i in range(len(forms))]
        for i, form in enumerate(forms):
            corner = tuple(slice(0, s) for s in form[n][1])
            rows[i][corner] = t[i][corner]
        out[n] = torch.stack(rows)
    return out
