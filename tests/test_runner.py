from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from isthmus.core import checkpoint
from isthmus.core.checkpoint import CheckpointError
from isthmus.core.recipe import RecipeError
from isthmus.runner import Callback, bytes_to, make_method, reopen, run, train

from .conftest import digits_recipe, digits_task
from .contracts.contracts import difference

SCAFFOLD = {"method.kind": "scaffold", "channels": [{"kind": "int8"}], "participation": 0.5, "rounds": 5, "evaluate.references": False}


def final_state(folder):
    found, problems = checkpoint.latest(folder / "checkpoints")
    assert not problems
    return found


def comparable(folder):
    """The ledger without what a clock says."""
    return [
        {k: v for k, v in json.loads(line).items() if k not in ("seconds", "chain")}
        for line in (folder / "ledger.jsonl").read_text().splitlines()
    ]


class Dies(Callback):
    def __init__(self, after: int) -> None:
        self.after = after

    def round(self, line, row):
        if row["round"] == self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [0, 2, 4])
def test_an_interrupted_run_ends_bit_for_bit_as_one_that_was_not(tmp_path, after):
    recipe, task = digits_recipe(**SCAFFOLD), digits_task()
    run(recipe, tmp_path / "whole", task=task)
    with pytest.raises(KeyboardInterrupt):
        run(recipe, tmp_path / "cut", task=task, callbacks=[Dies(after)])
    run(recipe, tmp_path / "cut", task=digits_task(), resume=True)
    a, b = final_state(tmp_path / "whole"), final_state(tmp_path / "cut")
    assert a[0] == b[0] == 5
    assert difference(a[1], b[1]) == 0.0
    assert a[2] == b[2]
    assert comparable(tmp_path / "whole") == comparable(tmp_path / "cut")


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_the_same(tmp_path):
    """Real processes, SIGKILL, several times in a row."""
    changes = "--set rounds=30 --set data.limit=300 --set partition.clients=4 --set model.width=16 --set evaluate.references=false --set method.kind=scaffold"
    command = [sys.executable, "-m", "isthmus", "run"]
    # fresh reads its recipe by path
    recipe = tmp_path / "digits.toml"
    recipe.write_text('name = "digits"\n[task]\nkind = "digits"\n[train]\noptimiser = "sgd"\nlr = 0.3\n')
    subprocess.run([*command, str(recipe), *changes.split(), "--runs", str(tmp_path / "a"), "--json"], check=True, capture_output=True)
    first = subprocess.Popen([*command, str(recipe), *changes.split(), "--runs", str(tmp_path / "b"), "--json"], stdout=subprocess.DEVNULL)
    folder, dice, kills = tmp_path / "b" / "digits-001", random.Random(0), 0
    going = first
    for _ in range(6):
        deadline = time.time() + 60
        while not list((folder / "checkpoints").glob("round-*")) and time.time() < deadline and going.poll() is None:
            time.sleep(0.01)
        time.sleep(dice.random() * 0.6)
        if going.poll() is None:
            going.send_signal(signal.SIGKILL)
            kills += 1
        going.wait()
        if (folder / "result.json").exists():
            break
        going = subprocess.Popen([*command, "--resume", str(folder), "--json"], stdout=subprocess.DEVNULL)
    going.wait()
    if not (folder / "result.json").exists():
        subprocess.run([*command, "--resume", str(folder), "--json"], check=True, capture_output=True)
    assert kills >= 1
    a, b = final_state(tmp_path / "a" / "digits-001"), final_state(folder)
    assert a[0] == b[0] == 30
    assert difference(a[1], b[1]) == 0.0
    assert comparable(tmp_path / "a" / "digits-001") == comparable(folder)


