import json

import numpy as np
import pytest
from sklearn.datasets import load_digits
from typer.testing import CliRunner

import isthmus
from isthmus.cli import app
from isthmus.quality import label_quality, quality_of_run


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "digits"
    settings = {"task": {"kind": "digits"}, "rounds": 3, "partition.clients": 4, "evaluate.references": False, "data.limit": 800}
    isthmus.run(isthmus.recipe("newsroom").updated(settings | {"model.precision": "fp32", "train.lr": 1e-2}), folder)
    return folder


def test_clients_with_wrong_labels_are_the_loudest():
    x, y = load_digits(return_X_y=True)
    random = np.random.default_rng(0)
    client = random.integers(0, 8, len(x))
    clean = label_quality(x, y, client)
    assert max(clean["scale"]) < 1.25
    wrong = y.copy()
    for c in (2, 5):
        rows = np.flatnonzero((client == c) & (random.random(len(x)) < 0.4))
        wrong[rows] = random.integers(0, 10, len(rows))
    found = label_quality(x, wrong, client)
    assert sorted(np.argsort(found["scale"])[-2:]) == [2, 5]
    assert min(found["scale"][2], found["scale"][5]) > 1.15 * np.median(found["scale"])
    with pytest.raises(ValueError, match="two or more"):
        label_quality(x, y, np.zeros(len(x)))


def test_quality_of_a_run(digits_run):
    table = quality_of_run(digits_run)
    assert [r["scale"] for r in table] == sorted((r["scale"] for r in table), reverse=True)
    assert min(r["scale"] for r in table) == 1
    shown = CliRunner().invoke(app, ["quality", str(digits_run)])
    assert shown.exit_code == 0
    assert table[0]["client"] in shown.output


@pytest.mark.parametrize("folds", [0, 2])
def test_a_run_is_certified(digits_run, folds):
    shown = CliRunner().invoke(app, ["certify", str(digits_run), "--folds", str(folds), "--json"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert found["test_error"] <= found["bound"]
    assert found["bound"] == pytest.approx(sum(found[t]["upper"] for t in ("decoder", "agreement", "stability")))
    assert found["representation"] == ("trained" if folds else "pretrained")
    assert (found["stability"]["upper"] > 0) == bool(folds)
    assert "certificate" in (digits_run / "certificate.html").read_text()
    assert json.loads((digits_run / "certificate.json").read_text()) == found
    said = CliRunner().invoke(app, ["certify", str(digits_run), "--folds", str(folds)])
    assert "upper limit" in said.output


@pytest.mark.parametrize("command", ["certify", "quality"])
def test_what_cannot_be_examined_says_so(tmp_path, command):
    shown = CliRunner().invoke(app, [command, str(tmp_path)])
    assert shown.exit_code == 2
    assert "not a run folder" in shown.output
    small = {"data.limit": 20, "task": {"kind": "forecast", "lookback": 48, "horizon": 24, "banks": [[3, 24, 12]]}, "rounds": 1}
    isthmus.run(isthmus.recipe("forecast").updated(small | {"evaluate.references": False}), tmp_path / "run")
    shown = CliRunner().invoke(app, [command, str(tmp_path / "run")])
    assert shown.exit_code == 2
    assert "only classifiers" in shown.output
