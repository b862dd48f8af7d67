"""What every method promises, as functions that raise AssertionError; `test_faults` shows that each can fail."""

from __future__ import annotations

from dataclasses import replace

import torch

from isthmus.core import checkpoint
from isthmus.core.batches import Batches
from isthmus.core.rounds import close_round, open_round, scope, server_round, server_start, upload_schemas
from isthmus.core.tensors import matches, prefixed, select, under
from isthmus.core.types import Method, Server
from isthmus.core.wire import pack, schema, trim, unpack
from isthmus.engines.simulator import Simulator
from isthmus.runner import _freeze, _thaw

TOLERANCE = 1e-6


def engine(method: Method, task, way: str = "auto", **more) -> Simulator:
    return Simulator(method, task, 0, Batches(8), way, **more)


def play(method: Method, task, rounds: int = 3, way: str = "auto", running: Simulator | None = None, server: Server | None = None):
    running = running or engine(method, task, way)
    server = server or server_start(method, task, 0)
    records = []
    for _ in range(rounds):
        server, record = server_round(method, task, server, running)
        records.append(record)
    return running, server, records


def difference(a: dict, b: dict) -> float:
    assert set(a) == set(b), f"names differ: {sorted(set(a) ^ set(b))[:3]}"
    return max((float((a[n].double() - b[n].double()).abs().max()) for n in a if a[n].numel()), default=0.0)


def ways_agree(method: Method, task, other: Method | None = None, tolerance: float = TOLERANCE) -> None:
    """All clients together and one by one end with the same server and the same private memory."""
    together, server, records = play(method, task, way="together")
    loop, reference, expected = play(other or method, task, way="loop")
    assert difference(server.shared, reference.shared) <= tolerance
    assert difference(meaning(together.state()), meaning(loop.state())) <= tolerance
    assert [r.up for r in records] == [r.up for r in expected]
    assert [r.down for r in records] == [r.down for r in expected]


def meaning(state: dict) -> dict:
    """Singular directions are only as stable as their values are apart: compare u diag(s) v', not u, v and what is measured along them."""
    out = dict(state)
    for n in [n.removesuffix(".s") for n in state if n.endswith(".s")]:
        u, s, v = (out.pop(f"{n}.{x}") for x in ("u", "s", "v"))
        out[f"{n}.product"] = (u * s[:, None]) @ v.mT
        for x in ("before", "seen", "old_u", "old_v"):
            out.pop(f"{n}.{x}")
    return out


def equals(method: Method, base: Method, task) -> None:
    """Bit for bit the same run."""
    a, server, _ = play(method, task, way="loop")
    b, expected, _ = play(base, task, way="loop")
    assert difference(server.shared, expected.shared) == 0.0
    kept = {n: t for n, t in a.state().items() if n in b.state()}
    assert difference(kept, b.state()) == 0.0


def nothing_private_leaves(method: Method, task) -> None:
    """Names outside the method's scope, or private to the task, are in no message and nowhere on the server."""
    running, server, _ = play(method, task, rounds=1)
    start = task.init(0)
    private = set(start) - set(scope(method, task, list(start)))
    private |= {n for n in start if matches(n, task.private)}
    for _ in range(2):
        outgoing = open_round(method, server)
        replies = running.exchange(outgoing)
        names = {n.split("@")[0] for n in replies.update.payload}
        sent = names | {n for c in outgoing.cohort for n in method.send.message(server, server.seen[c])}
        bare = {n.removeprefix("control.") for n in sent}
        assert not bare & private, f"private names leave: {sorted(bare & private)[:3]}"
        held = {n.removeprefix("control.") for n in server.shared} | {n.split("/", 1)[1] for n in server.state}
        assert not held & private
        kept = {n for n in replies.update.payload if n.startswith("kept/") or "/" in n}
        assert not kept, f"memory leaves: {sorted(kept)[:3]}"
        server, _ = close_round(method, task, server, outgoing, replies)
        running.commit(outgoing.cohort)


def ledger_equals_bytes(method: Method, task) -> None:
    """Counted bytes are those of really packed messages, which come back; and what a client is sent makes it hold the server's tensors."""
    running, server, _ = play(method, task, rounds=1)
    caches = {c: task.init(0) | {n: server_start(method, task, 0).shared[n] for n in server.shared} for c in range(task.clients)}
    for _ in range(3):
        outgoing = open_round(method, server)
        ranks = task.ranks()
        for c in outgoing.cohort:
            message = method.send.message(server, server.seen[c])
            held = {n: caches[c][n] for n in server.shared}
            if server.seen[c] >= 0:
                held = caches[c]
            received = method.send.receive(message, held, server.round, server.seed)
            assert difference({n: received[n] for n in server.shared}, server.shared) == 0.0, "the client does not hold what the server has"
            caches[c] = received
        replies = running.exchange(outgoing)
        for i, c in enumerate(replies.update.client.tolist()):
            payload = select(replies.update.payload, i)
            if replies.update.rank is not None:
                payload = trim(payload, upload_schemas(method, task, outgoing, int(replies.update.rank[i]))[-1])
            data = pack(payload) if payload else b""
            assert len(data) == replies.up[c][1], f"client {c}: {len(data)} bytes packed, {replies.up[c][1]} in the ledger"
            if payload:
                assert difference(unpack(data, schema(payload)), payload) == 0.0
        previous = server
        server, record = close_round(method, task, server, outgoing, replies)
        for c in outgoing.cohort:
            message = method.send.message(previous, previous.seen[c])
            message = message if ranks is None else task.crop(message, int(ranks[c]))
            assert (len(pack(message)) if message else 0) == record.down[c][1]
        running.commit(outgoing.cohort)


def survives_saving(method: Method, task, folder, write=checkpoint.save) -> None:
    """Two rounds, a checkpoint, a new process' worth of objects, two more rounds: bit for bit four rounds."""
    _, expected, _ = play(method, task, rounds=4)
    running, server, _ = play(method, task, rounds=2)
    write(
        folder,
        2,
        prefixed(server.shared, "shared/") | prefixed(server.state, "state/") | prefixed(running.state(), "memory/"),
        _freeze(server),
    )
    _, tensors, meta = checkpoint.load(folder / "round-00002")
    again = engine(method, task)
    again.restore(under(tensors, "memory/"))
    _, server, _ = play(method, task, rounds=2, running=again, server=_thaw(meta, tensors))
    assert difference(server.shared, expected.shared) == 0.0
    assert server.seen == expected.seen
    assert server.versions == expected.versions


def order_does_not_matter(method: Method, task) -> None:
    """The server ends the same, whoever answers first."""
    running, server, _ = play(method, task, rounds=1)
    outgoing = open_round(method, server)
    replies = running.exchange(outgoing)
    a, _ = close_round(method, task, server, outgoing, replies)
    back = torch.arange(len(replies.update.weight)).flip(0)
    b, _ = close_round(method, task, server, outgoing, replace(replies, update=replies.update.take(back)))
    # a truncated SVD of nearly equal singular values is only as stable as they are apart: compare what the factors mean
    assert difference(_products(a.shared), _products(b.shared)) <= 1e-5


def _products(shared: dict) -> dict:
    out = {n: t for n, t in shared.items() if not n.endswith((".lora_a", ".lora_b"))}
    for n in shared:
        if n.endswith(".lora_b") and n.replace("lora_b", "lora_a") in shared:
            out[n] = shared[n] @ shared[n.replace("lora_b", "lora_a")]
    return out
