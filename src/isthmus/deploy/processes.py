"""The processes of a federation: the link, a node, a run, or all of them on one machine for trying."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import door
from .files import DeployError, SiteFile, of_folder, split_address

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "PYTHONUNBUFFERED": "1"}


def tool(name: str) -> str:
    """A command of Flower's in this environment.

    Raises:
        DeployError: not installed.
    """
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise DeployError(f"{name} is not installed: pip install 'isthmus[deploy]'")
    return str(path)


def environment(**more: str) -> dict[str, str]:
    """Of a child process; Flower starts further ones by name."""
    return {**os.environ, **QUIET, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}", **more}


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def link_command(folder: Path, host: str, port: int, insecure: bool) -> list[str]:
    """The SuperLink of a federation; its state outlives it in ``link/state.db``."""
    of_folder(folder)
    link = folder / "link"
    command = [tool("flower-superlink"), "--disable-runtime-dependency-installation", "--host", host, "--port", str(port)]
    command += ["--database", str(link / "state.db")]
    if insecure:
        return [*command, "--insecure"]
    if not (link / "server.pem").exists():
        raise DeployError(f"{link} has no certificate; the federation was made with --insecure")
    certificates = [
        "--ssl-ca-certfile",
        str(link / "ca.pem"),
        "--ssl-certfile",
        str(link / "server.pem"),
        "--ssl-keyfile",
        str(link / "server.key"),
    ]
    return [*command, *certificates, "--enable-supernode-auth"]


def node_command(site: Path, insecure: bool, port: int | None = None) -> list[str]:
    """The SuperNode of a site."""
    about = SiteFile.read(site)
    command = [tool("flower-supernode"), "--superlink", about.link, "--host", "127.0.0.1", "--port", str(port or free_port())]
    command += ["--node-config", f"site={json.dumps(str(site.resolve()))}"]
    if insecure:
        return [*command, "--insecure"]
    if not (site / "ca.pem").exists():
        raise DeployError(f"{site} has no ca.pem; the federation was made with --insecure")
    return [*command, "--root-certificates", str(site / "ca.pem"), "--auth-supernode-private-key", str(site / "node.key")]


def kept_up(command: Sequence[str]) -> list[str]:
    """The command, started again whenever it fails."""
    return [sys.executable, "-m", "isthmus.deploy.supervise", *command]


def opened(host: str, port: int, seconds: float, process: subprocess.Popen[Any]) -> None:
    """Wait until a port answers.

    Raises:
        DeployError: the process ends, or the port stays closed.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise DeployError(f"the SuperLink ended with code {process.returncode}; see its log")
        try:
            socket.create_connection((host, port), 1.0).close()
            return
        except OSError:
            time.sleep(0.1)
    raise DeployError(f"nothing answers at {host}:{port} after {seconds:g} s")


def flwr(folder: Path, *arguments: str) -> dict[str, Any]:
    """A command of ``flwr`` against the federation's link, its answer as JSON.

    Raises:
        DeployError: with what it says.
    """
    done = subprocess.run(
        [tool("flwr"), *arguments, "--format", "json"],
        capture_output=True,
        text=True,
        env=environment(FLWR_HOME=str((folder / "link" / "flwr").resolve())),
        timeout=120,
    )
    text = done.stdout[done.stdout.find("{") :] if "{" in done.stdout else ""
    try:
        answer = json.JSONDecoder().raw_decode(text)[0]
    except ValueError:
        answer = {}
    if done.returncode or not answer.get("success", True):
        why = answer.get("error-message") or (done.stdout + done.stderr).strip()[-500:]
        raise DeployError(f"flwr {' '.join(arguments[:2])}: {why}")
    return dict(answer)


def register(folder: Path) -> None:
    """Enrol the nodes' keys at the link; those that are there already stay."""
    for name in [c.name for c in of_folder(folder).clients]:
        try:
            flwr(folder, "supernode", "register", str(folder / "sites" / name / "node.pub"), "link", "--name", name)
        except DeployError as error:
            if "already" not in str(error):
                raise


def submit(folder: Path) -> str:
    """Submit the app; the number of this submission, which `follow` takes.

    Raises:
        DeployError: not taken.
    """
    of_folder(folder)
    answer = flwr(folder, "run", str((folder / "app").resolve()), "link")
    if not answer.get("run-id"):
        raise DeployError(f"flwr run: no run-id in its answer: {answer}")
    return str(answer["run-id"])


def ended(folder: Path, submission: str) -> str | None:
    """Why a submission is over, by the link; None: it is not, or the link does not answer."""
    with suppress(DeployError):
        for row in flwr(folder, "list", "link", "--run-id", submission)["runs"]:
            if row["status"].startswith("finished"):
                return str(row["status-details"])
    return None


