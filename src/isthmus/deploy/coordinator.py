"""The coordinator's side of a run: Flower's grid as a transport, the run folder, its status."""

from __future__ import annotations

import json
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core import checkpoint
from ..core.recipe import Recipe
from ..core.rounds import Limits, RunError
from ..engines.messages import PrivateKey, Refused, get, public_text, read_private, read_public, seal, unseal
from ..engines.remote import Member, RemoteEngine
from ..runner import Callback, make_method, run
from ..tasks.build import make_task
from .apps import unwrapped, wrapped
from .door import alone
from .files import Federation, digest, read_recipe

WAIT, LEAVING, POLL, LOOK = 300.0, 60.0, 0.2, 2.0


class GridTransport:
    """Messages over the SuperLink.  A node is the client whose enrolled key it has; a node that goes offline is not waited for.

    Args:
        grid: Flower's.
        members: by client number.
        key, federation: to ask nodes without an authenticated key who they are.
    """

    def __init__(self, grid: Any, members: Sequence[Member], key: PrivateKey, federation: str) -> None:
        self.grid, self.members, self.key, self.federation = grid, members, key, federation
        self._by_key = {public_text(m.key): c for c, m in enumerate(members)}
        self._known: dict[int, int | None] = {}

    def nodes(self) -> dict[int, int]:
        """Client number to node number, of those that are online now."""
        out: dict[int, int] = {}
        unknown = []
        for node in self.grid.get_nodes():
            if node.node_id not in self._known:
                client = self._by_key.get(_line(node.public_key))
                if client is None:
                    unknown.append(node.node_id)
                    continue
                self._known[node.node_id] = client
            client = self._known[node.node_id]
            if client is not None:
                out[client] = node.node_id
        for node_id, client in self._ask_who(unknown).items():
            self._known[node_id] = client
            if client is not None:
                out[client] = node_id
        return out

    def _ask_who(self, nodes: Sequence[int]) -> dict[int, int | None]:
        """Nodes whose key the link has not authenticated sign a question instead; None: not enrolled."""
        from flwr.app import Message

        if not nodes:
            return {}
        nonce = secrets.token_hex(12)
        question = wrapped(seal({"kind": "who", "nonce": nonce, "federation": self.federation}, b"", self.key))
        sent = {
            i: n for i, n in zip(self.grid.push_messages([Message(question, n, "query", ttl=60.0) for n in nodes]), nodes, strict=True) if i
        }
        found: dict[int, int | None] = {}
        deadline = time.monotonic() + 60.0
        while sent and time.monotonic() < deadline:
            for reply in self.grid.pull_messages(list(sent)):
                node = sent.pop(reply.metadata.reply_to_message_id)
                found[node] = None if reply.has_error() else self._who(unwrapped(reply.content), nonce)
            time.sleep(POLL)
        return found

    def _who(self, data: bytes, nonce: str) -> int | None:
        for c, member in enumerate(self.members):
            try:
                head, _ = unseal(data, member.key, 0)
            except Refused:
                continue
            return c if get(head, "nonce", str, "") == nonce and get(head, "client", int, -1) == c else None
        return None

    def wait(self, count: int, seconds: float) -> int:
        """Wait until ``count`` clients are online; how many are in the end."""
        deadline = time.monotonic() + seconds
        while (there := len(self.nodes())) < count and time.monotonic() < deadline:
            time.sleep(0.5)
        return there

    def ask(self, messages: Mapping[int, bytes], deadline: float | None) -> dict[int, bytes | str]:
        """Push all, pull until everybody has answered, gone offline, or the deadline is over."""
        from flwr.app import Message

        started, nodes = time.monotonic(), self.nodes()
        out: dict[int, bytes | str] = {c: "node offline" for c in messages if c not in nodes}
        ttl = 60.0 + (deadline or 12 * 3600.0)
        asked = [c for c in messages if c in nodes]
        pushed = self.grid.push_messages([Message(wrapped(messages[c]), nodes[c], "train", ttl=ttl) for c in asked]) if asked else []
        waiting = {}
        for i, c in zip(pushed, asked, strict=True):
            if i:
                waiting[i] = c
            else:
                out[c] = "the link did not take the message"
        looked = time.monotonic()
        while waiting:
            for reply in self.grid.pull_messages(list(waiting)):
                if reply.metadata.reply_to_message_id not in waiting:
                    continue
                c = waiting.pop(reply.metadata.reply_to_message_id)
                try:
                    out[c] = f"node: {reply.error.reason}"[:500] if reply.has_error() else unwrapped(reply.content)
                except ValueError as error:
                    out[c] = f"refused: {error}"
            now = time.monotonic()
            if deadline is not None and now - started > deadline:
                out |= {c: f"no answer within {deadline:g} s" for c in waiting.values()}
                break
            if now - looked > LOOK:
                looked, online = now, set(self.grid.get_node_ids())
                for i, c in list(waiting.items()):
                    if nodes[c] not in online:
                        out[c] = "node went offline"
                        del waiting[i]
            time.sleep(POLL)
        return out


