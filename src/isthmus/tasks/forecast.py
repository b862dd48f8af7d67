"""Forecasting as a task: every channel of a series is a client, the network is a filter bank.

``loss`` is the mean squared error of standardised values; ``accuracy`` is the share of steps whose forecast is nearer than the seasonal
naive one (the last season, repeated).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.recipe import Recipe, RecipeError
from ..primitives.forecast import windows
from ..primitives.forecast_net import FilterBankNet
from .arrays import ArrayTask
from .series import load_series


def beats_naive(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Forecasts (B, H) against futures and naive forecasts side by side (B, 2 H): squared error (B,), share of steps that are nearer (B,)."""
    future, naive = y.chunk(2, -1)
    gap = (out - future).square()
    return gap.mean(-1), (gap < (naive - future).square()).float().mean(-1)


def forecast(recipe: Recipe, root: Path | None = None) -> ArrayTask:
    """The task of a recipe: ``task.lookback``, ``task.horizon``, ``task.banks`` = [[filters, length, stride], ...].

    ``data.limit`` is the number of windows of a client, evenly spaced over its training part (and as many of its test part).

    Raises:
        RecipeError, DataError: naming the field.
    """
    options: dict[str, Any] = {"lookback": 336, "horizon": 96, "banks": [[12, 168, 84]]} | recipe.task.options
    if unknown := set(options) - {"lookback", "horizon", "banks"}:
        raise RecipeError(f"task.{sorted(unknown)[0]}: no such field; accepted are lookback, horizon and banks")
    for name in ("lookback", "horizon"):
        if not isinstance(options[name], int) or options[name] < 1:
            raise RecipeError(f"task.{name} = {options[name]!r}: must be a whole number from 1 on")
    lookback, horizon = options["lookback"], options["horizon"]
    try:
        net = FilterBankNet(lookback, horizon, [(int(f), int(length), int(stride)) for f, length, stride in options["banks"]])
    except (TypeError, ValueError) as error:
        raise RecipeError(f"task.banks = {options['banks']!r}: {error}") from None
    names = [recipe.data.source] if isinstance(recipe.data.source, str) else recipe.data.source
    x: list[Tensor] = []
    y: list[Tensor] = []
    train: list[Tensor] = []
    test: list[Tensor] = []
    clients, notes, rows = [], [], 0
    for name in names:
        series = load_series(name, root)
        notes += series.notes
        for c, channel in enumerate(series.channels):
            for part, into in (("train", train), ("test", test)):
                values = series.part(part, lookback)[:, c]
                if len(values) < lookback + horizon:
                    raise RecipeError(
                        f"task.lookback = {lookback}, task.horizon = {horizon}: longer than the {part} part of {name}, {len(values)} steps"
                    )
                past, future = (w[:, 0] for w in windows(values, lookback, horizon))
                some = np.unique(np.linspace(0, len(past) - 1, min(recipe.data.limit or len(past), len(past))).astype(int))
                season = past[some, -series.season :] if series.season <= lookback else past[some, -1:]
                naive = np.tile(season, -(-horizon // season.shape[1]))[:, :horizon]
                x.append(torch.from_numpy(past[some].astype(np.float32)))
                y.append(torch.from_numpy(np.concatenate([future[some], naive], 1).astype(np.float32)))
                into.append(torch.arange(rows, rows + len(some)))
                rows += len(some)
            clients.append(f"{series.name}: {channel}" if len(series.channels) > 1 else series.name)
    return ArrayTask(net, torch.cat(x), torch.cat(y), train, test, client_names=clients, notes=notes, measure=beats_naive)