def test_a_truncated_newest_checkpoint_is_gone_back_behind_and_the_end_is_the_same(tmp_path, capsys):
    recipe, task = digits_recipe(**SCAFFOLD), digits_task()
    run(recipe, tmp_path / "whole", task=task)
    with pytest.raises(KeyboardInterrupt):
        run(recipe, tmp_path / "cut", task=task, callbacks=[Dies(3)])
    newest = sorted((tmp_path / "cut" / "checkpoints").glob("round-*"))[-1] / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    run(recipe, tmp_path / "cut", task=task, resume=True)
    assert "round-00004 is damaged" in capsys.readouterr().err
    assert difference(final_state(tmp_path / "whole")[1], final_state(tmp_path / "cut")[1]) == 0.0


def test_a_full_disk_stops_the_run_with_a_reason_and_it_can_go_on(tmp_path, monkeypatch):
    recipe, task = digits_recipe(**SCAFFOLD), digits_task()
    save, calls = checkpoint.write_atomic, []

    def full(path, data):
        if path.name == "state.safetensors":
            calls.append(path)
            if len(calls) == 3:
                raise CheckpointError("cannot write state.safetensors: No space left on device; what was saved before is untouched")
        save(path, data)

    monkeypatch.setattr(checkpoint, "write_atomic", full)
    with pytest.raises(CheckpointError, match="No space left"):
        run(recipe, tmp_path / "run", task=task)
    monkeypatch.undo()
    assert final_state(tmp_path / "run")[0] == 2
    result = run(recipe, tmp_path / "run", task=task, resume=True)
    assert result.document["rounds"] == 5
    assert [r["round"] for r in result.line.rows] == [0, 1, 2, 3, 4]


def test_a_run_folder_holds_everything_and_opens_again(tmp_path):
    result = run(digits_recipe(rounds=2), tmp_path / "run", task=digits_task())
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert {"recipe.toml", "ledger.jsonl", "checkpoints", "reference", "result.json", "split.json"} <= names
    again = reopen(tmp_path / "run")
    assert again.recipe == result.recipe
    assert difference(again.line.server.shared, result.line.server.shared) == 0.0
    assert difference(again.line.engine.state(), result.line.engine.state()) == 0.0
    document = json.loads((tmp_path / "run" / "result.json").read_text())
    wanted = (
        "method task rounds seeds accuracy_global accuracy_personal accuracy_local_only accuracy_pooled bytes_up bytes_down seconds run_dir"
    )
    assert set(wanted.split()) <= set(document)
    assert document["bytes_up"] == sum(s[1] for r in result.line.rows for s in r["up"].values())
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(RecipeError, match="not a run folder"):
            reopen(folder)


def test_pooled_data_is_one_client_with_everything(tmp_path):
    task = digits_task()
    line = train(digits_recipe(**{"method.kind": "pooled"}), task, tmp_path, "pooled")
    assert line.engine.task.clients == 1
    assert len(line.engine.task.rows(0, "train")) == sum(len(t) for t in task.train)


def test_parts_are_joined_in_the_order_they_are_written():
    method = make_method(digits_recipe(**{"method.kind": "ffa_lora+fedprox+fedyogi", "method.fedprox": {"mu": 0.5}}))
    assert method.name == "ffa_lora+fedprox+fedyogi"
    assert method.plugins[0].mu == 0.5
    assert method.apply.rule == "yogi"
    assert method.share.scope(["layers.0.query.lora_a", "layers.0.query.lora_b"]) == ["layers.0.query.lora_b"]


def test_bytes_to_a_target_are_those_of_all_rounds_until_then():
    row = lambda accuracy: {
        "up": {"0": [1, 10]},
        "down": {"0": [1, 5]},
        "evaluation": {"global": {"accuracy": accuracy}} if accuracy else {},
    }
    rows = [row(0.5), row(None), row(0.9)]
    assert bytes_to(rows, "global", 0.5) == 15
    assert bytes_to(rows, "global", 0.8) == 45
    assert bytes_to(rows, "global", 0.95) is None


def test_the_number_of_threads_is_the_recipes(tmp_path):
    before = torch.get_num_threads()
    run(digits_recipe(rounds=1, **{"engine.threads": 1, "evaluate.references": False}), tmp_path / "run", task=digits_task())
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)
