from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from isthmus.report import html, loggers, plots
from isthmus.report.progress import LiveProgress, duration, size
from isthmus.runner import run

from ..conftest import digits_recipe, digits_task


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    recipe = digits_recipe(rounds=3, **{"engine.dropout": 0.2})
    return run(recipe, tmp_path_factory.mktemp("run") / "digits<1>", task=digits_task())


def test_the_report_is_one_file_with_plots_and_nothing_from_elsewhere(finished):
    text = html.write(finished.folder).read_text()
    assert text.count("<svg") >= 5
    assert "<script" not in text
    assert not re.findall(r'(?:src|href)="https?:', text)
    assert "<1>" not in text  # names are escaped
    for part in ("local-only", "pooled data", "dropped out", "fedavg", "rounds = 3"):
        assert part in text


def test_every_plot_is_well_formed(finished):
    lines = html.lines_of(finished.folder, "fedavg")
    made = [
        plots.by_round(lines, "accuracy"),
        plots.by_round(lines, "loss"),
        plots.bytes_against({"fedavg": lines["fedavg"]}),
        plots.gain([0.5, 0.9], [0.6, 0.7], ["a", "b & c"]),
        plots.split({"clients": ["a", "b"], "labels": [str(i) for i in range(30)], "rows": [[1] * 30, [2] * 30]}),
        plots.compare(
            [{"method": "m", "accuracy_global": 0.5, "accuracy_global_std": 0.1, "accuracy_personal": None, "accuracy_personal_std": None}]
        ),
    ]
    for svg in made:
        ET.fromstring(svg)
    assert plots.metric(lines["fedavg"], "no_such_metric", "x") is None


def test_plots_are_the_same_bytes_twice(finished):
    lines = html.lines_of(finished.folder, "fedavg")
    assert plots.by_round(lines, "accuracy") == plots.by_round(lines, "accuracy")


def test_progress_says_accuracy_bytes_seconds_and_time_left(finished):
    from rich.console import Console

    console = Console(record=True, width=160, force_terminal=True)
    live = LiveProgress(console)
    live.begin("fedavg", finished.recipe, 0)
    for row in finished.line.rows[:2]:
        live.round("fedavg", row)
    live.end("fedavg")
    live.close()
    shown = console.export_text()
    for part in ("fedavg", "2/3", "global ", "personal ", "%", "kB", " s ", "left"):
        assert part in shown


def test_numbers_are_said_shortly():
    assert [size(n) for n in (0, 999, 1536, 2_500_000, 3e9, 4e12)] == ["0 B", "999 B", "1.5 kB", "2.5 MB", "3.0 GB", "4.0 TB"]
    assert [duration(n) for n in (5, 75, 3600)] == ["0:05", "1:15", "60:00"]


def test_tensorboard_gets_every_number(finished, tmp_path):
    board = loggers.TensorBoard(tmp_path)
    board.begin("fedavg", finished.recipe, 0)
    for row in finished.line.rows:
        board.round("fedavg", row)
    board.end("fedavg")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "fedavg"))
    events.Reload()
    assert {"global/accuracy", "training/loss", "bytes/up", "seconds"} <= set(events.Tags()["scalars"])
    assert len(events.Scalars("global/accuracy")) == 3


@pytest.mark.filterwarnings("ignore")
def test_mlflow_gets_every_number(finished, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    logger = loggers.MLflow(f"sqlite:///{tmp_path}/ml.db")
    logger.begin("fedavg", finished.recipe, 0)
    for row in finished.line.rows:
        logger.round("fedavg", row)
    logger.end("fedavg")
    runs = mlflow.search_runs(experiment_names=["digits"], output_format="list")
    assert runs[0].data.metrics["global.accuracy"] == pytest.approx(finished.line.rows[-1]["evaluation"]["global"]["accuracy"])
