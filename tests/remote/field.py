"""A federation whose messages are real bytes and whose sites stand in this process, so that faults can be put between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from isthmus.core.batches import Batches
from isthmus.engines.messages import new_key
from isthmus.engines.remote import Member, RemoteEngine
from isthmus.engines.site import Policy, Site

from ..contracts import contracts

KEYS = [new_key() for _ in range(8)]
COORDINATOR = new_key()


class Loopback:
    """Sites by client number.  ``way`` may change, drop or double what travels: (client, request, site) to reply bytes or a reason."""

    def __init__(self, sites: Mapping[int, Site], way: Callable[[int, bytes, Site], bytes | str] | None = None) -> None:
        self.sites, self.way = dict(sites), way or (lambda c, request, site: site.answer(request))
        self.traffic: list[bytes] = []

    def ask(self, messages, deadline):
        out = {}
        for c, request in messages.items():
            reply = self.way(c, request, self.sites[c]) if c in self.sites else "no such node"
            self.traffic += [request, *([reply] if isinstance(reply, bytes) else [])]
            out[c] = reply
        return out


def sites_of(method, task, folder: Path, policy: Policy | None = None, batches: Batches | None = None) -> dict[int, Site]:
    peers = {c: KEYS[c].public_key() for c in range(task.clients)}
    make = lambda c: Site(
        c,
        method,
        task,
        0,
        batches or Batches(8),
        "here",
        "digest",
        COORDINATOR.public_key(),
        KEYS[c],
        peers,
        folder / str(c),
        policy or Policy(),
    )
    return {c: make(c) for c in range(task.clients)}


def engine_of(method, task, transport, run: str = "run1", **more) -> RemoteEngine:
    members = [Member(f"client {c}", KEYS[c].public_key(), len(task.rows(c, "train"))) for c in range(task.clients)]
    return RemoteEngine(method, task, members, transport, COORDINATOR, "here", "digest", run, **more)


def play(method, task, folder: Path, rounds: int = 3, way=None, server=None, engine=None, **more):
    engine = engine or engine_of(method, task, Loopback(sites_of(method, task, folder), way), **more)
    return contracts.play(method, task, rounds, running=engine, server=server)
