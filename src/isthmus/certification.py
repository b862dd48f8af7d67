"""The k-NN certificate of a finished run's aggregated classifier; see `primitives.certificate` for what is proved and assumed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .core import checkpoint
from .core.tensors import Tensors
from .primitives import Certificate, certify, certify_frozen
from .report import html, plots
from .runner import Result, reopen, train


class _Trained:
    """A model of a run, on rows by their numbers."""

    def __init__(self, task: Any, params: Tensors) -> None:
        self.task, self.params = task, params

    def predict(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Labels of the rows."""
        return self.task.represent(self.params, torch.from_numpy(rows))[1].numpy()

    def represent(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Last hidden layer of the rows."""
        return self.task.represent(self.params, torch.from_numpy(rows))[0].numpy()


def certify_run(folder: Path, folds: int = 0, k: int = 3, delta: float = 0.05, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Certify a run, and write ``certificate.json`` and ``certificate.html`` into its folder.

    The training set is all clients' training rows together; their test rows serve as unlabelled points (the bound does not see their
    labels) and, apart from it, show the test error.  With ``folds`` the whole federation is trained again without each fold; without, the
    representation is that of the model before any training.

    Raises:
        ValueError: for runs that have no aggregated classifier, or options that do not fit.
        RecipeError, CheckpointError: for folders that hold no finished run.
    """
    result = reopen(folder)
    task, line = result.task, result.line
    if not hasattr(task, "represent") or task.private or not line.server.shared:
        raise ValueError(f"{folder}: only runs with an aggregated classifier can be certified")
    labels = task.data.label if hasattr(task, "data") else task.y
    known = torch.cat([task.rows(c, "train") for c in range(task.clients)])
    asked = torch.cat([task.rows(c, "test") for c in range(task.clients)])
    final = _Trained(task, line.engine.global_params(line.server))
    predicted = final.predict(asked.numpy())
    if folds:
        found = certify(
            _again(result, final, folds, say), known.numpy(), labels[known].numpy(), asked.numpy(), k, folds, delta, result.recipe.seed
        )
    else:
        first = _Trained(task, task.init(result.recipe.seed))
        order = known[torch.from_numpy(np.random.default_rng(result.recipe.seed).permutation(len(known)))]
        found = certify_frozen(first.represent(order.numpy()), labels[order].numpy(), first.represent(asked.numpy()), predicted, k, delta)
    document = _document(found) | {
        "test_error": float((predicted != labels[asked].numpy()).mean()), "k": k, "folds": folds, "training": len(known), "unlabelled": len(asked),
        "representation": "trained" if folds else "pretrained",
    }  # fmt: skip
    checkpoint.write_atomic(folder / "certificate.json", json.dumps(document, indent=1).encode())
    checkpoint.write_atomic(folder / "certificate.html", _page(result, document).encode())
    return document


def _again(result: Result, final: _Trained, folds: int, say: Callable[[str], None]) -> Callable[[NDArray[Any], NDArray[Any]], _Trained]:
    """Train the run's federation on some of its rows; on all of them it is trained already."""
    task, recipe = result.task, result.recipe
    every = sum(len(task.rows(c, "train")) for c in range(task.clients))
    done: list[int] = []

    def fit(rows: NDArray[Any], _: NDArray[Any]) -> _Trained:
        if len(rows) == every:
            return final
        done.append(1)
        say(f"training without fold {len(done)} of {folds} ({len(rows)} of {every} rows)")
        some = torch.from_numpy(rows)
        kept: list[Tensor] = [t[torch.isin(t, some)] for t in task.train]
        if not all(len(t) for t in kept):
            raise ValueError("a client has no row left without a fold: choose more folds")
        part = replace(task, train=kept)
        with tempfile.TemporaryDirectory() as scratch:
            line = train(recipe.updated({"evaluate.every": recipe.rounds}), part, Path(scratch), recipe.method.kind)
        return _Trained(part, line.engine.global_params(line.server))

    return fit


def _document(found: Certificate) -> dict[str, Any]:
    return asdict(found) | {"bound": found.bound}


def _page(result: Result, document: dict[str, Any]) -> str:
    rows = [[n, html.percent(document[n]["measured"]), html.percent(document[n]["upper"])] for n in ("decoder", "agreement", "stability")]
    rows += [["sum: the bound", "", html.percent(document["bound"])], ["test error, as measured", html.percent(document["test_error"]), ""]]
    told = (
        f"With probability {1 - document['delta']:.0%} the error on new rows is at most {html.percent(document['bound'])}, if training rows and "
        f"the {document['unlabelled']} unlabelled ones are independent draws of one law. k = {document['k']}, {document['representation']} representation."
    )
    body = f"<h1>{result.recipe.name}: certificate</h1><p>{told}</p>" + html.table(["term", "measured", "upper limit"], rows, 3)
    return html.page(
        f"Isthmus: {result.recipe.name}, certificate", body + html.figures([("The three terms.", plots.certificates({"": document}))])
    )
