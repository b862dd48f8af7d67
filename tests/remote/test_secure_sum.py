"""S9: the server learns the sum, for every set of dropouts that leaves enough clients, and nothing else."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from isthmus.core.rounds import RunError
from isthmus.core.types import CompositionError
from isthmus.engines.messages import Refused, unseal
from isthmus.engines.secure import Secrets, context_of, keystream, threshold_of, unmasked
from isthmus.engines.site import Policy
from isthmus.parts.channels.privacy import GaussianNoise
from isthmus.parts.channels.quantise import Int8
from isthmus.parts.channels.secure import SecureSum

from ..contracts import contracts
from ..contracts.contracts import difference
from ..contracts.test_methods import method, task
from .field import COORDINATOR, play

CONTEXT = context_of("here", "run", 0)


def prepared(n: int, threshold: int, fewest: int = 3):
    sites = {c: Secrets(c, CONTEXT, fewest) for c in range(n)}
    keys = {c: s.public for c, s in sites.items()}
    dealt = {c: s.deal(keys, threshold) for c, s in sites.items()}
    for c, s in sites.items():
        s.receive({u: dealt[u][c] for u in range(n) if u != c})
    return sites, keys


@pytest.mark.parametrize("gone", [g for k in range(5) for g in itertools.combinations(range(7), k)])
def test_s9_every_set_of_dropouts(gone):
    n, threshold = 7, 4
    rng = np.random.default_rng(0)
    sites, keys = prepared(n, threshold)
    x = {c: rng.integers(0, 2**64, 50, dtype=np.uint64) for c in range(n)}
    alive = [c for c in range(n) if c not in gone]
    masked = {c: sites[c].mask(x[c]) for c in alive}
    if len(alive) < threshold:
        with pytest.raises(Refused, match="survivors"):
            sites[alive[0]].reveal(alive)
        return
    told = {c: sites[c].reveal(alive) for c in alive}
    total = unmasked(masked, keys, range(n), told, threshold, CONTEXT)
    np.testing.assert_array_equal(total, sum(x[c] for c in alive))


def test_s9_too_few_shares_open_nothing():
    sites, keys = prepared(5, 4)
    alive = [0, 1, 2, 3]
    masked = {c: sites[c].mask(np.zeros(3, np.uint64)) for c in alive}
    told = {c: sites[c].reveal(alive) for c in alive[:3]}
    with pytest.raises(Refused, match="revealed"):
        unmasked(masked, keys, range(5), told, 4, CONTEXT)


def test_s9_a_site_never_tells_both_secrets_of_one_client():
    sites, _ = prepared(5, 3)
    sites[0].reveal([0, 1, 2, 3])
    assert sites[0].reveal([3, 2, 1, 0])  # the same question again
    with pytest.raises(Refused, match="another list"):
        sites[0].reveal([0, 1, 2, 4])


def test_s9_a_site_sends_one_vector_a_round():
    sites, _ = prepared(3, 3)
    sites[0].mask(np.zeros(2, np.uint64))
    with pytest.raises(Refused, match="has sent"):
        sites[0].mask(np.ones(2, np.uint64))


def test_s9_masked_vectors_look_uniform():
    sites, _ = prepared(3, 3)
    y = sites[1].mask(np.zeros(200_000, np.uint64))
    for shift in (0, 24, 56):
        counts = np.bincount(((y >> np.uint64(shift)) & np.uint64(255)).astype(int), minlength=256)
        assert chisquare(counts).pvalue > 1e-4


def test_a_participant_insists_on_company_and_on_honest_lists():
    a, b, c = (Secrets(i, CONTEXT) for i in range(3))
    with pytest.raises(Refused, match="insists on 3"):
        a.deal({0: a.public, 1: b.public}, 2)
    with pytest.raises(Refused, match="more than half"):
        a.deal({0: a.public, 1: b.public, 2: c.public}, 1)
    with pytest.raises(Refused, match="twice"):
        a.deal({0: a.public, 1: b.public, 2: b.public}, 2)
    a.deal({0: a.public, 1: b.public, 2: c.public}, 3)
    with pytest.raises(Refused, match="dealt already"):
        a.deal({0: a.public, 1: b.public, 2: c.public}, 3)
    with pytest.raises(Refused, match="does not decrypt"):
        a.receive({1: bytes(92)})


def test_the_keystream_is_chacha20():
    """RFC 8439, appendix A.1, test vector 1: key and nonce of zeros, block 0."""
    assert keystream(bytes(32), 2).tobytes().hex() == "76b8e0ada0f13d90405d6ae55386bd28"


@pytest.mark.parametrize(("kind", "name"), [("fedavg", "digits"), ("fedprox", "lora"), ("fedadam", "ranks"), ("fedlova", "lora")])
def test_the_sum_over_messages_equals_the_simulated_one(kind, name, tmp_path):
    one = method(kind, channels=[{"kind": "secure_sum"}])
    _, server, expected = contracts.play(one, task(name), way="loop")
    engine, over, records = play(one, task(name), tmp_path)
    assert difference(over.shared, server.shared) <= 1e-6
    assert over.seen == server.seen
    assert [(r.up, r.down, r.missing) for r in records] == [(r.up, r.down, r.missing) for r in expected]
    assert records[-1].metrics["clipped"] == 0.0
    _, plain, _ = contracts.play(method(kind), task(name), way="loop")
    assert difference(over.shared, plain.shared) <= 1e-4
    assert engine.evaluate(over) is None  # one client's metric would leave


@pytest.mark.parametrize("step", ["keys", "shares", "train", "unmask"])
def test_a_client_that_leaves_at_any_step(step, tmp_path):
    """Leaving before its vector is sent costs the client's part, leaving after costs nothing."""
    one, t = method("fedavg", channels=[{"kind": "secure_sum"}]), task("digits")

    def way(c, request, site):
        head, _ = unseal(request, COORDINATOR.public_key(), 1 << 30)
        return "cable cut" if c == 2 and head["kind"] == step else site.answer(request)

    _, over, records = play(one, t, tmp_path, rounds=1, way=way)
    counted = [c for c in range(4) if over.seen[c] == 0]
    assert counted == ([0, 1, 2, 3] if step == "unmask" else [0, 1, 3])
    assert records[0].missing == ({} if step == "unmask" else {2: "cable cut"})
    keep = [len(t.rows(c, "train")) for c in counted]
    assert records[0].metrics["weight"] == sum(keep)


