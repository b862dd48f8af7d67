from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from isthmus.cli import app

RECIPE = """
name = "small"
rounds = 2
[task]
kind = "digits"
[data]
limit = 300
[partition]
clients = 4
[model]
width = 16
[train]
optimiser = "sgd"
lr = 0.3
[compare]
methods = ["local", "fedavg", "scaffold", "pooled"]
seeds = [0, 1]
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(RECIPE)
    return str(path)


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output + (repr(result.exception) if result.exception else "")
    return result


def test_run_prints_one_json_document_and_writes_the_folder(recipe, tmp_path):
    document = json.loads(call("run", recipe, "--json", "--runs", tmp_path / "runs", "--set", "seed=3").stdout)
    assert (document["method"], document["task"], document["rounds"], document["seeds"]) == ("fedavg", "digits", 2, [3])
    assert document["run_dir"] == str(tmp_path / "runs" / "small-001")
    assert (tmp_path / "runs" / "small-001" / "report.html").exists()
    again = json.loads(call("run", recipe, "--json", "--runs", tmp_path / "runs").stdout)
    assert again["run_dir"].endswith("small-002")


def test_run_shows_a_table_against_the_reference_lines(recipe, tmp_path):
    shown = call("run", recipe, "--runs", tmp_path / "runs").stdout
    for part in ("fedavg", "local-only", "pooled data", "global accuracy", "report.html"):
        assert part in shown


def test_resume_takes_the_recipe_of_the_folder(recipe, tmp_path):
    call("run", recipe, "--json", "--runs", tmp_path / "runs", "--set", "evaluate.references=false")
    folder = tmp_path / "runs" / "small-001"
    document = json.loads(call("run", "--resume", folder, "--set", "rounds=4", "--json").stdout)
    assert document["rounds"] == 4
    assert len((folder / "ledger.jsonl").read_text().splitlines()) == 4
    assert "is not a run of newsroom" in call("run", "newsroom", "--resume", folder, code=2).stderr


def test_compare_prints_means_and_spreads_and_keeps_what_is_finished(recipe, tmp_path):
    rows = json.loads(call("compare", recipe, "--json", "--out", tmp_path / "c").stdout)
    assert [r["method"] for r in rows] == ["local", "fedavg", "scaffold", "pooled"]
    fedavg = rows[1]
    assert fedavg["seeds"] == [0, 1]
    assert fedavg["accuracy_global_std"] >= 0
    assert fedavg["accuracy_pooled"] == rows[3]["accuracy_global"]
    assert rows[2]["bytes_up"] > 1.9 * fedavg["bytes_up"]
    assert rows[0]["bytes_up"] == 0
    assert (tmp_path / "c" / "compare.html").read_text().count("<svg") == 3
    stamp = (tmp_path / "c" / "fedavg-seed0" / "result.json").stat().st_mtime_ns
    shown = call("compare", recipe, "--out", tmp_path / "c", "--methods", "fedavg,fedprox", "--quiet").stdout
    assert "±" in shown
    assert (tmp_path / "c" / "fedavg-seed0" / "result.json").stat().st_mtime_ns == stamp
    call("compare", recipe, "--out", tmp_path / "c", "--methods", "fedavg", "--set", "train.lr=0.1", "--quiet")
    assert (tmp_path / "c" / "fedavg-seed0" / "result.json").stat().st_mtime_ns != stamp


def test_report_and_export_work_on_a_folder(recipe, tmp_path):
    call("run", recipe, "--json", "--runs", tmp_path, "--set", "evaluate.references=false")
    (tmp_path / "small-001" / "report.html").unlink()
    call("report", tmp_path / "small-001")
    assert (tmp_path / "small-001" / "report.html").exists()
    assert "is not a finished run" in call("report", tmp_path, code=2).stderr
    assert "not a run folder" in call("export", tmp_path, code=2).stderr


def test_list_names_everything_in_one_line_each():
    found = json.loads(call("list", "--json").stdout)
    assert {"recipes", "methods", "tasks", "adapters", "channels", "data"} == set(found)
    assert "newsroom" in found["recipes"]
    assert all(text and "\n" not in text for items in found.values() for text in items.values())
    assert "fedex_lora" in call("list").stdout


def test_doctor_says_what_the_machine_can_do():
    found = json.loads(call("doctor", "--json").stdout)
    assert set(found) == {"machine", "packages", "advice"}
    assert "GFLOP/s" in found["machine"]["bf16 products"]
    assert found["packages"]["torch"].startswith("2.13")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run"], "name a recipe"),
        (["run", "newsrom"], "did you mean 'newsroom'"),
        (["run", "newsroom", "--set", "rounds=0"], "rounds = 0"),
        (["run", "newsroom", "--set", "adapter.rank=x"], "adapter.rank = 'x'"),
        (["run", "newsroom", "--set", "data.source=nowhere.csv"], "nowhere.csv"),
        (["compare", "newsroom", "--seeds", "a,b"], "--seeds 'a,b'"),
        (["compare", "newsroom", "--methods", "nothing"], "'nothing' is not known"),
        (["run", "--resume", "no-such-folder"], "no-such-folder"),
        (["classify", "no-such-folder", "text"], "no-such-folder"),
    ],
)
def test_mistakes_end_with_one_line_and_code_2(arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = call(*arguments, code=2).stderr
    assert says in shown
    assert shown.startswith("isthmus: ")
    assert len(shown.strip().splitlines()) == 1


def test_a_run_in_which_training_diverges_says_so(recipe, tmp_path):
    shown = call("run", recipe, "--runs", tmp_path, "--set", "train.lr=1e30", "--quiet", code=2).stderr
    assert "every update was refused" in shown


def test_help_imports_nothing_heavy():
    code = "import sys; sys.argv = ['isthmus', '--help']\ntry:\n    import isthmus.cli as c; c.main()\nexcept SystemExit: pass\n"
    code += "heavy = {'torch', 'transformers', 'numpy', 'matplotlib', 'pydantic', 'sklearn'} & set(sys.modules); assert not heavy, heavy"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "compare" in shown


def test_python_in_ten_lines(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    import isthmus

    result = isthmus.run(isthmus.recipe(recipe, "evaluate.references=false"))
    assert result.document["accuracy_global"] > 0.1
    assert (result.folder / "ledger.jsonl").exists()
    assert isthmus.Method
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = isthmus.nothing


def test_verify_names_a_line_that_was_changed(recipe, tmp_path):
    call("run", recipe, "--json", "--runs", tmp_path / "runs", "--set", "evaluate.references=false")
    folder = tmp_path / "runs" / "small-001"
    assert json.loads(call("verify", folder, "--json").stdout) == {"rounds": 2, "checkpoints": [1, 2]}
    ledger = folder / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"missing": {}', '"missing": {"0": "never"}', 1))
    assert "line 1 is not as it was written" in call("verify", folder, code=2).stderr
    assert "not a run folder" in call("verify", tmp_path, code=2).stderr
    assert "only logic-gate networks compile" in call("compile", folder, code=2).stderr