def _line(public_key: bytes) -> str:
    """A node's key as one line; Flower has it in PEM."""
    from cryptography.hazmat.primitives import serialization

    try:
        return public_text(serialization.load_pem_public_key(public_key))  # type: ignore[arg-type]
    except (ValueError, AttributeError):
        return ""


class Status(Callback):
    """``status.json`` in the run folder: waiting, running, finished, failed or stopped, and why."""

    def __init__(self, folder: Path, recipe: Recipe, members: Sequence[Member], submission: str) -> None:
        self.folder = folder
        self.document: dict[str, Any] = {
            "submission": submission,
            "rounds": recipe.rounds,
            "clients": [m.name for m in members],
            "round": 0,
        }

    def say(self, state: str, why: str = "") -> None:
        """Write it."""
        self.document |= {"state": state, "why": why, "time": time.time()}
        checkpoint.write_atomic(self.folder / "status.json", json.dumps(self.document, indent=1).encode())

    def begin(self, line: str, recipe: Recipe, start: int) -> None:
        """Rounds begin."""
        self.document["round"] = start
        self.say("running")

    def round(self, line: str, row: dict[str, Any]) -> None:
        """One is done."""
        self.document["round"] = row["round"] + 1
        self.say("running")
        done = len(row["cohort"]) - len(row["missing"])
        score = row["evaluation"].get("global", {}).get("accuracy")
        print(
            f"round {row['round']}: {done} of {len(row['cohort'])} clients" + ("" if score is None else f", accuracy {100 * score:.1f} %"),
            flush=True,
        )


class Stopped(Exception):
    """Told to stop."""


def run_name(folder: Path) -> str:
    """The name of a run for good, made at its first start."""
    path = folder / "run"
    if not path.exists():
        checkpoint.write_atomic(path, secrets.token_hex(8).encode())
    return path.read_text().strip()


def coordinate(
    grid: Any, app: Path, link: Path, runs: str = "", submission: str = "", wait: float = WAIT, leaving: float = LEAVING
) -> None:
    """Run the app's recipe; a run that was interrupted goes on.

    Raises:
        DeployError, RecipeError, RunError, CheckpointError: naming what is wrong; ``status.json`` says it too.
    """
    federation, recipe = Federation.read(app / "federation.json"), read_recipe(app / "recipe.toml")
    if digest(recipe) != federation.recipe:
        raise RunError("recipe.toml is not the recipe that federation.json names")
    members = [Member(c.name, read_public(c.key), c.rows) for c in federation.clients]
    folder = Path(runs) if runs else link.parent / "run"
    folder.mkdir(parents=True, exist_ok=True)
    # after a crash of the link its coordinator may still be on its way out
    if (lock := alone(folder, leaving)) is None:
        raise RunError(f"another coordinator is at work in {folder}; stop it first, or name another folder (runs = in the app's config)")
    status = Status(folder, recipe, members, submission)
    key = read_private(link / "coordinator.key")
    transport = GridTransport(grid, members, key, federation.name)
    status.say("waiting")

    def stop(*_: object) -> None:
        raise Stopped

    signal.signal(signal.SIGTERM, stop)
    try:
        task, method = make_task(recipe, folder), make_method(recipe).deployed()
        if task.clients != len(members):
            raise RunError(f"the recipe deals the data to {task.clients} clients; the federation has {len(members)}")
        e = recipe.engine
        need = e.quorum or len(members)
        if (there := transport.wait(need, wait)) < max(1, e.quorum):
            raise RunError(f"{there} of {len(members)} nodes are online after {wait:g} s; {max(1, e.quorum)} are needed")
        engine = RemoteEngine(
            method,
            task,
            members,
            transport,
            key,
            federation.name,
            federation.recipe,
            run_name(folder),
            e.deadline,
            Limits(e.weight, e.entry),
            e.quorum,
        )
        run(recipe, folder, folder, [status], resume=True, task=task, engine=engine)
        status.say("finished")
    except Stopped:
        status.say("stopped", "told to stop; start it again to go on")
        sys.exit(143)
    except Exception as error:
        status.say("failed", f"{type(error).__name__}: {error}"[:1000])
        raise
    finally:
        lock.close()
