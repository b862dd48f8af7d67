from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from isthmus.core.batches import Batches
from isthmus.core.rounds import RunError, open_round, server_round, server_start
from isthmus.core.types import Inbox
from isthmus.engines.evaluate import evaluate
from isthmus.engines.simulator import ClientError, Faults, Simulator
from isthmus.federated.fedavg import plain
from isthmus.federated.fedsa_lora import fedsa_lora
from isthmus.federated.references import local
from isthmus.parts.work import LocalTraining, NoTraining

from ..conftest import digits_task, tiny_text_task
from ..contracts.contracts import TOLERANCE, difference, play

METHOD = plain(LocalTraining("sgd", 0.3))


@pytest.mark.parametrize("make", [digits_task, tiny_text_task])
def test_chunks_of_any_size_give_the_same(make):
    task = make()
    runs = []
    for chunk in (1, 3, 64):
        _, server, _ = play(METHOD, task, running=Simulator(METHOD, task, 0, Batches(8), "together", chunk))
        runs.append(server.shared)
    assert difference(runs[0], runs[2]) <= TOLERANCE
    assert difference(runs[1], runs[2]) <= TOLERANCE


def test_every_client_takes_as_many_steps_as_its_rows_ask_for():
    task = digits_task()
    engine, server = Simulator(METHOD, task, 0, Batches(8, epochs=2)), server_start(METHOD, task, 0)
    steps = engine.exchange(open_round(METHOD, server)).update.report["steps"]
    assert steps.tolist() == [2 * -(-len(r) // 8) for r in task.train]


def test_batches_cover_every_row_once_in_each_pass():
    rows = torch.arange(100, 121)
    drawn = Batches(8, epochs=2).draw(rows, 0, 0, 0)
    assert drawn.shape == (6, 8)
    for half in drawn.view(2, 24):
        assert sorted(half[half >= 0].tolist()) == rows.tolist()
    assert not torch.equal(drawn[:3], drawn[3:])
    assert torch.equal(drawn, Batches(8, epochs=2).draw(rows, 0, 0, 0))
    assert Batches(8, steps=7).draw(rows, 0, 0, 0).shape == (7, 8)
    with pytest.raises(ValueError, match=r"train\.size = 0"):
        Batches(0)


def test_participation_is_a_fraction_and_changes_by_round():
    task = digits_task(**{"partition.clients": 8})
    method = plain(LocalTraining("sgd", 0.1), 0.5)
    _, server, records = play(method, task, rounds=4)
    assert all(len(r.cohort) == 4 for r in records)
    assert len({tuple(r.cohort) for r in records}) > 1
    assert max(server.seen) == 3


def test_dropouts_and_stragglers_are_recorded_and_the_round_goes_on():
    task = digits_task(**{"partition.clients": 8})
    engine = Simulator(METHOD, task, 0, Batches(8), faults=Faults(dropout=0.3, deadline=1.0, step_seconds=0.15, spread=0.8))
    server, reasons, missing = server_start(METHOD, task, 0), set(), 0
    for _ in range(6):
        before = server
        server, record = server_round(METHOD, task, server, engine)
        reasons |= {why.split(":")[0] for why in record.missing.values()}
        missing += len(record.missing)
        assert not set(record.missing) & set(record.up)
        assert all(server.seen[c] == before.seen[c] for c in record.missing)
        assert record.seconds <= 1.0
    assert reasons == {"dropped out", "late"}
    assert 0 < missing < 48


def test_a_round_that_nobody_answers_changes_nothing():
    task = digits_task()
    engine, server = Simulator(METHOD, task, 0, Batches(8), faults=Faults(deadline=1e-9)), server_start(METHOD, task, 0)
    after, record = server_round(METHOD, task, server, engine)
    assert difference(after.shared, server.shared) == 0
    assert (after.round, len(record.missing)) == (1, task.clients)


def test_a_client_with_non_finite_values_is_refused_and_named_and_its_memory_stays():
    task = digits_task()
    task.x = task.x.clone()
    task.x[task.train[2][0]] = float("nan")
    method = local(METHOD)
    method = fedsa_like(method)
    engine, server = Simulator(method, task, 0, Batches(8)), server_start(method, task, 0)
    before = engine.memory(2)
    after, record = server_round(method, task, server, engine)
    assert record.missing == {2: record.missing[2]}
    assert "non-finite values in" in record.missing[2]
    assert all(torch.isfinite(t).all() for t in after.shared.values())
    assert after.seen == (0, 0, -1, 0)
    assert difference(engine.memory(2), before) == 0
    assert not torch.equal(engine.memory(1)["kept/head.weight"], before["kept/head.weight"])


def fedsa_like(method):
    from dataclasses import replace

    from isthmus.parts.share import ByName

    return replace(method, share=ByName(("body.*",)))


def test_a_run_in_which_everybody_diverges_ends_with_what_to_do():
    task = digits_task()
    task.x = torch.full_like(task.x, float("inf"))
    with pytest.raises(RunError, match=r"every update was refused .*lower train\.lr"):
        play(METHOD, task, rounds=1)


def test_an_error_in_client_code_names_round_clients_and_method():
    task = digits_task()
    task.y = task.y.float()  # cross-entropy does not take these
    with pytest.raises(ClientError, match=r"round 0, clients 0 to 3 \(4\), method fedavg: RuntimeError"):
        play(METHOD, task, rounds=1)


def test_a_client_without_rows_is_refused_before_the_run():
    task = digits_task()
    task.train = [*task.train[:-1], torch.tensor([], dtype=torch.long)]
    with pytest.raises(ValueError, match="client 3 has no training rows"):
        Simulator(METHOD, task)


def test_bad_settings_are_named():
    for more, says in (({"way": "fast"}, "engine.way = 'fast'"), ({"chunk": 0}, "engine.chunk = 0")):
        with pytest.raises(ValueError, match=says):
            Simulator(METHOD, digits_task(), **more)
    with pytest.raises(ValueError, match=r"engine\.dropout = 1"):
        Faults(dropout=1.0)


def test_an_inbox_carries_what_is_one_clients_own():
    """Per-client downlink: shared tensors are the same for all, personal ones are each client's row."""
    from dataclasses import dataclass, replace

    from isthmus.core.types import Plugin
    from isthmus.parts.send import Changed

    @dataclass(frozen=True)
    class Marks(Changed):
        def personal(self, server, cohort):
            return {"mark": torch.tensor([[float(10 + c)] for c in cohort])}

    @dataclass(frozen=True)
    class Reads(Plugin):
        name = "reads"

        def publish(self, params, clients):
            return {"mark": torch.zeros(1)}

        def init(self, params):
            return {"got": torch.zeros(1), "who": torch.zeros((), dtype=torch.long)}

        def end(self, params, memory, inbox, trained):
            return params, {"got": inbox.shared["mark"], "who": inbox.client}, {}

    method = replace(plain(NoTraining(), 0.5), send=Marks(), plugins=(Reads(),))
    for way in ("together", "loop"):
        engine, _server, records = play(method, digits_task(), rounds=1, way=way)
        for c in records[0].cohort:
            assert engine.memory(c)["reads/got"].item() == 10 + c
            assert engine.memory(c)["reads/who"].item() == c
        assert isinstance(Inbox({}, 0, torch.tensor(0)).directive, dict)


def test_evaluation_shares_passes_and_agrees_with_scoring_one_by_one():
    task = tiny_text_task()
    for method in (METHOD, fedsa_lora(METHOD), local(METHOD)):
        engine, server, _ = play(method, task)
        found = evaluate(engine, server)
        for c in range(task.clients):
            alone = task.score(engine.personal_params(server, c), task.rows(c, "test"))
            assert found.clients["accuracy"][c] == pytest.approx(float(alone["accuracy"].mean()), abs=1e-6)
            assert found.clients["loss"][c] == pytest.approx(float(alone["loss"].mean()), abs=1e-5)
    everywhere = [task.score(engine.personal_params(server, c), torch.cat(list(task.test)))["accuracy"].mean() for c in range(task.clients)]
    assert found.overall["accuracy"] == pytest.approx(float(sum(everywhere) / len(everywhere)), abs=1e-6)


def test_evaluation_respects_unequal_ranks():
    task = tiny_text_task(ranks=(1, 2, 4, 3))
    engine, server, _ = play(METHOD, task)
    found = evaluate(engine, server)
    alone = task.score(engine.personal_params(server, 0), task.rows(0, "test"))
    assert found.clients["loss"][0] == pytest.approx(float(alone["loss"].mean()), abs=1e-5)
    assert all(not t[1:].any() for n, t in engine.personal_params(server, 0).items() if n.endswith("lora_a"))


@pytest.mark.slow
def test_the_result_does_not_depend_on_the_process():
    """Another process with another hash seed and thread count of one gives the same bits."""
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "from tests.conftest import digits_task\nfrom tests.contracts.contracts import play\n"
        "from tests.engines.test_simulator import METHOD\n"
        "_, s, _ = play(METHOD, digits_task(), rounds=2)\n"
        "print(sum(float(t.double().sum()) for t in s.shared.values()).hex())"
    )
    outs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | {"PYTHONHASHSEED": h}
        ).stdout
        for h in ("0", "1")
    }
    assert len(outs) == 1
