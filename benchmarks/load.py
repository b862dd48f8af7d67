"""One coordinator against many clients with MiniLM's rank-8 payloads: seconds and memory a round, and whether either grows: results/load.json.

python benchmarks/load.py          # some twenty minutes on one core
python benchmarks/load.py flood    # only the last part: rounds of real processes while strangers knock, some minutes

Clients verify, sign and pack as real ones do but do not train; messages are Flower's, handed over in this process.  A coordinator's seconds are
those of its own work: the clients' are taken off.
"""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import platform
import resource
import socket
import ssl
import statistics
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch
from cryptography.hazmat.primitives import serialization
from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity

from isthmus.core.recipe import parse
from isthmus.core.rounds import Outgoing, server_round, server_start, upload_schemas
from isthmus.core.tensors import Tensors
from isthmus.core.wire import pack
from isthmus.deploy import coordinator
from isthmus.deploy.apps import unwrapped, wrapped
from isthmus.deploy.coordinator import GridTransport
from isthmus.deploy.files import create
from isthmus.deploy.processes import Trial, free_port
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


def knock(port: int, on, counts) -> None:
    """While ``on`` is set, a hundred connections a second that are no federation's: plain text, noise, a client that trusts another authority."""
    stranger = ssl.create_default_context()
    stranger.check_hostname = False
    i, due = 0, time.monotonic()
    while True:
        on.wait()
        due = max(due, time.monotonic() - 0.05)
        i, refused = i + 1, False
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as wire:
            wire.settimeout(0.2)
            try:
                if i % 3 == 0:
                    stranger.wrap_socket(wire)
                else:
                    wire.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(60) if i % 3 == 1 else bytes(range(256)) * 4)
                    refused = wire.recv(1) == b"" or i % 3 == 1  # closed, or an alert
            except ssl.SSLError:
                refused = True
            except OSError as error:
                refused = isinstance(error, ConnectionError)
        counts[0] += 1
        counts[1] += refused
        due += 0.01
        time.sleep(max(0.0, due - time.monotonic()))


def flood(rounds: int = 24) -> dict:
    """Seconds of a round over four real nodes, every other one while strangers knock a hundred times a second."""
    recipe = parse(
        {
            "name": "flood", "rounds": rounds, "task": {"kind": "digits"}, "partition": {"clients": 4, "alpha": 1.0},
            "train": {"optimiser": "sgd", "lr": 0.3}, "evaluate": {"every": rounds, "references": False},
        }
    )  # fmt: skip
    took: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "f"
        create(folder, recipe, [f"s{i}" for i in range(4)], f"127.0.0.1:{free_port()}")
        ledger, over = folder / "run" / "ledger.jsonl", threading.Event()
        with Trial(folder) as trial:
            context = multiprocessing.get_context("spawn")
            on, counts = context.Event(), context.Array("q", [0, 0])
            stranger = context.Process(target=knock, args=(trial.port, on, counts), daemon=True)
            stranger.start()

            def turns() -> None:
                seen, last = 0, 0.0
                while not over.is_set():
                    found = ledger.read_bytes().count(b"\n") if ledger.exists() else 0
                    if found > seen:
                        now = time.monotonic()
                        if seen and found == seen + 1:
                            took[on.is_set()].append(now - last)
                        seen, last = found, now
                        (on.clear if on.is_set() else on.set)()
                    over.wait(0.01)

            clock = threading.Thread(target=turns)
            clock.start()
            trial.run()
            over.set()
            clock.join()
            stranger.kill()
        missing = sum(bool(json.loads(line)["missing"]) for line in ledger.read_text().splitlines())
    quiet, loud = (statistics.median(took[x]) for x in (False, True))
    return {
        "handshakes": counts[0], "refused": counts[1], "handshakes_a_second": counts[0] / sum(took[True]), "rounds_quiet": len(took[False]), "rounds_flooded": len(took[True]),
        "seconds_quiet": quiet, "seconds_flooded": loud, "ratio": loud / quiet, "rounds_with_missing": missing,
    }  # fmt: skip


def main() -> None:
    document = json.loads(OUT.read_text()) if OUT.exists() else {}
    if "flood" not in sys.argv[1:]:
        document["rows"] = []
        for clients, rounds in ((50, 200), (200, 10), (1000, 120)):
            document["rows"].append(play(clients, rounds))
            print(json.dumps(document["rows"][-1]), flush=True)
    document["flood"] = flood()
    print(json.dumps(document["flood"]), flush=True)
    versions = {n: importlib.metadata.version(n) for n in ("torch", "flwr", "cryptography")} | {"python": platform.python_version()}
    OUT.write_text(json.dumps(document | {"versions": versions, "threads": torch.get_num_threads()}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
