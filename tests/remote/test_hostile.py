"""S1 to S7 and S11 to S14: what comes from outside is refused before it does anything, for a reason that is named."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import struct
import time
from dataclasses import replace

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus.core import checkpoint
from isthmus.core.checkpoint import CheckpointError
from isthmus.core.ledger import Ledger
from isthmus.core.recipe import RecipeError, parse
from isthmus.core.rounds import RoundRecord, RunError, server_start
from isthmus.core.wire import pack
from isthmus.deploy.files import DeployError, Federation, SiteFile, create
from isthmus.engines import messages
from isthmus.engines.messages import Refused, new_key, read_head, read_public, read_schema, seal, unseal
from isthmus.engines.site import KINDS, Policy

from ..conftest import digits_recipe
from ..contracts.contracts import difference
from ..contracts.contracts import play as simulate
from ..contracts.test_methods import method, task
from .field import COORDINATOR, KEYS, Loopback, engine_of, play, sites_of

LARGE = 1 << 30


def opened(reply: bytes, client: int = 0):
    return unseal(reply, KEYS[client].public_key(), LARGE)


def request(engine, t, client: int = 0, **changes) -> bytes:
    """An honest request of round 0, with changes."""
    start = server_start(engine.method, t, 0)
    body = changes.pop("body", b"")
    key = changes.pop("key", COORDINATOR)
    head = {
        "federation": "here", "recipe": "digest", "run": "run1", "round": 0, "kind": "train", "client": client, "nonce": "n1",
        "seen": -1, "schema": [], "personal": [], "directive": {},
    }  # fmt: skip
    assert start.round == 0
    return seal({n: v for n, v in (head | changes).items() if v is not None}, body, key)


@pytest.fixture
def field(tmp_path):
    one, t = method("fedavg"), task("digits")
    sites = sites_of(one, t, tmp_path)
    return engine_of(one, t, Loopback(sites)), t, sites


CANARY = []


class Bomb:
    def __reduce__(self):
        return (CANARY.append, (1,))


@pytest.mark.parametrize("wrap", [pickle.dumps, lambda b: b"\x80\x04" + pickle.dumps(b), lambda b: b"PK\x03\x04" + pickle.dumps(b)])
def test_s1_pickles_are_refused_and_never_opened(field, wrap, tmp_path):
    engine, t, sites = field
    data = wrap(Bomb())
    assert opened(sites[0].answer(data))[0]["status"] == "refused"
    head, _ = opened(sites[0].answer(request(engine, t, body=data)))
    assert head["status"] == "error" or head["status"] == "refused"
    engine.transport.way = lambda c, r, site: data if c == 1 else site.answer(r)
    _, _, records = play(engine.method, t, tmp_path, rounds=1, engine=engine)
    assert "refused" in records[0].missing[1]
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "state.safetensors").write_bytes(data)
    (tmp_path / "x" / "state.json").write_bytes(data)
    with pytest.raises(CheckpointError):
        checkpoint.load(tmp_path / "x")
    assert not CANARY


def test_s2_lengths_that_lie_are_refused_before_anything_is_read():
    key = new_key()
    good = seal({"a": 1}, b"body", key)
    frame = messages._FRAME
    magic, version, _pad, signature, head, _ = frame.unpack_from(good)
    for lie in (
        struct.pack("<4sBxHIQ", magic, version, signature, head, 1 << 60),
        struct.pack("<4sBxHIQ", magic, version, signature, 1 << 31, 4),
    ):
        with pytest.raises(Refused, match="oversized"):
            unseal(lie + good[frame.size :], key.public_key(), 100)
    with pytest.raises(Refused, match="oversized"):
        unseal(good, key.public_key(), 3)


@pytest.mark.parametrize(
    "table",
    [
        [["x", "float32", [1 << 60]]],
        [["x", "float32", [-1]]],
        [["x", "float32", [2.0]]],
        [["x", "float32", [True]]],
        [["x", "object", [1]]],
        [["x", "float32", [1]], ["x", "float32", [1]]],
        [["x" * 1000, "float32", [1]]],
        [["x", "float32", [1] * 20]],
        [["x", "float32"]],
        ["x"],
    ],
)
def test_s2_schemas_that_cannot_be(table):
    with pytest.raises(Refused, match="schema"):
        read_schema(table)


def test_s2_a_compressed_bomb_is_only_bytes(field):
    import zlib

    engine, t, sites = field
    head, _ = opened(sites[0].answer(request(engine, t, body=zlib.compress(bytes(10**7)), schema=[["head.bias", "float32", [10]]])))
    assert head["status"] == "refused"


WRONG = {
    "shape": lambda p: p | {"head.bias": torch.zeros(11)},
    "dtype": lambda p: p | {"head.bias": p["head.bias"].double()},
    "missing": lambda p: {n: x for n, x in p.items() if n != "head.bias"},
    "extra": lambda p: p | {"head.more": torch.zeros(1)},
    "name": lambda p: {("body.x" if n == "head.bias" else n): x for n, x in p.items()},
}


@pytest.mark.parametrize("what", WRONG)
def test_s3_a_wrong_update_alone_is_refused_and_the_rest_is_as_without_it(what, tmp_path):
    one, t = method("fedavg"), task("digits")
    start = server_start(one, t, 0)

    def way(c, data, site):
        reply = site.answer(data)
        if c != 2:
            return reply
        head, _ = opened(reply, 2)
        return seal(head, pack(WRONG[what](dict(start.shared))), KEYS[2])

    _, server, records = play(one, t, tmp_path, rounds=1, way=way)
    assert records[0].missing[2].startswith("refused")
    _, expected, _ = play(one, t, tmp_path / "without", rounds=1, way=lambda c, d, site: "away" if c == 2 else site.answer(d))
    assert difference(server.shared, expected.shared) == 0.0


@pytest.mark.parametrize("weight", [0, -1, 1e15, float("1e308"), "x", None, True, [1]])
def test_s4_claims_that_cannot_be_are_refused(weight, tmp_path):
    one, t = method("fedavg"), task("digits")

    def way(c, data, site):
        head, body = opened(site.answer(data), c)
        return seal(head | ({"weight": weight} if c == 1 else {}), body, KEYS[c])

    _, server, records = play(one, t, tmp_path, rounds=1, way=way)
    assert list(records[0].missing) == [1]
    assert all(torch.isfinite(x).all() for x in server.shared.values())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_s4_values_that_are_not_finite_are_refused(value, tmp_path):
    one, t = method("fedavg"), task("digits")
    start = server_start(one, t, 0)

    def way(c, data, site):
        reply = site.answer(data)
        if c != 3:
            return reply
        bad = {n: torch.full_like(x, value) if n == "head.bias" else x for n, x in start.shared.items()}
        return seal(opened(reply, 3)[0], pack(bad), KEYS[3])

    _, _, records = play(one, t, tmp_path, rounds=1, way=way)
    assert records[0].missing == {3: "refused: non-finite values in head.bias"}


def test_s5_replayed_edited_doubled_and_misdirected_replies_count_once_or_not_at_all(tmp_path):
    one, t = method("fedavg"), task("digits")
    old: dict[int, bytes] = {}

    def replayed(c, data, site):
        reply = site.answer(data)
        previous = old.get(c, reply)
        old[c] = reply
        return previous if c == 0 else reply

    _, _, records = play(one, t, tmp_path / "a", rounds=2, way=replayed)
    assert records[0].missing == {}
    assert "another message" in records[1].missing[0]

    def edited(c, data, site):
        reply = bytearray(site.answer(data))
        if c == 0:
            reply[-1] ^= 1
        return bytes(reply)

    assert "signature" in play(one, t, tmp_path / "b", rounds=1, way=edited)[2][0].missing[0]
    answers: dict[int, bytes] = {}

    def swapped(c, data, site):
        answers[c] = site.answer(data)
        return answers[0] if c == 1 else answers[c]

    assert "signature" in play(one, t, tmp_path / "c", rounds=1, way=swapped)[2][0].missing[1]


def test_s5_the_same_request_twice_has_the_same_answer_and_costs_nothing(field):
    engine, t, sites = field
    first = sites[0].answer(request(engine, t))
    calls = []
    sites[0].task = replace(t)
    sites[0]._received = lambda *a: calls.append(1)  # would train again
    head, body = opened(sites[0].answer(request(engine, t, nonce="n2")))
    assert head["nonce"] == "n2"
    assert body == opened(first)[1]
    assert not calls


def test_s5_a_noisy_answer_is_given_once(tmp_path):
    one, t = method("fedavg", channels=[{"kind": "gaussian", "clip": 1.0, "sigma": 1.0}]), task("digits")
    sites = sites_of(one, t, tmp_path)
    engine = engine_of(one, t, Loopback(sites))
    first, again = (opened(sites[0].answer(request(engine, t, nonce=n)))[1] for n in ("n1", "n2"))
    assert first == again  # not another sample of the noise
    head, _ = opened(sites[0].answer(request(engine, t, directive={"word": "x"})))
    assert "cost privacy" in head["why"]


def test_s6_nobody_but_the_coordinator_is_served_and_nobody_but_the_client_is_believed(field, tmp_path):
    engine, t, sites = field
    stranger = new_key()
    for data in (request(engine, t, key=stranger), request(engine, t, key=KEYS[1])):
        head, body = opened(sites[0].answer(data))
        assert (head["status"], body) == ("refused", b"")
        assert "signature" in head["why"]
    engine.transport.way = lambda c, d, site: seal(opened(site.answer(d), c)[0], b"", stranger) if c == 0 else site.answer(d)
    _, _, records = play(engine.method, t, tmp_path, rounds=1, engine=engine)
    assert "signature" in records[0].missing[0]
    # client 1 with its own key, speaking as client 0
    head, body = opened(sites[1].answer(request(engine, t, client=1)), 1)
    engine.transport.way = lambda c, d, site: seal(head | {"client": 0}, body, KEYS[1]) if c == 0 else site.answer(d)
    _, _, records = play(engine.method, t, tmp_path, rounds=1, engine=engine)
    assert "signature" in records[0].missing[0]


@pytest.mark.parametrize("run", ["../run", "/etc", "a/b", "a\\b", "a\0b", "", "x" * 100, "run1.", "é", "..", "run 1"])
def test_s7_runs_with_names_that_lead_elsewhere(field, run, tmp_path):
    engine, t, sites = field
    before = sorted(p for p in tmp_path.rglob("*"))
    head, _ = opened(sites[0].answer(request(engine, t, run=run)))
    assert head["status"] == "refused"
    assert sorted(p for p in tmp_path.rglob("*")) == before


def test_s7_two_runs_on_the_same_sites_do_not_touch(tmp_path):
    one, t = method("scaffold"), task("digits")
    sites = sites_of(one, t, tmp_path)
    a, b = engine_of(one, t, Loopback(sites), "runa"), engine_of(one, t, Loopback(sites), "runb")
    server_a, server_b = server_start(one, t, 0), server_start(one, t, 0)
    for _ in range(3):
        _, server_a, _ = play(one, t, tmp_path, rounds=1, server=server_a, engine=a)
        _, server_b, _ = play(one, t, tmp_path, rounds=1, server=server_b, engine=b)
    _, expected, _ = simulate(one, t, way="loop")
    assert difference(server_a.shared, expected.shared) <= 1e-6
    assert difference(server_b.shared, server_a.shared) == 0.0


def test_s11_a_ledger_that_was_edited_says_so(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for i in range(4):
        ledger.append(RoundRecord(i, [0, 1], {}, {0: (1, 2)}, {}, {"x": i / 3}, 0.1), {}, 1.0)
    assert ledger.verify() == 4
    lines = ledger.path.read_text().splitlines()
    for edited in (
        [lines[0], lines[2], lines[3]],
        [lines[1], lines[0], *lines[2:]],
        [lines[0], lines[1].replace('"x": 0.333', '"x": 0.334'), *lines[2:]],
        [*lines[:3], lines[3][:-5]],
    ):
        ledger.path.write_text("\n".join(edited) + "\n")
        with pytest.raises(CheckpointError, match="line"):
            ledger.verify()
    ledger.path.write_text("\n".join(lines) + "\n")
    ledger.cut(2)
    assert ledger.verify() == 2


@pytest.mark.parametrize(
    ("kind", "name"), [("fedper", "digits"), ("fedlova", "lora"), ("fedrecall", "lora"), ("fedibs", "biases"), ("beside", "lora")]
)
def test_s11_no_data_no_private_state_and_no_keys_in_logs_and_messages(kind, name, tmp_path, capfd):
    """All traffic of a run, its ledger and its logs, searched for rows, for what clients keep, and for keys."""
    one, t = method(kind), task(name)
    engine, server, records = play(one, t, tmp_path, rounds=3)
    traffic = b"".join(engine.transport.traffic)
    public = {x.contiguous().numpy().tobytes() for x in server.shared.values()}
    searched = 0
    for c in range(t.clients):
        _, memory, _ = checkpoint.load(tmp_path / str(c) / "run1" / "round-00002")
        for n, x in memory.items():
            raw = x.contiguous().numpy().tobytes()
            if n.startswith("memory/") and x.is_floating_point() and len(raw) >= 64 and len(x.unique()) > 8 and raw not in public:
                searched += 1
                assert raw[:48] not in traffic or raw[-48:] not in traffic, n
    assert searched
    text = repr(records).encode() + "".join(capfd.readouterr()).encode() + traffic
    if name == "digits":
        assert t.x[t.train[0][0]].contiguous().numpy().tobytes()[:64] not in text
    for key in (COORDINATOR, *KEYS):
        assert messages.private_bytes(key).splitlines()[2] not in text


def test_s7_recipes_with_names_that_lead_elsewhere_or_parts_that_are_no_parts():
    for table in (
        {"name": "../x"},
        {"name": "/x"},
        {"name": "x", "method": {"kind": "os:system"}},
        {"name": "x", "task": {"kind": "../logic"}},
    ):
        with pytest.raises(RecipeError):
            parse(table)


HOSTILE = {
    "kind": ("shell", "kind"),
    "recipe": ("other", "agreed"),
    "federation": ("there", "another one"),
    "client": (1, "this site is client 0"),
    "round": (-1, "from 0 on"),
    "seen": (5, "does not lie before"),
    "nonce": (None, "nonce is missing"),
    "schema": ([["rows", "float32", [3]]], "sends no tensor"),
    "directive": ("x", "must be dict"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_s12_plans_that_the_site_has_not_agreed_to(field, what):
    engine, t, sites = field
    value, why = HOSTILE[what]
    body = pack({"rows": torch.zeros(3)}) if what == "schema" else b""
    head, reply = opened(sites[0].answer(request(engine, t, body=body, **{what: value})))
    assert head["status"] == "refused"
    assert why in head["why"]
    assert reply == b""


def test_s12_the_sites_own_policy_wins(tmp_path):
    one, t = method("fedavg"), task("digits")
    for policy, why in (
        (Policy(message=10), "oversized"),
        (Policy(private=True), "without noise"),
        (Policy(secure=True), "secure sums only"),
        (Policy(recipes=frozenset({"mine"})), "agreed"),
    ):
        sites = sites_of(one, t, tmp_path, policy)
        engine = engine_of(one, t, Loopback(sites))
        start = server_start(one, t, 0)
        schema = [["head.bias", "float32", [10]]]
        head, _ = opened(sites[0].answer(request(engine, t, body=pack({"head.bias": start.shared["head.bias"]}), schema=schema)))
        assert head["status"] == "refused"
        assert why in head["why"]


def test_s12_another_architecture_or_values_that_are_not_finite_are_refused(field):
    engine, t, sites = field
    for tensor, why in ((torch.zeros(11), "the recipe has"), (torch.full((10,), torch.nan), "non-finite")):
        schema = [["head.bias", "float32", list(tensor.shape)]]
        head, _ = opened(sites[0].answer(request(engine, t, body=pack({"head.bias": tensor}), schema=schema)))
        assert head["status"] == "refused"
        assert why in head["why"]


@given(st.binary(max_size=400))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_s13_arbitrary_bytes_are_refused_by_every_parser(data):
    key = COORDINATOR.public_key()
    for parser in (lambda: unseal(data, key, 1000), lambda: read_head(data), lambda: read_public(data.decode("latin-1"))):
        try:
            parser()
        except Refused:
            continue
        except UnicodeEncodeError:
            continue


LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
INNER = LEAF | st.lists(LEAF, max_size=4) | st.dictionaries(st.text(), LEAF, max_size=4)


@given(INNER | st.lists(INNER, max_size=4) | st.dictionaries(st.text(), INNER, max_size=4))
@settings(max_examples=200, deadline=None)
def test_s13_arbitrary_json_as_files_and_tables(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "federation.json").write_text(json.dumps(value))
    (folder / "site.toml").write_text(json.dumps(value))
    with pytest.raises(DeployError):
        Federation.read(folder / "federation.json")
    with pytest.raises(DeployError):
        SiteFile.read(folder)
    if isinstance(value, list):
        with contextlib.suppress(Refused):
            read_schema(value)
    if isinstance(value, dict):
        with pytest.raises(RecipeError):
            parse(value)


def mutated(good: bytes, dice: random.Random) -> bytes:
    """A few bytes changed, left out or put in, anywhere."""
    data = bytearray(good)
    for _ in range(dice.randint(1, 6)):
        at, how = dice.randrange(len(data)), dice.randrange(3)
        if how == 0:
            data[at] = dice.randrange(256)
        elif how == 1:
            del data[at : at + dice.randint(1, 40)]
        else:
            data[at:at] = dice.randbytes(dice.randint(1, 40))
        data = data or bytearray(b"x")
    return bytes(data)


@pytest.mark.parametrize("count", [1000, pytest.param(100_000, marks=pytest.mark.fuzz)])
@pytest.mark.parametrize("kind", [*KINDS, "reply"])
def test_s13_mutated_messages_of_every_kind_are_refused_soon_and_leave_nothing_behind(field, kind, count):
    """No crash, nothing that takes a second, no memory that grows; a reply is looked at by the coordinator, the rest by a site."""
    engine, t, sites = field
    dice, good = random.Random(0), request(engine, t, kind=kind if kind != "reply" else "train", body=bytes(range(200)))
    good = sites[0].answer(good) if kind == "reply" else good
    slowest, start, started = 0.0, 0, time.monotonic()
    for i in range(count):
        data = mutated(good, dice)
        if data == good:
            continue
        began = time.thread_time()
        if kind == "reply":
            with pytest.raises(Refused):
                opened(data)
        else:
            assert opened(sites[0].answer(data))[0]["status"] == "refused"
        slowest = max(slowest, time.thread_time() - began)
        if i == count // 2:
            start = psutil.Process().memory_info().rss
    assert slowest < 1.0
    assert psutil.Process().memory_info().rss - start < 20e6
    print(f"{count} of {kind}: {time.monotonic() - started:.0f} s, slowest {1000 * slowest:.1f} ms")


@given(
    st.lists(st.lists(st.sampled_from(["ok", "lost", "dead", "late", "twice", "broken"]), min_size=4, max_size=4), min_size=1, max_size=4),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_s14_whatever_happens_the_result_is_that_of_the_accepted_updates(tmp_path_factory, story, restart):
    """Random losses, crashes, doubles and damage: every round's result is what the simulator makes of the same accepted clients."""
    one, t = method("scaffold"), task("digits")
    folder = tmp_path_factory.mktemp("story")
    sites = sites_of(one, t, folder)
    acts: list[str] = []

    def way(c, data, site):
        act = acts[c]
        if act == "lost":
            return "no answer"
        if act == "dead":  # it trained, wrote its state, and its answer never came
            site.answer(data)
            return "node went offline"
        if act == "twice":
            site.answer(data)
        reply = site.answer(data)
        return reply[:-3] if act == "broken" else reply if act != "late" else "no answer within 1 s"

    engine = engine_of(one, t, Loopback(sites, way))
    server, expected = server_start(one, t, 0), server_start(one, t, 0)
    simulator, _, _ = simulate(one, t, rounds=0, way="loop")
    for round_ in story:
        acts[:] = round_
        good = [c for c, act in enumerate(round_) if act in ("ok", "twice")]
        if restart:  # the coordinator and all sites are new processes
            sites = sites_of(one, t, folder)
            engine = engine_of(one, t, Loopback(sites, way))
        if not good:
            with pytest.raises(RunError, match="0 of 4"):
                play(one, t, folder, rounds=1, server=server, engine=engine)
            continue
        _, server, records = play(one, t, folder, rounds=1, server=server, engine=engine)
        assert [c for c in range(4) if c not in records[0].missing] == good
        expected = _of(one, t, simulator, expected, good)
        assert difference(server.shared, expected.shared) <= 1e-5
        assert server.seen == expected.seen