def follow(
    folder: Path, submission: str, say: Callable[[dict[str, Any]], None], alive: Callable[[], str | None], patience: float = 300.0
) -> dict[str, Any]:
    """Watch ``run/status.json`` until a submission has ended; ``alive`` says why it cannot go on, if so.

    The link is asked too, every few seconds until the run has begun: an app may end before it can say so, or without a word.

    Raises:
        DeployError: the run failed, was stopped, or never began.
    """
    path, last, began = folder / "run" / "status.json", None, time.monotonic()
    ask = began + 5.0
    while True:
        over = None
        if time.monotonic() > ask:
            over, ask = ended(folder, submission), time.monotonic() + (5.0 if last is None else 30.0)
        try:
            status = json.loads(path.read_text())
        except (OSError, ValueError):
            status = {}
        if status.get("submission") != submission:  # an earlier one's last word
            status = {}
        if status and status != last:
            say(status)
            last = status
        if status.get("state") == "finished":
            return dict(status)
        if status.get("state") in ("failed", "stopped"):
            raise DeployError(f"the run {status['state']}: {status['why']}")
        if over is not None:
            raise DeployError(f"the run is over: {over}")
        if last is None and time.monotonic() - began > patience:
            raise DeployError(f"the run did not begin within {patience:g} s; see {folder / 'log'}")
        if (why := alive()) is not None:
            raise DeployError(why)
        time.sleep(0.2)


class Trial:
    """A link, nodes and sites as processes of this machine, ended with the block.

    Args:
        folder: made by `files.create`.
        insecure: no TLS, no authentication of nodes.
        threads: of torch in each site.
    """

    def __init__(self, folder: Path, insecure: bool = False, threads: int = 1) -> None:
        self.folder, self.insecure, self.threads = folder.resolve(), insecure, threads
        self.federation = of_folder(folder)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.host, self.port = split_address(SiteFile.read(folder / "sites" / self.federation.clients[0].name).link)

    def _start(self, name: str, command: Sequence[str], **more: str) -> subprocess.Popen[bytes]:
        (self.folder / "log").mkdir(exist_ok=True)
        with (self.folder / "log" / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(**more), start_new_session=True
            )
        self.processes[name] = process
        return process

    def start_link(self) -> None:
        """The SuperLink."""
        command = link_command(self.folder, self.host, self.port, self.insecure)
        more = {"FLWR_HOME": str(self.folder / "link" / "flwr"), "OMP_NUM_THREADS": str(self.threads)}
        opened(self.host, self.port, 60.0, self._start("link", command, **more))

    def start_node(self, name: str) -> None:
        """A SuperNode and the process of its site."""
        site, threads = self.folder / "sites" / name, str(self.threads)
        more = {"FLWR_HOME": str(site / "flwr"), "ISTHMUS_PARENT": str(os.getpid()), "ISTHMUS_THREADS": threads, "OMP_NUM_THREADS": threads}
        self._start(f"{name}-site", [sys.executable, "-m", "isthmus.deploy.worker", str(site)], **more)
        self._start(name, kept_up(node_command(site, self.insecure)), **more)

    def __enter__(self) -> Trial:
        try:
            self.start_link()
            if not self.insecure:
                register(self.folder)
            for client in self.federation.clients:
                self.start_node(client.name)
        except BaseException:
            self.close()
            raise
        return self

    def run(self, say: Callable[[dict[str, Any]], None] = lambda status: None) -> dict[str, Any]:
        """Submit the run and follow it to its end."""
        return follow(self.folder, submit(self.folder), say, self.broken)

    def broken(self) -> str | None:
        """Why the run cannot go on, if a process has ended that must not."""
        code = self.processes["link"].poll() if "link" in self.processes else -1
        return None if code is None else f"the link ended with code {code}; see {self.folder / 'log' / 'link.log'}"

    def kill(self, name: str, how: int = signal.SIGKILL) -> None:
        """End a process and all that it started."""
        process = self.processes.pop(name, None)
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, how)
            process.wait(20)

    def close(self) -> None:
        """End everything."""
        names = list(self.processes)
        for name in names:
            with suppress(ProcessLookupError):
                os.killpg(self.processes[name].pid, signal.SIGTERM)
        deadline = time.monotonic() + 5.0
        for name in names:
            with suppress(subprocess.TimeoutExpired):
                self.processes[name].wait(max(0.1, deadline - time.monotonic()))
            self.kill(name)
        for client in self.federation.clients:
            Path(door.address(self.folder / "sites" / client.name)).unlink(missing_ok=True)

    def __exit__(self, *_: object) -> None:
        self.close()


def run_foreground(commands: Sequence[tuple[Sequence[str], dict[str, str]]]) -> int:
    """Run commands side by side until one ends or we are told to stop; the first one's exit code."""
    processes: list[subprocess.Popen[bytes]] = []

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        for command, more in commands:
            processes.append(subprocess.Popen(list(command), env=environment(**more), start_new_session=True))
        while all(p.poll() is None for p in processes):
            time.sleep(0.2)
        return int(processes[0].poll() or 0)
    except KeyboardInterrupt:
        return 130
    finally:
        for p in processes:
            with suppress(ProcessLookupError):
                os.killpg(p.pid, signal.SIGTERM)
        for p in processes:
            try:
                p.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(p.pid, signal.SIGKILL)
