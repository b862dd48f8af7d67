from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

import pytest
import torch
import transformers as tf
from PIL import Image

from isthmus.core.recipe import parse
from isthmus.runner import run
from isthmus.tasks import pairs
from isthmus.tasks.build import ModelError, make_task
from isthmus.tasks.sources import DataError


def animals_installed() -> bool:
    try:
        distribution("animal-mnist")
    except PackageNotFoundError:
        return False
    return True


@pytest.fixture
def small(monkeypatch):
    """A random dual encoder of the small one's shape, in place of the pretrained one."""
    common = {"projection_dim": 16, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    text = {"vocab_size": 30, "max_position_embeddings": 12, "bos_token_id": 0, "eos_token_id": 29, "pad_token_id": 1} | common
    torch.manual_seed(0)
    model = tf.CLIPModel(
        tf.CLIPConfig(text_config=text, vision_config={"image_size": 8, "patch_size": 4} | common, projection_dim=16)
    ).eval()
    vocabulary = {
        w: i for i, w in enumerate(["<begin>", "<unknown>", "a", "picture", "of", "dark", "light", *map(str, range(22)), "<end>"])
    }
    monkeypatch.setattr(pairs, "dual_encoder", lambda path: (model, lambda texts: pairs._numbers(texts, vocabulary)))
    return model


@pytest.fixture
def folder(tmp_path):
    g = torch.Generator().manual_seed(0)
    for name, low in (("dark", 0), ("light", 128)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(30):
            shades = torch.randint(low, low + 100, (10, 10, 3), generator=g, dtype=torch.uint8)
            Image.frombytes("RGB", (10, 10), bytes(shades.flatten().tolist())).save(tmp_path / "images" / name / f"{i}.png")
    return tmp_path


def recipe(**changes):
    table = {
        "name": "pairs",
        "rounds": 4,
        "task": {"kind": "pairs"},
        "data": {"source": "images"},
        "partition": {"clients": 3, "alpha": 2.0, "smallest": 4},
        "model": {"path": "small-clip", "precision": "fp32"},
        "adapter": {"kind": "bias"},
        "train": {"lr": 0.05, "size": 8},
        "method": {"kind": "fedibs", "horizon": 2},
    }
    return parse(table).updated(changes)


def test_a_dual_encoder_learns_a_folder_of_images_by_biases_alone(small, folder):
    result = run(recipe(), folder / "run", folder)
    start = result.task.score(result.task.init(0), torch.arange(60))["accuracy"].mean()
    assert result.document["accuracy_global"] > max(0.8, float(start))
    assert all(n.endswith(".bias") for n in result.line.server.shared)
    assert result.task.label_names == ["dark", "light"]


def test_scores_are_those_of_clip_itself(small, folder):
    task = make_task(recipe(), folder)
    got = task.score(task.init(0), torch.arange(60))["loss"]
    with torch.no_grad():
        prompts = torch.tensor([[0, 2, 3, 4, 2, 5, 29], [0, 2, 3, 4, 2, 6, 29]])  # a picture of a dark, a picture of a light
        theirs = small(pixel_values=task.data.pixels, input_ids=prompts).logits_per_image
    expected = torch.nn.functional.cross_entropy(theirs, task.data.label, reduction="none")
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_cameras_differ_and_keep_the_range():
    images = torch.rand(2, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    seen = [pairs.seen_by(images, c) for c in range(8)]
    assert all(x.shape == images.shape and float(x.min()) >= 0 and float(x.max()) <= 1 for x in seen)
    assert len({float(x.mean()) for x in seen}) == 8
    assert torch.equal(pairs.seen_by(images, 3), pairs.seen_by(images, 3))


def test_bad_input(folder):
    with pytest.raises(DataError, match=r"task\.turned: no such field; accepted is views"):
        make_task(recipe(task={"kind": "pairs", "turned": True}), folder)
    with pytest.raises(ModelError, match="accepted: 'small-clip', a folder, a hub name"):
        pairs.dual_encoder(str(folder / "nowhere"))


def test_sources_that_are_no_images(small, folder, tmp_path):
    with pytest.raises(DataError, match="neither 'animals' nor a folder"):
        make_task(recipe(**{"data.source": "nothing"}), folder)
    (tmp_path / "empty" / "a").mkdir(parents=True)
    with pytest.raises(DataError, match="has no images"):
        make_task(recipe(**{"data.source": str(tmp_path / "empty")}), folder)


@pytest.mark.skipif(not animals_installed(), reason="pip install --no-deps animal-mnist==0.4")
def test_packaged_animals_are_read_without_unpickling(monkeypatch):
    import pickle

    monkeypatch.setattr(pickle, "loads", None)
    monkeypatch.setattr(pickle, "load", None)
    shapes, label = pairs.animals()
    assert shapes.shape == (10000, 28, 28)
    assert label.bincount().tolist() == [1000] * 10
    assert float(shapes.min()) >= 0
    assert float(shapes.max()) == 1
    one, other = pairs.halves(10000)
    assert torch.equal(torch.cat([one, other]).sort().values, torch.arange(10000))
