"""Flower's grid as the coordinator sees it, over sites in this process: real messages, nodes that come, go, are slow or silent."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

from cryptography.hazmat.primitives import serialization
from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity

from isthmus.deploy.apps import unwrapped, wrapped

TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1


class Grid:
    """Args: sites by client number; ``delay(client, times)``: seconds until a node answers, None: never."""

    def __init__(self, sites, keys, delay=lambda client, times: 0.0, authenticated: bool = True) -> None:
        self.sites, self.keys, self.delay, self.authenticated = sites, keys, delay, authenticated
        self.online = set(sites)
        self.replies: dict[str, object] = {}
        self.times: dict[int, int] = {}
        self.lock = threading.Lock()

    def get_nodes(self):
        # node numbers run against client numbers: identity must come from the key
        return [SimpleNamespace(node_id=1000 - c, public_key=self._pem(c)) for c in sorted(self.online)]

    def get_node_ids(self):
        return [1000 - c for c in sorted(self.online)]

    def _pem(self, c):
        if not self.authenticated:
            return b"made up by the link"
        return self.keys[c].public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)

    def push_messages(self, messages):
        out = []
        for i, message in enumerate(messages):
            number = f"{time.monotonic_ns()}-{i}"
            message.metadata.__dict__["_message_id"] = number
            threading.Thread(target=self._work, args=(number, message), daemon=True).start()
            out.append(number)
        return out

    def _work(self, number, message):
        c = 1000 - message.metadata.dst_node_id
        self.times[c] = self.times.get(c, 0) + 1
        wait = self.delay(c, self.times[c])
        if wait is None:
            return
        time.sleep(wait)
        with self.lock:
            data = self.sites[c].answer(unwrapped(message.content))
            self.replies[number] = Message(wrapped(data), reply_to=message)

    def pull_messages(self, numbers):
        with self.lock:
            return [self.replies.pop(n) for n in list(numbers) if n in self.replies]