def test_with_too_few_left_the_round_ends_with_a_reason(tmp_path):
    one = method("fedavg", channels=[{"kind": "secure_sum"}])

    def way(c, request, site):
        head, _ = unseal(request, COORDINATOR.public_key(), 1 << 30)
        return "cable cut" if c > 1 and head["kind"] == "train" else site.answer(request)

    with pytest.raises(RunError, match="3 are needed to open the sum"):
        play(one, task("digits"), tmp_path, rounds=1, way=way)
    assert threshold_of(4) == 3


def test_no_single_update_is_on_the_wire(tmp_path):
    """What travels of one client has nothing to do with its update: the correlation of a masked vector with it is that of noise."""
    one, t = method("fedavg", channels=[{"kind": "secure_sum"}]), task("digits")
    engine, _, _ = play(one, t, tmp_path, rounds=1)
    bare, _, _ = play(method("fedavg"), t, tmp_path / "bare", rounds=1)
    masked = [d for d in engine.transport.traffic if len(d) > 8000]
    assert masked
    plain = [np.frombuffer(d[-4800:], "<f4") for d in bare.transport.traffic if len(d) > 4800]
    for data in masked:
        y = np.frombuffer(data[-9600:], "<i8").astype(float)
        for x in plain:
            assert abs(np.corrcoef(y, x)[0, 1]) < 0.15 or not np.isfinite(np.corrcoef(y, x)[0, 1])


def test_what_does_not_fit_is_refused_when_it_is_built():
    for kind in ("scaffold", "fedibs", "flexlora"):
        with pytest.raises(CompositionError):
            method(kind, channels=[{"kind": "secure_sum"}])
    plain = method("fedavg", channels=[{"kind": "secure_sum"}])
    with pytest.raises(CompositionError, match="behind one whose values are summed"):
        replace(plain, channels=(*plain.channels, GaussianNoise(1.0, 1.0)))
    with pytest.raises(CompositionError, match="needs the payload"):
        replace(plain, channels=(Int8(), SecureSum()))
    with pytest.raises(ValueError, match="63 are there"):
        SecureSum(bits=40, largest=1e6)


def test_entries_beyond_the_bound_are_told():
    channel, inbox = SecureSum(largest=1.0), None
    from isthmus.core.types import Inbox

    inbox = Inbox({}, 0, torch.tensor(0), weight=torch.tensor(2.0))
    sent = channel.encode({"x": torch.tensor([0.5, 3.0, float("nan"), -9.0]), "count": torch.tensor([3, 4])}, inbox)
    assert sent["@clipped"].item() == 3
    back = channel.decode(sent, {"x": (torch.float32, (4,)), "count": (torch.int64, (2,))})
    assert back["x"].tolist() == [0.5, 1.0, 0.0, -1.0]
    assert back["count"].tolist() == [3, 4]


def test_a_site_that_insists_on_secure_sums_sends_nothing_else(tmp_path):
    from .field import Loopback, engine_of, sites_of

    one, t = method("fedavg"), task("digits")
    engine = engine_of(one, t, Loopback(sites_of(one, t, tmp_path, Policy(secure=True))))
    with pytest.raises(RunError, match="secure sums only"):
        play(one, t, tmp_path, engine=engine)
