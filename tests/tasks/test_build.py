"""From recipes to tasks, on the packaged encoder and on models and data of the user's own."""

from __future__ import annotations

import json

import pytest
import torch
import transformers as tf

from isthmus.adapters.families import FamilyError
from isthmus.core.recipe import RecipeError, parse
from isthmus.runner import make_method, run
from isthmus.tasks.build import ModelError, make_task
from isthmus.tasks.sources import DataError

from ..conftest import digits_recipe


@pytest.fixture(scope="session")
def own_model(tmp_path_factory):
    """Folders with a tiny encoder, a tiny causal model, and their tokenizer: what a user brings."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    root = tmp_path_factory.mktemp("models")
    words = [
        "[PAD]",
        "[UNK]",
        "the",
        "match",
        "was",
        "won",
        "by",
        "home",
        "team",
        "shares",
        "fell",
        "rose",
        "market",
        "bank",
        "new",
        "phone",
        "chip",
        "film",
        "star",
        "song",
    ]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    torch.manual_seed(0)
    small = {"vocab_size": len(words), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tf.BertModel(tf.BertConfig(**small)).save_pretrained(root / "encoder")
    tf.LlamaForCausalLM(tf.LlamaConfig(**small, num_key_value_heads=2, tie_word_embeddings=False)).save_pretrained(root / "causal")
    tf.T5Model(tf.T5Config(vocab_size=len(words), d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)).save_pretrained(root / "t5")
    for name in ("encoder", "causal", "t5"):
        fast.save_pretrained(root / name)
    return root


@pytest.fixture
def own_data(tmp_path):
    texts = {"sport": "the match was won by home team", "money": "shares fell rose market bank", "tech": "new phone chip"}
    rows = [
        {"body": " ".join(text.split()[i % 3 :]) + " the" * (i % 2), "topic": topic, "office": f"office {i % 3}"}
        for topic, text in texts.items()
        for i in range(20)
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def recipe(own_model, own_data, **changes):
    table = {
        "name": "own",
        "rounds": 2,
        "data": {"source": str(own_data), "text": "body", "label": "topic", "client": "office"},
        "model": {"path": str(own_model / "encoder"), "max_length": 8, "precision": "fp32"},
        "adapter": {"kind": "lora", "rank": 2},
        "train": {"lr": 0.02, "size": 8},
        "evaluate": {"references": False},
    }
    return parse(table).updated(changes)


def test_a_users_own_data_and_model_run_to_an_adapter_that_peft_loads(own_model, own_data, tmp_path):
    from isthmus.adapters import export

    result = run(recipe(own_model, own_data, rounds=4), tmp_path / "run")
    assert result.task.client_names == ["office 0", "office 1", "office 2"]
    assert result.document["accuracy_global"] > 0.5
    model, _tokenizer, about = export.load(tmp_path / "run" / "adapter")
    assert about["labels"] == ["money", "sport", "tech"]
    rows = result.task.rows(0, "test")
    ids = result.task.data.ids[rows]
    mask = (torch.arange(ids.shape[1]) < result.task.data.length[rows][:, None]).long()
    params = result.line.engine.global_params(result.line.server)
    scored = result.task.score(params, rows)["accuracy"].bool()
    with torch.no_grad():
        right = model(input_ids=ids, attention_mask=mask).argmax(-1) == result.task.data.label[rows]
    assert torch.equal(scored, right)
    assert len(export.classify(tmp_path / "run" / "adapter", ["the match was won", "new phone"])) == 2


def test_a_causal_model_learns_its_clients_text(own_model, own_data, tmp_path):
    changes = {"task.kind": "language", "data.label": "topic", "model.path": str(own_model / "causal"), "train.lr": 0.05, "train.epochs": 4}
    result = run(recipe(own_model, own_data, **changes, rounds=3), tmp_path / "run")
    losses = [r["evaluation"]["global"]["loss"] for r in result.line.rows]
    assert losses[-1] < losses[0]
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()


def test_label_sets_of_their_own_keep_private_heads(own_model, own_data, tmp_path):
    other = tmp_path / "other.csv"
    other.write_text(
        "body,topic\n" + "".join(f"{'film star' if i % 2 else 'song song the'},{'film' if i % 2 else 'music'}\n" for i in range(40))
    )
    changes = {
        "data.source": [str(own_data), str(other)],
        "data.own_labels": True,
        "partition.kind": "iid",
        "partition.clients": 2,
        "partition.smallest": 2,
    }
    base = recipe(own_model, own_data, **changes).table()
    del base["data"]["client"]
    task = make_task(parse(base))
    assert task.clients == 4
    assert task.private == ("head.*",)
    assert len(task.label_names) == 5
    from isthmus.core.rounds import server_start

    assert not any(n.startswith("head.") for n in server_start(make_method(parse(base)), task, 0).shared)
    result = run(parse(base).updated({"rounds": 6}), tmp_path / "run", task=task)
    assert result.document["accuracy_personal"] > 0.6
    assert result.document["accuracy_global"] > 0.6
    # a row is scored among its own source's labels only
    rows = task.rows(0, "test")
    assert set(task.data.label[rows].tolist()) <= {i for i, n in enumerate(task.label_names) if n.startswith("mine")}


def test_unequal_ranks_come_from_the_recipe(own_model, own_data):
    task = make_task(recipe(own_model, own_data, **{"adapter.ranks": [1, 2, 2]}))
    assert task.ranks().tolist() == [1, 2, 2]
    with pytest.raises(RecipeError, match=r"adapter\.ranks has 2 entries; there are 3 clients"):
        make_task(recipe(own_model, own_data, **{"adapter.ranks": [1, 2]}))


def test_a_label_that_only_one_client_has_is_noted(own_model, own_data):
    rows = [json.loads(line) for line in own_data.read_text().splitlines()]
    rows += [{"body": "film star", "topic": "film", "office": "office 1"}] * 10
    own_data.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert make_task(recipe(own_model, own_data)).notes == ["label 'film' occurs in the training rows of client 1 only"]


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"model.path": "no/such-model"}, ModelError, "'no/such-model': cannot be loaded as an encoder"),
        ({"data.label": "colour"}, DataError, "'colour'"),
        ({"adapter.targets": ["gate"]}, FamilyError, "no 'gate'"),
        ({"adapter.layers": "upper:9"}, ValueError, "the model has 2 layers"),
        ({"data.split": "office"}, DataError, "'office 0' is neither 'train' nor 'test'"),
    ],
)
def test_what_cannot_be_built_is_named(own_model, own_data, changes, error, says):
    with pytest.raises(error, match=says):
        make_task(recipe(own_model, own_data, **changes))


def test_an_unknown_family_is_named(own_model, own_data):
    with pytest.raises(FamilyError, match="'t5' is not known"):
        make_task(recipe(own_model, own_data, **{"model.path": str(own_model / "t5")}))


def test_one_label_is_no_classification(own_model, tmp_path):
    path = tmp_path / "one.csv"
    path.write_text("body,topic,office\n" + "".join(f"the match,sport,office {i % 3}\n" for i in range(30)))
    with pytest.raises(DataError, match="only one label"):
        make_task(recipe(own_model, path))


def test_digits_come_as_vectors_and_images(tmp_path):
    assert make_task(digits_recipe()).x.shape == (300, 64)
    result = run(digits_recipe(**{"model.network": "convolutional", "model.width": 4, "rounds": 1}), tmp_path / "run")
    assert result.task.x.shape == (300, 1, 8, 8)
    assert set(result.references) == {"local", "pooled"}
