"""The door of a site: a socket on its own machine, behind which one process holds the model and the data.

Flower starts a process for every message.  It imports nothing heavy: it hands the message in at the door and takes the reply.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

_LENGTH = struct.Struct("<Q")


def address(folder: Path) -> str:
    """The socket's path; in a folder of this user where the site's own path is too long for one."""
    path = str(folder.resolve() / "site.sock")
    if len(path.encode()) < 100:
        return path
    private = Path(tempfile.gettempdir()) / f"isthmus-{os.getuid()}"
    private.mkdir(mode=0o700, exist_ok=True)
    if private.stat().st_uid != os.getuid() or private.stat().st_mode & 0o077:
        raise PermissionError(f"{private} belongs to somebody else, or is open to others")
    return str(private / hashlib.sha256(path.encode()).hexdigest()[:32])


def _read(connection: socket.socket, count: int) -> bytes:
    parts, left = [], count
    while left:
        part = connection.recv(min(left, 1 << 20))
        if not part:
            raise ConnectionError("the other side closed")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _receive(connection: socket.socket, largest: int) -> bytes:
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > largest:
        raise ConnectionError(f"{length} bytes; at most {largest}")
    return _read(connection, length)


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(data)) + data)


def knock(folder: Path, message: bytes, wait: float = 300.0) -> bytes:
    """The site's reply; its process is started where none is there or on its way, and has ``wait`` seconds to open.

    Raises:
        ConnectionError: it does not open, or dies.
    """
    deadline, where = time.monotonic() + wait, address(folder)
    started: subprocess.Popen[bytes] | None = None
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.connect(where)
            except OSError:
                if started is not None and started.poll():
                    raise ConnectionError(f"the site's process ended with code {started.returncode}; see {folder / 'site.log'}") from None
                if (started is None or started.poll() == 0) and (lock := alone(folder)):
                    lock.close()
                    started = start(folder)
                if time.monotonic() > deadline:
                    raise ConnectionError(f"the site's process did not open within {wait:g} s; see {folder / 'site.log'}") from None
                time.sleep(0.1)
                continue
            _send(connection, message)
            return _receive(connection, 1 << 40)


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start the process behind the door, detached."""
    with (folder / "site.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "isthmus.deploy.worker", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def alone(folder: Path, wait: float = 0.0) -> IO[str] | None:
    """Hold a folder against a second process until the file is closed; None: another one holds it, for longer than ``wait`` s."""
    file, deadline = (folder / "lock").open("w"), time.monotonic() + wait
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError:
            if time.monotonic() > deadline:
                file.close()
                return None
            time.sleep(0.05)


def serve(folder: Path, answer: Callable[[bytes], bytes], largest: int, idle: float, alive: Callable[[], bool]) -> None:
    """Answer one message after the other until nobody has knocked for ``idle`` seconds, or ``alive`` says no.

    Whoever calls this holds the folder (`alone`): the socket of a process that was killed is removed.
    """
    where = address(folder)
    Path(where).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        previous = os.umask(0o177)
        try:
            server.bind(where)
        finally:
            os.umask(previous)
        server.listen(8)
        server.settimeout(1.0)
        last = time.monotonic()
        try:
            while alive() and time.monotonic() - last < idle:
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                with connection:
                    try:
                        connection.settimeout(60.0)
                        message = _receive(connection, largest)
                        connection.settimeout(None)
                        _send(connection, answer(message))
                    except (OSError, ConnectionError) as error:
                        print(f"a connection broke: {error}", file=sys.stderr, flush=True)
                last = time.monotonic()
        finally:
            Path(where).unlink(missing_ok=True)
