"""How noisy each client's labels are: heteroskedastic regression with clients as sources; see `primitives.regression`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from .primitives import SubsetOfSignals
from .runner import reopen


def label_quality(features: ArrayLike, labels: ArrayLike, client: ArrayLike, components: int = 16) -> dict[str, list[float]]:
    """Noise of each client's labels, relative to the quietest client.

    Every label is regressed on the leading components of the features with clients as sources of unknown noise; what a client's rows are
    off by is its scale.  Clients whose labels are wrong (or whose rows look different from everybody's) are loud.

    Args:
        features: (n, width).
        labels: (n,).
        client: whose row each is (n,), 0 to clients - 1.
        components: directions of the features that are used.

    Returns:
        ``scale``: root mean square over labels, 1 for the quietest client; ``quiet``: mean probability of being a quiet one; of each client.

    Raises:
        ValueError: for fewer than two clients or labels.
    """
    x, y, who = np.asarray(features, np.float64), np.asarray(labels), np.asarray(client)
    names, clients = np.unique(y), np.unique(who)
    if len(names) < 2 or len(clients) < 2:
        raise ValueError(f"{len(clients)} clients with {len(names)} labels: two or more of each are needed")
    centred = x - x.mean(0)
    turned = centred @ np.linalg.svd(centred, full_matrices=False)[2][:components].T
    turned /= turned.std(0).clip(1e-12)
    scale, quiet = np.zeros(len(clients)), np.zeros(len(clients))
    for name in names:
        found = SubsetOfSignals(method="mixture").fit(turned, (y == name).astype(np.float64), source=who)
        scale += found.scale_**2 / len(names)
        quiet += found.quiet_ / len(names)
    scale = np.sqrt(scale)
    return {"scale": (scale / scale.min()).tolist(), "quiet": quiet.tolist()}


def quality_of_run(folder: Path) -> list[dict[str, Any]]:
    """`label_quality` of a run's clients, on the representation of the model before any training: a row each, the loudest first.

    Raises:
        ValueError: for runs without a classifier for all.
        RecipeError, CheckpointError: for folders that hold no run.
    """
    result = reopen(folder)
    task = result.task
    if not hasattr(task, "represent") or task.private:
        raise ValueError(f"{folder}: only runs with labels that all clients share can be examined")
    rows = torch.cat([task.rows(c, "train") for c in range(task.clients)])
    who = np.repeat(np.arange(task.clients), [len(task.rows(c, "train")) for c in range(task.clients)])
    labels = (task.data.label if hasattr(task, "data") else task.y)[rows]
    found = label_quality(task.represent(task.init(result.recipe.seed), rows)[0].numpy(), labels.numpy(), who)
    names = list(task.client_names) or [f"client {c}" for c in range(task.clients)]
    table = [
        {"client": names[c], "rows": int((who == c).sum()), "scale": found["scale"][c], "quiet": found["quiet"][c]}
        for c in range(task.clients)
    ]
    return sorted(table, key=lambda r: -r["scale"])
