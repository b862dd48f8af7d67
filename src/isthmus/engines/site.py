"""One site of a federation: it answers the coordinator's signed requests, and keeps what is private on its own disk.

After every round its memory and its copy of the shared tensors lie under that round's number.  A request says which round the
coordinator counts this client's last update from, and the site starts from exactly that; so a coordinator that was killed and goes
on from a checkpoint meets the same client again, and an update that was not accepted leaves no trace.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core import checkpoint
from ..core.batches import Batches
from ..core.rounds import Outgoing, arrive, client_round, client_start, learn, scope, server_start, upload_schemas
from ..core.tensors import Tensors, matches, prefixed, under
from ..core.types import Inbox, Method, Server, Task
from ..core.wire import WireError, pack, schema, trim, unpack
from .evaluate import sums
from .messages import PrivateKey, PublicKey, Refused, get, read_schema, seal, unseal
from .secure import Secrets, context_of

KINDS = ("who", "train", "evaluate", "keys", "shares", "unmask")


class Forgot(Exception):
    """The site does not hold what the coordinator counts on."""


@dataclass(frozen=True)
class Policy:
    """What a site insists on, whatever the coordinator asks for.

    Args:
        recipes: digests of the recipes that it takes part in.
        message: bytes of a request's tensors at most.
        participants: clients that a secure sum has at least.
        secure: refuse to send anything but through a secure sum.
        private: refuse to send anything that no private channel has gone over.
    """

    recipes: frozenset[str] = frozenset()
    message: int = 1 << 30
    participants: int = 3
    secure: bool = False
    private: bool = False

    def check(self, method: Method) -> None:
        """Raise `Refused` where the method falls short of what the site insists on."""
        if self.secure and not method.summed:
            raise Refused("policy: this site takes part in secure sums only; the recipe has no channel secure_sum")
        if self.private and not method.private:
            raise Refused("policy: this site sends nothing without noise; the recipe has no private channel")


@dataclass
class Site:
    """Answers requests for one client.

    Args:
        client: its number in the federation.
        method, task: built from the site's own copy of the recipe.
        seed, batches: of the recipe.
        federation: its name; requests of others are refused.
        recipe: digest of the recipe.
        coordinator: who may ask.
        key: its own.
        peers: public keys of all clients, for secure sums.
        folder: where it keeps its state.
        policy: what it insists on.
    """

    client: int
    method: Method
    task: Task
    seed: int
    batches: Batches
    federation: str
    recipe: str
    coordinator: PublicKey
    key: PrivateKey
    peers: Mapping[int, PublicKey]
    folder: Path
    policy: Policy = field(default_factory=Policy)
    _secrets: dict[tuple[str, int], Secrets] = field(default_factory=dict, repr=False)
    _turn: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self.method = self.method.deployed()

    @cached_property
    def _start(self) -> Server:
        """The coordinator's side before the first round; the same for every run of the recipe."""
        return server_start(self.method, self.task, self.seed)

    def answer(self, data: bytes) -> bytes:
        """The signed reply to a message; one that cannot be served is answered with a reason.  One at a time: a task's network is one."""
        with self._turn:
            return self._answered(data)

    def _answered(self, data: bytes) -> bytes:
        head: dict[str, Any] = {}
        try:
            head, body = unseal(data, self.coordinator, self.policy.message)
            more, payload = self._serve(head, body)
        except (Refused, WireError) as error:
            more, payload = {"status": "refused", "why": str(error)}, b""
        except Forgot as error:
            more, payload = {"status": "forgot", "why": str(error)}, b""
        except Exception as error:
            more, payload = {"status": "error", "why": f"{type(error).__name__}: {error}"[:500]}, b""
        same = {n: head[n] for n in ("federation", "run", "round", "kind", "nonce") if n in head}
        return seal(same | {"client": self.client, "status": "ok"} | more, payload, self.key)

    def _serve(self, head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        if get(head, "federation", str) != self.federation:
            raise Refused("federation: another one than this site's")
        if head.get("kind") == "who":
            return {}, b""
        if get(head, "client", int) != self.client:
            raise Refused(f"client: the request is for client {head['client']}, this site is client {self.client}")
        if get(head, "recipe", str) != self.recipe or (self.policy.recipes and self.recipe not in self.policy.recipes):
            raise Refused("recipe: not the one that this site has agreed to")
        run, round, kind = get(head, "run", str), get(head, "round", int), get(head, "kind", str)
        if not (run.isalnum() and run.isascii() and len(run) <= 64) or not 0 <= round < 1 << 31:
            raise Refused("run: must be letters and digits, round a number from 0 on")
        if kind not in KINDS:
            raise Refused(f"kind: {kind[:40]!r} is not one of {', '.join(KINDS)}")
        get(head, "nonce", str)
        self.policy.check(self.method)
        if kind in ("train", "evaluate"):
            return (self._train if kind == "train" else self._evaluate)(head, body)
        if not self.method.summed:
            raise Refused(f"kind: {kind} belongs to a secure sum; the recipe has none")
        return getattr(self, f"_{kind}")(head, body)

    # What the site holds

    def _held(self, run: str, seen: int) -> tuple[Tensors, Tensors]:
        """(memory, shared) as they were after round ``seen``; -1: before the first."""
        rank = self._rank()
        if seen == -1:
            return client_start(self.method, self.task, self.seed, rank), self._start.shared
        try:
            _, tensors, _ = checkpoint.load(self.folder / run / f"round-{seen:05d}")
        except checkpoint.CheckpointError as error:
            raise Forgot(f"no state of round {seen}: {error}") from None
        return under(tensors, "memory/"), under(tensors, "shared/")

    def _rank(self) -> Tensor | None:
        ranks = self.task.ranks()
        return None if ranks is None else ranks[self.client]

    def _received(self, head: dict[str, Any], body: bytes) -> tuple[Tensors, Tensors, Inbox]:
        """(memory, shared without what is for this client alone, inbox) of a request.

        Raises:
            Refused: tensors that the plan of this recipe does not have.
        """
        seen, round = get(head, "seen", int), get(head, "round", int)
        if not -1 <= seen <= round or (seen == round and head["kind"] == "train"):
            raise Refused(f"seen: {seen} does not lie before round {round}")
        memory, shared = self._held(head["run"], seen)
        wanted = read_schema(get(head, "schema", list))
        rank = self._rank()
        full = schema(shared)
        mine = full if rank is None else schema(self.task.crop(shared, int(rank)))
        for n, (dtype, shape) in wanted.items():
            if n in mine:
                if mine[n] != (dtype, shape):
                    raise Refused(f"schema: {n} is {dtype} {list(shape)}; the recipe has {mine[n][0]} {list(mine[n][1])}")
            elif not matches(n, self.method.send.carries):
                raise Refused(f"schema: the recipe's method sends no tensor {n[:60]!r}")
        got = unpack(body, wanted) if body or wanted else {}
        if bad := [n for n, t in got.items() if t.is_floating_point() and not torch.isfinite(t).all()]:
            raise Refused(f"non-finite values in {bad[0]}")
        got = {n: _padded(t, full[n][1]) if n in full else t for n, t in got.items()}
        alone = get(head, "personal", list, [])
        personal = {n: got.pop(n) for n in alone if isinstance(n, str) and n in got}
        shared = self.method.send.receive(got, shared, round, self.seed)
        directive = {str(n): str(v) for n, v in get(head, "directive", dict).items()}
        inbox = Inbox(shared | personal, round, torch.tensor(self.client), directive, self._start.published, self.seed)
        return memory, shared, inbox

    def _drawn(self, round: int) -> tuple[Tensors, Tensors, Tensor]:
        """Batches, probe and number of examples."""
        rows = self.task.rows(self.client, "train")
        probe: Tensors = {}
        if any(p.probe for p in self.method.plugins):
            probe = self.task.batch(self.batches.probe(rows, self.seed, round, self.client))
        plan = self.method.work.plan(self.batches, round)
        return self.task.batch(plan.draw(rows, self.seed, round, self.client)), probe, torch.tensor(float(len(rows)))

    # What it answers

    def _train(self, head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        run, round = head["run"], head["round"]
        asked = hashlib.sha256(
            json.dumps({n: v for n, v in head.items() if n not in ("nonce", "secure")}, sort_keys=True).encode() + body
        ).hexdigest()
        if (known := self._known(run, round)) is not None and not self.method.summed:
            meta, reply = known
            if meta["asked"] == asked:
                return meta["head"], reply  # the same question once more: the same answer, nothing is counted or spent twice
            if self.method.private:
                raise Refused(f"round {round} was answered already; another noisy answer would cost privacy")
        if self.method.summed:
            self._secrets_of(head).receive({int(v): bytes.fromhex(x) for v, x in get(head, "secure", dict).items()})
        memory, shared, inbox = self._received(head, body)
        batches, probe, weight = self._drawn(round)
        update, after = client_round(self.method, self.task, inbox, memory, batches, probe, weight)
        payload, more = update.payload, {}
        if bad := [n for n, t in payload.items() if t.is_floating_point() and not torch.isfinite(t).all()]:
            raise RuntimeError(f"training diverged: non-finite values in {bad[0]}; nothing was sent")
        if update.rank is not None:
            server = replace(self._start, round=round, shared=inbox.shared)
            outgoing = Outgoing([self.client], {}, inbox.directive, server)
            payload = trim(payload, upload_schemas(self.method, self.task, outgoing, int(update.rank))[-1])
            more["rank"] = int(update.rank)
        reply = pack(payload) if payload else b""
        said = {"weight": float(update.weight), "report": {n: float(t) for n, t in update.report.items()}} | more
        kept = prefixed(after, "memory/") | prefixed(shared, "shared/")
        if not self.method.summed:
            kept |= {"reply": torch.frombuffer(bytearray(reply), dtype=torch.uint8) if reply else torch.empty(0, dtype=torch.uint8)}
        checkpoint.save(self.folder / run, round, kept, {"asked": asked, "head": said}, keep=3)
        if self.method.summed:
            reply = self._mask(head, payload)
        return said, reply

    def _known(self, run: str, round: int) -> tuple[dict[str, Any], bytes] | None:
        try:
            _, tensors, meta = checkpoint.load(self.folder / run / f"round-{round:05d}")
        except checkpoint.CheckpointError:
            return None
        return (meta, tensors["reply"].numpy().tobytes()) if "reply" in tensors else None

    def _evaluate(self, head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Sums over the client's test rows: of the aggregated model, of its own, and of its own after a round of local work."""
        if self.method.private or self.method.summed:
            raise Refused("evaluation: a metric of one client would leave beside what protects it")
        memory, shared, inbox = self._received(head, body)
        rows = self.task.rows(self.client, "test")
        batches, probe, _ = self._drawn(head["round"])
        initial = self.task.init(self.seed)
        general = initial | shared
        at = arrive(self.method, self.task, inbox, memory, probe)
        general |= {n: t for n, t in under(memory, "kept/").items() if matches(n, self.task.private)}
        models = {"personal": at.model} | ({"global": general} if scope(self.method, self.task, list(initial)) else {})
        if get(head, "tuned", bool, False):
            models["tuned"] = {**at.constants, **learn(self.method, at, batches).params}
        found = {which: _summed(self.task.score(model, rows)) for which, model in models.items()}
        return {"metrics": found}, b""

    # The steps of a secure sum around training

    def _secrets_of(self, head: dict[str, Any]) -> Secrets:
        at = (head["run"], head["round"])
        if at not in self._secrets:
            raise Refused("secure sum: this site has no keys for the round (was it restarted?)")
        return self._secrets[at]

    def _keys(self, head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        at = (head["run"], head["round"])
        self._secrets = {k: s for k, s in self._secrets.items() if k[0] != at[0]}  # one round of a run at a time
        self._secrets |= {at: Secrets(self.client, context_of(self.federation, *at), self.policy.participants)}
        c, s = self._secrets[at].public
        return {"c": c.hex(), "s": s.hex()}, b""

    def _shares(self, head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """The body is the others' sealed replies to ``keys``, one behind the other, their lengths in the head: signed by each, not by us."""
        keys: dict[int, tuple[bytes, bytes]] = {}
        at = 0
        for length in get(head, "lengths", list):
            if type(length) is not int or not 0 < length <= len(body) - at:
                raise Refused("secure sum: lengths do not fit the body")
            part, at = body[at : at + length], at + length
            number = get(head, "participants", list)[len(keys)]
            if type(number) is not int or number not in self.peers:
                raise Refused(f"secure sum: {number!r} is no client of this federation")
            said, _ = unseal(part, self.peers[number], 0)
            if [get(said, n, t) for n, t in (("run", str), ("round", int), ("kind", str), ("client", int))] != [
                head["run"],
                head["round"],
                "keys",
                number,
            ]:
                raise Refused(f"secure sum: the keys of client {number} belong elsewhere")
            keys[number] = (bytes.fromhex(get(said, "c", str)), bytes.fromhex(get(said, "s", str)))
        dealt = self._secrets_of(head).deal(keys, get(head, "threshold", int))
        return {"shares": {str(v): data.hex() for v, data in dealt.items()}}, b""

    def _mask(self, head: dict[str, Any], payload: Tensors) -> bytes:
        secrets = self._secrets_of(head)
        names = sorted(payload)
        flat = torch.cat([payload[n].reshape(-1) for n in names]).numpy().view(np.uint64)
        masked = torch.from_numpy(secrets.mask(flat).view(np.int64).copy())
        sizes = [payload[n].numel() for n in names]
        return pack({n: t.reshape(payload[n].shape) for n, t in zip(names, masked.split(sizes), strict=True)})

    def _unmask(self, head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        survivors = [v for v in get(head, "survivors", list) if type(v) is int]
        told = self._secrets_of(head).reveal(survivors)
        return {"shares": {str(v): share.hex() for v, share in told.items()}}, b""


def _padded(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(t.shape) == shape:
        return t
    out = t.new_zeros(shape)
    out[tuple(slice(0, s) for s in t.shape)] = t
    return out


def _summed(scores: Tensors) -> dict[str, float | list[float]]:
    return {n: t.tolist() for n, t in sums(scores).items()}
