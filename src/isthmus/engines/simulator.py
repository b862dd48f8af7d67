"""All clients in one process: the cohort's clients on a leading axis, one mapped call for each chunk of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import vmap

from ..core.batches import Batches
from ..core.rounds import (
    Limits,
    Outgoing,
    Replies,
    RunError,
    arrive,
    client_round,
    client_start,
    learn,
    open_round,
    summed,
    upload_schemas,
    zero_beyond,
)
from ..core.seeds import generator
from ..core.tensors import Tensors, nbytes, select, stack
from ..core.types import Method, Server, Task, Update
from ..core.wire import Schema, schema, schema_size
from .evaluate import Analyse, Evaluation, evaluate

Way = Literal["auto", "together", "loop"]
_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class Faults:
    """What goes wrong in the field, drawn from the run's seed.

    Args:
        dropout: chance that an invited client does not answer.
        deadline: seconds after which the server stops waiting, None: it waits for everybody.
        step_seconds: time of a training step on a client of ordinary speed.
        spread: standard deviation of the logarithm of a client's slowness; a client keeps its speed, and each round varies half as much.
        bandwidth: bytes per second up and down.
    """

    dropout: float = 0.0
    deadline: float | None = None
    step_seconds: float = 0.1
    spread: float = 0.0
    bandwidth: float = 1e6

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ValueError(f"engine.dropout = {self.dropout!r}: must be at least 0 and below 1")

    def answer(self, seed: int, round: int, client: int, steps: int, size: int) -> tuple[float, str]:
        """(seconds, why there is no answer or "")."""
        g = generator(seed, round, client, "faults")
        if float(torch.rand((), generator=g)) < self.dropout:
            return 0.0, "dropped out"
        own = torch.randn((), generator=generator(seed, client, "speed")) * self.spread
        slow = torch.exp(own + torch.randn((), generator=g) * self.spread / 2)
        seconds = steps * self.step_seconds * float(slow) + size / self.bandwidth
        if self.deadline is not None and seconds > self.deadline:
            return seconds, f"late: {seconds:.1f} s of {self.deadline:g} s"
        return seconds, ""


class ClientError(RuntimeError):
    """Something failed inside client code; names the clients and the round."""


@dataclass
class Simulator:
    """The in-process engine, see `core.rounds.Engine`.

    Args:
        method, task: what runs.
        seed: of the run.
        batches: how a client's rows become steps.
        way: "together" maps client code over the clients of a chunk, "loop" runs them one by one (the reference), "auto" takes the
            first where every part can be mapped.
        chunk: clients in one mapped call; memory grows with it, not with the number of clients.  None: as many as have 64 MiB of
            tensors between them, at most 256.
        faults: dropouts and stragglers.
        limits: what an update may hold.
        quorum: clients that must answer, or the run stops.
    """

    method: Method
    task: Task
    seed: int = 0
    batches: Batches = field(default_factory=Batches)
    way: Way = "auto"
    chunk: int | None = None
    faults: Faults = field(default_factory=Faults)
    limits: Limits = field(default_factory=Limits)
    quorum: int = 0
    _pending: list[tuple[list[int], Tensors]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if self.way not in ("auto", "together", "loop"):
            raise ValueError(f"engine.way = {self.way!r}: accepted are 'auto', 'together', 'loop'")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"engine.chunk = {self.chunk!r}: must be at least 1")
        can = self.method.vmappable and self.task.vmappable
        if self.way == "together" and not can:
            raise ValueError("engine.way = 'together': a part of this method or task cannot be mapped over clients; use 'loop'")
        self.together = can and self.way != "loop"
        clients, ranks = self.task.clients, self.task.ranks()
        if ranks is None:
            start = client_start(self.method, self.task, self.seed)
            self._memory = {n: t.expand(clients, *t.shape).clone() for n, t in start.items()}
        else:
            self._memory = stack([client_start(self.method, self.task, self.seed, r) for r in ranks])
        self._examples = torch.tensor([len(self.task.rows(c, "train")) for c in range(clients)])
        if empty := [c for c, n in enumerate(self._examples.tolist()) if not n]:
            raise ValueError(f"client {empty[0]} has no training rows; drop it, or change [partition]")

    # Engine

    def exchange(self, outgoing: Outgoing) -> Replies:
        """Train the cohort, chunk by chunk; clients that drop out or come late are not run."""
        ranks = self.task.ranks()
        forms = {
            r: upload_schemas(self.method, self.task, outgoing, r)[-1] for r in ([None] if ranks is None else sorted(set(ranks.tolist())))
        }
        missing: dict[int, str] = {}
        plan = self.method.work.plan(self.batches, outgoing.round)
        seconds, who = [0.0], []
        for c in outgoing.cohort:
            size = schema_size(forms[None if ranks is None else int(ranks[c])])[1]
            took, why = self.faults.answer(outgoing.seed, outgoing.round, c, plan.count(int(self._examples[c])), 2 * size)
            seconds.append(took if not why else (self.faults.deadline or took))
            missing |= {c: why} if why else {}
            who += [] if why else [c]
        if len(who) < self.quorum:
            first = next((f" (client {c}: {why})" for c, why in missing.items()), "")
            raise RunError(
                f"round {outgoing.round}: {len(who)} of {len(outgoing.cohort)} clients answered{first}; engine.quorum is {self.quorum}"
            )
        self._pending, parts = [], []
        # clients with about as many steps go together, so that few steps are padding
        who.sort(key=lambda c: (-plan.count(int(self._examples[c])), c))
        chunk = self.chunk or max(1, min(256, _CHUNK_BYTES // max(1, nbytes(outgoing.shared) + nbytes(self.memory(0)))))
        for i in range(0, len(who), chunk):
            some = sorted(who[i : i + chunk])
            update, memory = self._run(outgoing, some)
            self._pending.append((some, memory))
            parts.append(update)
        if not parts:
            return Replies(None, {}, missing, max(seconds))
        update = _join(parts)
        update = update.take(torch.argsort(update.client))
        up = self._sizes(outgoing, update, forms)
        if update.rank is not None:
            rows = [self._form(outgoing, int(r), forms) for r in update.rank]
            update = Update(zero_beyond(update.payload, rows), update.weight, update.report, update.client, update.rank)
        counted = tuple(update.client.tolist()) if self.method.summed else None
        return Replies(summed(update) if self.method.summed else update, up, missing, max(seconds), counted=counted)

    def commit(self, clients: Sequence[int]) -> None:
        """Keep the new memory of these clients."""
        accepted = set(clients)
        for some, memory in self._pending:
            keep = [i for i, c in enumerate(some) if c in accepted]
            index = torch.tensor([some[i] for i in keep], dtype=torch.long)
            for n, t in memory.items():
                if n not in self._memory:
                    self._memory[n] = t.new_zeros(self.task.clients, *t.shape[1:])
                self._memory[n][index] = t[keep]
        self._pending = []

    def memory(self, client: int) -> Tensors:
        """One client's memory."""
        return select(self._memory, client)

    def state(self) -> Tensors:
        """All clients' memory, (clients, ...)."""
        return dict(self._memory)

    def restore(self, state: Tensors) -> None:
        """Put the memory back."""
        self._memory = {n: t.clone() for n, t in state.items()}

    def _inputs(self, outgoing: Outgoing, some: list[int]) -> tuple[Tensor, Tensors, Tensors, Tensors]:
        """Numbers, memory, personal tensors and probe of these clients of a cohort, each with a leading axis."""
        index, place = torch.tensor(some), torch.tensor([outgoing.cohort.index(c) for c in some])
        probe: Tensors = {}
        if any(p.probe for p in self.method.plugins):
            rows = [self.batches.probe(self.task.rows(c, "train"), outgoing.seed, outgoing.round, c) for c in some]
            probe = self.task.batch(torch.stack(rows))
        return index, select(self._memory, index), select(outgoing.personal, place), probe

    def _batches(self, outgoing: Outgoing, some: list[int]) -> Tensors | list[Tensors]:
        """Steps of each client: padded to one stack where they run together, else of each one's own length."""
        plan = self.method.work.plan(self.batches, outgoing.round)
        drawn = [plan.draw(self.task.rows(c, "train"), outgoing.seed, outgoing.round, c) for c in some]
        if not self.together:
            return [self.task.batch(d) for d in drawn]
        rows = torch.full((len(some), max(len(d) for d in drawn), plan.size), -1, dtype=torch.long)
        for i, d in enumerate(drawn):
            rows[i, : len(d)] = d
        return self.task.batch(rows)

    def _map(self, one: Callable[..., Any], *columns: Tensor | Tensors | list[Tensors]) -> Any:
        """``one`` of each client, all mapped together or one by one; a list of trees holds one of each client's own shape."""
        if self.together:
            return vmap(one)(*columns)
        pick = lambda column, i: select(column, i) if isinstance(column, dict) else column[i]  # noqa: E731
        rows = [one(*(pick(c, i) for c in columns)) for i in range(len(columns[0]))]
        if isinstance(rows[0], dict):
            return stack(rows)
        return tuple(stack(list(c)) if isinstance(c[0], dict) else torch.stack(c) for c in zip(*rows, strict=True))

    def _run(self, outgoing: Outgoing, some: list[int]) -> tuple[Update, Tensors]:
        def one(client: Tensor, memory: Tensors, personal: Tensors, probe: Tensors, batches: Tensors, weight: Tensor):  # type: ignore[no-untyped-def]
            inbox = outgoing.inbox(client, personal)
            update, memory = client_round(self.method, self.task, inbox, memory, batches, probe, weight)
            rank = {} if update.rank is None else {"rank": update.rank}
            return update.payload, update.weight, update.report, update.client, rank, memory

        try:
            got = self._map(one, *self._inputs(outgoing, some), self._batches(outgoing, some), self._examples[some].float())
        except Exception as error:
            raise ClientError(
                f"round {outgoing.round}, clients {some[0]} to {some[-1]} ({len(some)}), method {self.method.name}: {type(error).__name__}: {error}"
            ) from error
        payload, weight, report, client, rank, after = got
        return Update(payload, weight, report, client, rank.get("rank")), after

    def _form(self, outgoing: Outgoing, rank: int, forms: dict[int | None, Schema]) -> Schema:
        """What a client of this rank sends; ranks may have been pruned since the round began."""
        if rank not in forms:
            forms[rank] = upload_schemas(self.method, self.task, outgoing, rank)[-1]
        return forms[rank]

    def _sizes(self, outgoing: Outgoing, update: Update, forms: dict[int | None, Schema]) -> dict[int, tuple[int, int]]:
        if update.rank is None:
            each = schema_size(schema(select(update.payload, 0)))
            return dict.fromkeys(update.client.tolist(), each)
        return {c: schema_size(self._form(outgoing, r, forms)) for c, r in zip(update.client.tolist(), update.rank.tolist(), strict=True)}

    # Models

    def evaluate(self, server: Server, everywhere: bool = True, tuned: bool = False, analyse: Analyse | None = None) -> Evaluation | None:
        """Both metrics, see `engines.evaluate.evaluate`."""
        return evaluate(self, server, everywhere, tuned, analyse)

    def global_params(self, server: Server) -> Tensors:
        """The aggregated model: what the server shares, and the start of what it never sees."""
        return self.task.init(self.seed) | server.shared

    def personal_params(self, server: Server, client: int) -> Tensors:
        """What one client holds: its own tensors, the server's latest, cut to its rank, and what its plug-ins make of them."""
        return select(self.models(server, [client]), 0)

    def models(self, server: Server, some: list[int], tuned: bool = False) -> Tensors:
        """The models (K, ...) of these clients as they would begin the next round, or, ``tuned``, as its local work would leave them.

        Nothing that they remember changes.
        """
        outgoing = open_round(self.method, server, some)

        def one(client: Tensor, memory: Tensors, personal: Tensors, probe: Tensors, batches: Tensors) -> Tensors:
            at = arrive(self.method, self.task, outgoing.inbox(client, personal), memory, probe)
            return {**at.constants, **learn(self.method, at, batches).params} if tuned else at.model

        batches = self._batches(outgoing, some) if tuned else [{} for _ in some]
        return self._map(one, *self._inputs(outgoing, some), {} if self.together and not tuned else batches)


def _join(parts: list[Update]) -> Update:
    if len(parts) == 1:
        return parts[0]
    cat = lambda trees: {n: torch.cat([t[n] for t in trees]) for n in trees[0]}  # noqa: E731
    return Update(
        cat([p.payload for p in parts]),
        torch.cat([p.weight for p in parts]),
        cat([p.report for p in parts]),
        torch.cat([p.client for p in parts]),
        None if parts[0].rank is None else torch.cat([p.rank for p in parts if p.rank is not None]),
    )