def _of(one, t, simulator, server, good):
    from isthmus.core.rounds import close_round, open_round

    outgoing = open_round(one, server)
    replies = simulator.exchange(outgoing)
    update = replies.update.take(torch.tensor(good))
    after, _ = close_round(one, t, server, outgoing, replace(replies, update=update))
    simulator.commit(good)
    return after


def test_a_federation_is_refused_where_its_names_or_its_recipe_cannot_be(tmp_path):
    recipe = digits_recipe()
    for names in (["a"], ["a", "a"], ["../a", "b"], ["a b", "c"], ["", "b"]):
        with pytest.raises(DeployError):
            create(tmp_path / "x", recipe, names)
    with pytest.raises(DeployError, match="host:port"):
        create(tmp_path / "x", recipe, ["a", "b"], "nowhere")
    with pytest.raises(RecipeError, match="does not run between machines"):
        create(tmp_path / "x", digits_recipe(**{"method.kind": "local"}), ["a", "b"])
    create(tmp_path / "x", recipe, ["a", "b"])
    with pytest.raises(DeployError, match="not empty"):
        create(tmp_path / "x", recipe, ["a", "b"])
    secrets = [p for p in (tmp_path / "x").rglob("*.key")]
    assert len(secrets) == 5
    assert all(p.stat().st_mode & 0o077 == 0 for p in secrets)


def test_a_site_that_lost_its_disk_begins_anew(tmp_path):
    import shutil

    one, t = method("scaffold"), task("digits")
    engine, server, _ = play(one, t, tmp_path, rounds=2)
    shutil.rmtree(tmp_path / "1" / "run1")
    engine, server, records = play(one, t, tmp_path, rounds=2, server=server, engine=engine)
    assert records[0].missing[1].startswith("forgot")
    assert 1 not in records[1].missing
    assert server.seen == (3, 3, 3, 3)
