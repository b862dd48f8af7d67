"""One coordinator against many clients with MiniLM's rank-8 payloads: seconds and memory a round, and whether either grows: results/load.json.

python benchmarks/load.py     # some fifteen minutes on one core

Clients verify, sign and pack as real ones do but do not train; messages are Flower's, handed over in this process.  A coordinator's seconds are
those of its own work: the clients' are taken off.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch
from cryptography.hazmat.primitives import serialization
from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity

from isthmus.core.rounds import Outgoing, server_round, server_start, upload_schemas
from isthmus.core.tensors import Tensors
from isthmus.core.wire import pack
from isthmus.deploy import coordinator
from isthmus.deploy.apps import unwrapped, wrapped
from isthmus.deploy.coordinator import GridTransport
from isthmus.engines.messages import new_key, seal, unseal
from isthmus.engines.remote import Member, RemoteEngine
from isthmus.federated.fedavg import plain

OUT = Path(__file__).resolve().parents[1] / "results" / "load.json"
TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1


class Shapes:
    """A task that has tensors and clients, no rows: rank 8 on query and value of six layers of width 384, and a head of five labels."""

    private: tuple[str, ...] = ()
    vmappable = True

    def __init__(self, clients: int) -> None:
        self.clients = clients

    def init(self, seed: int) -> Tensors:
        out = {"head.weight": torch.zeros(5, 384), "head.bias": torch.zeros(5)}
        for layer in range(6):
            for role in ("query", "value"):
                out |= {f"layers.{layer}.{role}.lora_a": torch.randn(8, 384), f"layers.{layer}.{role}.lora_b": torch.zeros(384, 8)}
        return out

    def ranks(self) -> None:
        return None

    def crop(self, params: Tensors, rank: int) -> Tensors:
        return params


class Crowd:
    """Flower's grid over clients that answer at once."""

    def __init__(self, key, keys, body: bytes) -> None:
        self.key, self.keys, self.body, self.seconds = key, keys, body, 0.0
        form = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        self.nodes = [SimpleNamespace(node_id=c + 10, public_key=k.public_key().public_bytes(*form)) for c, k in enumerate(keys)]
        self.waiting: dict = {}

    def get_nodes(self):
        return self.nodes

    def get_node_ids(self):
        return [n.node_id for n in self.nodes]

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            numbers.append(f"{len(self.waiting)}-{time.monotonic_ns()}")
            message.metadata.__dict__["_message_id"] = numbers[-1]
            self.waiting[numbers[-1]] = message
        return numbers

    def pull_messages(self, numbers):
        started, out = time.perf_counter(), []
        for n in list(numbers)[:50]:
            message = self.waiting.pop(n)
            head, _ = unseal(unwrapped(message.content), self.key.public_key(), 1 << 30)
            same = {k: head[k] for k in ("federation", "run", "round", "kind", "nonce", "client")}
            reply = seal(same | {"status": "ok", "weight": 100.0, "report": {"loss": 1.0}}, self.body, self.keys[head["client"]])
            out.append(Message(wrapped(reply), reply_to=message))
        self.seconds += time.perf_counter() - started
        return out


def play(clients: int, rounds: int) -> dict:
    coordinator.POLL = 0.0
    task, method, key = Shapes(clients), plain(), new_key()
    keys = [new_key() for _ in range(clients)]
    server = server_start(method, task, 0)  # type: ignore[arg-type]
    form = upload_schemas(method, task, Outgoing([0], {}, {}, server))[-1]  # type: ignore[arg-type]
    body = pack({n: 0.01 * torch.randn(shape) for n, (_, shape) in form.items()})
    crowd = Crowd(key, keys, body)
    members = [Member(f"c{c}", k.public_key(), 1e6) for c, k in enumerate(keys)]
    engine = RemoteEngine(method, task, members, GridTransport(crowd, members, key, "load"), key, "load", "digest", "run")  # type: ignore[arg-type]
    process, seconds, memory = psutil.Process(), [], []
    for _ in range(rounds):
        crowd.seconds, started = 0.0, time.perf_counter()
        server, record = server_round(method, task, server, engine)  # type: ignore[arg-type]
        assert not record.missing
        seconds.append(time.perf_counter() - started - crowd.seconds)
        memory.append(process.memory_info().rss / 1e6)
    later = len(memory) // 10
    return {
        "clients": clients,
        "rounds": rounds,
        "payload_bytes": len(body),
        "seconds_a_round": sorted(seconds)[len(seconds) // 2],
        "first_tenth_seconds": sum(seconds[: max(1, later)]) / max(1, later),
        "last_tenth_seconds": sum(seconds[-max(1, later) :]) / max(1, later),
        "memory_mb_end": memory[-1],
        "growth_mb_a_round": (memory[-1] - memory[later]) / max(1, len(memory) - 1 - later),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def main() -> None:
    rows = []
    for clients, rounds in ((50, 200), (200, 10), (1000, 25)):
        rows.append(play(clients, rounds))
        print(json.dumps(rows[-1]), flush=True)
    versions = {n: importlib.metadata.version(n) for n in ("torch", "flwr", "cryptography")} | {"python": platform.python_version()}
    OUT.write_text(json.dumps({"rows": rows, "versions": versions, "threads": torch.get_num_threads()}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
