"""The coordinator's engine: rounds over signed messages, whatever carries them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from ..core.rounds import Limits, Outgoing, Replies, RunError, open_round, upload_schemas
from ..core.tensors import Tensors, stack
from ..core.types import Method, Server, Task, Update
from ..core.wire import Schema, WireError, pack, pad, schema, schema_size, unpack
from .evaluate import Evaluation, means
from .messages import PrivateKey, PublicKey, Refused, get, schema_table, seal, unseal
from .secure import context_of, threshold_of, unmasked


class Transport(Protocol):
    """Carries messages to clients and brings their replies."""

    def ask(self, messages: Mapping[int, bytes], deadline: float | None) -> dict[int, bytes | str]:
        """For every client its reply, or why there is none, after at most ``deadline`` seconds."""
        ...


@dataclass(frozen=True)
class Member:
    """A client that the coordinator has enrolled."""

    name: str
    key: PublicKey
    rows: float | None = None  # examples that it may claim


@dataclass
class RemoteEngine:
    """Rounds between machines, see `core.rounds.Engine`.

    Args:
        method, task: what runs; the coordinator's task needs no rows.
        members: by client number.
        transport: what carries messages.
        key: the coordinator's, which the sites know.
        federation, recipe: their name and digest.
        run: letters and digits that name this run for good, also when it is resumed.
        deadline: seconds that a step of a round waits for clients; None: as long as the transport has hope.
        limits: what an update may hold.
        quorum: clients that must answer, or the run stops.
    """

    method: Method
    task: Task
    members: Sequence[Member]
    transport: Transport
    key: PrivateKey
    federation: str
    recipe: str
    run: str
    deadline: float | None = None
    limits: Limits = field(default_factory=Limits)
    quorum: int = 1

    def _ask(
        self, kind: str, round: int, heads: Mapping[int, dict[str, Any]], bodies: Mapping[int, bytes], reply: Mapping[int, int] | int
    ) -> tuple[dict[int, tuple[dict[str, Any], bytes]], dict[int, str], dict[int, bytes], set[int]]:
        """(accepted heads and bodies, why not, sealed replies, who forgot) of one step; ``reply``: bytes that a body has at most."""
        nonce = {c: secrets.token_hex(12) for c in heads}
        same = {"federation": self.federation, "recipe": self.recipe, "run": self.run, "round": round, "kind": kind}
        out = {c: seal({**same, "client": c, "nonce": nonce[c], **heads[c]}, bodies.get(c, b""), self.key) for c in heads}
        answers = self.transport.ask(out, self.deadline)
        good: dict[int, tuple[dict[str, Any], bytes]] = {}
        missing, sealed, forgot = {}, {}, set()
        for c in heads:
            data = answers.get(c, "no answer")
            if isinstance(data, str):
                missing[c] = data
                continue
            try:
                head, body = unseal(data, self.members[c].key, reply if isinstance(reply, int) else reply[c])
                for n, value in {**same, "client": c, "nonce": nonce[c]}.items():
                    if n != "recipe" and get(head, n, type(value)) != value:
                        raise Refused(f"{n}: the reply is to another message")
                if (status := get(head, "status", str)) != "ok":
                    why = get(head, "why", str, "")[:500]
                    missing[c] = f"{status}: {why}"
                    forgot |= {c} if status == "forgot" else set()
                    continue
            except Refused as error:
                missing[c] = f"refused: {error}"
                continue
            good[c], sealed[c] = (head, body), data
        return good, missing, sealed, forgot

    def _request(self, outgoing: Outgoing, client: int, message: Tensors) -> dict[str, Any]:
        return {
            "seen": outgoing.server.seen[client],
            "schema": schema_table(schema(message)),
            "personal": sorted(outgoing.personal),
            "directive": dict(outgoing.directive),
        }

    # Engine

    def exchange(self, outgoing: Outgoing) -> Replies:
        """One round; updates that are not exactly what the round asks for are refused one by one."""
        started = time.monotonic()
        messages = outgoing.messages(self.method, self.task)
        if self.method.summed:
            replies = self._sum(outgoing, messages)
        else:
            replies = self._collect(outgoing, messages)
        answered = 0 if replies.update is None else len(replies.counted or replies.update.client)
        if answered < max(1, self.quorum):
            first = next((f" (client {c}: {why})" for c, why in replies.missing.items()), "")
            raise RunError(
                f"round {outgoing.round}: {answered} of {len(outgoing.cohort)} clients answered{first}; "
                f"engine.quorum is {max(1, self.quorum)}.  Nothing is lost: start the run again to go on"
            )
        return Replies(replies.update, replies.up, replies.missing, time.monotonic() - started, replies.forgot, replies.counted)

    def _heads(self, outgoing: Outgoing, messages: Mapping[int, Tensors]) -> tuple[dict[int, dict[str, Any]], dict[int, bytes]]:
        heads = {c: self._request(outgoing, c, m) for c, m in messages.items()}
        packed: dict[int, bytes] = {}
        for m in messages.values():
            if id(m) not in packed:
                packed[id(m)] = pack(m) if m else b""
        return heads, {c: packed[id(m)] for c, m in messages.items()}

    def _collect(self, outgoing: Outgoing, messages: Mapping[int, Tensors]) -> Replies:
        ranks, forms = self.task.ranks(), self._forms(outgoing)
        full = forms[None]
        most = {c: schema_size(self._form(outgoing, forms, None if ranks is None else int(ranks[c])))[1] for c in outgoing.cohort}
        heads, bodies = self._heads(outgoing, messages)
        good, missing, _, forgot = self._ask("train", outgoing.round, heads, bodies, most)
        rows: list[tuple[int, Tensors, float, dict[str, float], int | None]] = []
        up: dict[int, tuple[int, int]] = {}
        for c in sorted(good):
            head, body = good[c]
            try:
                rank = None if ranks is None else get(head, "rank", int)
                if rank is not None and not 1 <= rank <= int(ranks[c]):  # type: ignore[index]
                    raise Refused(f"rank: {rank}; the client has {int(ranks[c])}")  # type: ignore[index]
                form = self._form(outgoing, forms, rank)
                payload = unpack(body, form) if form else {}
                weight = get(head, "weight", float)
                most_rows = self.members[c].rows
                if most_rows is not None and weight > most_rows:
                    raise Refused(f"example count {weight!r}; the client is enrolled with {most_rows:g}")
                report = {str(n)[:60]: float(v) for n, v in get(head, "report", dict).items() if type(v) in (int, float)}
            except (Refused, WireError) as error:
                missing[c] = f"refused: {error}"
                continue
            up[c] = schema_size(form)
            rows.append((c, pad(payload, full) if rank is not None else payload, weight, report, rank))
        if not rows:
            return Replies(None, {}, missing, forgot=frozenset(forgot))
        told = set.intersection(*(set(r[3]) for r in rows))
        update = Update(
            stack([r[1] for r in rows]) if rows[0][1] else {},
            torch.tensor([r[2] for r in rows], dtype=torch.float32),
            {n: torch.tensor([r[3][n] for r in rows]) for n in rows[0][3] if n in told},
            torch.tensor([r[0] for r in rows]),
            None if rows[0][4] is None else torch.tensor([r[4] for r in rows]),
        )
        return Replies(update, up, missing, forgot=frozenset(forgot))

    def _forms(self, outgoing: Outgoing) -> dict[int | None, Schema]:
        return {None: upload_schemas(self.method, self.task, outgoing)[-1]}

    def _form(self, outgoing: Outgoing, forms: dict[int | None, Schema], rank: int | None) -> Schema:
        if rank not in forms:
            forms[rank] = upload_schemas(self.method, self.task, outgoing, rank)[-1]
        return forms[rank]

    def _sum(self, outgoing: Outgoing, messages: Mapping[int, Tensors]) -> Replies:
        """A round of which only the sum is seen: keys, shares, masked vectors, then what takes the masks off."""
        t, form = outgoing.round, upload_schemas(self.method, self.task, outgoing)[-1]
        keys, missing, sealed, _ = self._ask("keys", t, {c: {} for c in outgoing.cohort}, {}, 0)
        public = {}
        for c, (head, _) in keys.items():
            try:
                public[c] = (bytes.fromhex(get(head, "c", str)), bytes.fromhex(get(head, "s", str)))
            except ValueError as error:
                missing[c] = f"refused: {error}"
        threshold, who = threshold_of(len(public)), sorted(public)
        body = b"".join(sealed[c] for c in who)
        ask = {"participants": who, "lengths": [len(sealed[c]) for c in who], "threshold": threshold}
        dealt, gone, _, _ = self._ask("shares", t, dict.fromkeys(who, ask), dict.fromkeys(who, body), 0)
        missing |= gone
        boxes: dict[int, dict[str, Any]] = {c: get(head, "shares", dict) for c, (head, _) in dealt.items()}
        complete = sorted(c for c, box in boxes.items() if set(box) == {str(v) for v in who if v != c})
        missing |= {c: "refused: shares for others than the participants" for c in boxes if c not in complete}
        heads, bodies = self._heads(outgoing, {c: messages[c] for c in complete})
        for c in complete:
            heads[c]["secure"] = {str(v): boxes[v][str(c)] for v in complete if v != c}
        got, gone, _, forgot = self._ask("train", t, heads, bodies, schema_size(form)[1])
        missing |= gone
        masked: dict[int, np.ndarray] = {}
        names = sorted(form)
        for c, (_, data) in got.items():
            try:
                payload = unpack(data, form)
            except WireError as error:
                missing[c] = f"refused: {error}"
                continue
            masked[c] = torch.cat([payload[n].reshape(-1) for n in names]).numpy().view(np.uint64)
        alive = sorted(masked)
        if len(alive) < threshold:
            raise RunError(f"round {t}: {len(alive)} clients sent their masked vectors; {threshold} are needed to open the sum")
        told, _, _, _ = self._ask("unmask", t, {c: {"survivors": alive} for c in alive}, {}, 0)
        shares = {c: {int(v): bytes.fromhex(x) for v, x in get(head, "shares", dict).items()} for c, (head, _) in told.items()}
        try:
            total = unmasked(masked, public, complete, shares, threshold, context_of(self.federation, self.run, t))
        except (Refused, ValueError) as error:
            raise RunError(f"round {t}: {error}") from None
        flat = torch.from_numpy(total.view(np.int64).copy())
        sizes = [schema_size({n: form[n]})[0] // 8 for n in names]
        parts = {n: part.reshape(1, *form[n][1]) for n, part in zip(names, flat.split(sizes), strict=True)}
        update = Update(parts, torch.full((1,), float(len(alive))), {}, torch.full((1,), -1))
        return Replies(update, dict.fromkeys(alive, schema_size(form)), missing, forgot=frozenset(forgot), counted=tuple(alive))

    def commit(self, clients: Sequence[int]) -> None:
        """Nothing to do: the next request says which round counts."""

    def state(self) -> Tensors:
        """Nothing: clients keep their memory."""
        return {}

    def restore(self, state: Tensors) -> None:
        """Nothing to put back."""

    def evaluate(self, server: Server, everywhere: bool = True, tuned: bool = False) -> Evaluation | None:
        """The metrics that clients measure on their own test rows; None where none may leave."""
        if self.method.private or self.method.summed:
            return None
        outgoing = open_round(self.method, server, list(range(len(self.members))))
        messages = outgoing.messages(self.method, self.task)
        heads, bodies = self._heads(outgoing, messages)
        for head in heads.values():
            head["tuned"] = tuned
        good, _, _, _ = self._ask("evaluate", server.round, heads, bodies, 0)
        found: dict[str, list[Tensors]] = {}
        for c in sorted(good):
            for which, told in get(good[c][0], "metrics", dict).items():
                total = _sums(told)
                if "weight" in total and float(total["weight"]) > 0:
                    found.setdefault(str(which), []).append(total)
        found = {which: _alike(rows) for which, rows in found.items()}
        each = {w: [means(self.task, total) for total in rows] for w, rows in found.items()}
        mean = lambda rows: {n: sum(r[n] for r in rows) / len(rows) for n in rows[0]} if rows else {}  # noqa: E731
        common = found.get("global", [])
        overall = means(self.task, {n: torch.stack([t[n] for t in common]).sum(0) for n in common[0]}) if common else {}
        own = each.get("personal", [])
        clients = {n: [r[n] for r in own] for n in own[0]} if own else {}
        return Evaluation(overall, mean(own), clients, mean(each.get("tuned", [])), bytes=sum(map(len, bodies.values())))

    def global_params(self, server: Server) -> Tensors:
        """The aggregated model: what the server shares, and the start of what it never sees."""
        return self.task.init(server.seed) | server.shared


def _sums(told: Any) -> Tensors:
    """Sums that a client tells, as tensors; nothing where they are not finite numbers or short lists of them."""
    out: Tensors = {}
    for n, value in told.items() if isinstance(told, dict) else ():
        flat = value if isinstance(value, list) else [value]
        if len(flat) > 4096 or not all(type(v) in (int, float) and np.isfinite(v) for v in flat) or isinstance(value, list) != ("." in n):
            return {}
        out[str(n)] = torch.tensor(value, dtype=torch.float64)
    return out


def _alike(rows: list[Tensors]) -> list[Tensors]:
    """Those whose names and lengths are what most have."""
    forms = [tuple(sorted((n, t.numel()) for n, t in row.items())) for row in rows]
    usual = max(forms, key=forms.count)
    return [row for row, form in zip(rows, forms, strict=True) if form == usual]
