"""Long-horizon forecasting: filter banks against linear models, on every long series there is, by the usual splits and horizons.

    ISTHMUS_DATA=... python benchmarks/forecasting.py             # an hour on one core; results/forecasting.json
    ISTHMUS_DATA=... python benchmarks/forecasting.py --trained   # only what Adam trains, into the same file

Linear, NLinear and RLinear are solved exactly, their ridge chosen on the validation part, as the filter banks' ridge and size are.
DLinear, FITS, SparseTSF and the network of two banks train by Adam for at most 30 passes of 16,384 windows, until five passes bring
nothing: three rates tried at the shortest horizon, three seeds.  A further row is the seasonal naive forecast.  ETTh1, ETTh2 and the
exchange rates are read from $ISTHMUS_DATA and left out without it.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from isthmus.primitives.forecast import RIDGES, FilterBank, Moments, dense, moments, rank_report, windows  # noqa: E402
from isthmus.primitives.forecast_net import FilterBankNet, errors, train  # noqa: E402
from isthmus.tasks.series import PACKAGED, Series, load_series  # noqa: E402
from isthmus.tasks.sources import DataError  # noqa: E402

OUT = ROOT / "results" / "forecasting.json"
HORIZONS, RATES, SEEDS, PASSES, PATIENCE = (96, 192, 336, 720), (5e-4, 2e-3, 8e-3), (0, 1, 2), 30, 5
OUTSIDE = ("forecasting/ETTh1.csv", "forecasting/ETTh2.csv", "forecasting/exchange_rate.txt.gz")
# filters, length, stride as shares of the lookback
BANKS = [(4, 1, 1), (8, 1, 1), (12, 1, 1), (24, 1, 1), (48, 1, 1), (6, 2, 2), (12, 2, 2), (6, 2, 4), (8, 4, 4)]


class Normalised(nn.Module):
    """A forecaster of pasts without their mean."""

    def forward(self, past: Tensor) -> Tensor:
        mean = past.mean(-1, keepdim=True)
        return self.map(past - mean) + mean


class DLinear(nn.Module):
    """A moving average and the rest, a linear map each."""

    def __init__(self, lookback: int, horizon: int, season: int) -> None:
        super().__init__()
        self.trend, self.rest = nn.Linear(lookback, horizon), nn.Linear(lookback, horizon)
        self.average = nn.Sequential(nn.ReplicationPad1d(12), nn.AvgPool1d(25, 1))
        self.multiply_adds = 2 * lookback * horizon + 25 * lookback

    def forward(self, past: Tensor) -> Tensor:
        trend = self.average(past[:, None])[:, 0]
        return self.trend(trend) + self.rest(past - trend)


class Fits(Normalised):
    """A complex linear map of the low frequencies, from those of the past to those of past and future together."""

    def __init__(self, lookback: int, horizon: int, season: int) -> None:
        super().__init__()
        self.lookback, self.total = lookback, lookback + horizon
        self.cut = min(lookback // 2 + 1, (lookback // season + 1) * 6 + 10)
        self.wide = min(self.total // 2 + 1, self.cut * self.total // lookback)
        bound = 1 / math.sqrt(self.cut)
        self.weight = nn.Parameter(torch.empty(2, self.cut, self.wide).uniform_(-bound, bound))
        # a complex product is four real ones; transforms by n log n
        self.multiply_adds = 4 * self.cut * self.wide + 2 * int(lookback * math.log2(lookback) + self.total * math.log2(self.total))

    def map(self, past: Tensor) -> Tensor:
        low = torch.fft.rfft(past)[..., : self.cut]
        high = low @ torch.complex(self.weight[0], self.weight[1])
        return torch.fft.irfft(high, n=self.total)[..., self.lookback :] * self.total / self.lookback


class SparseTsf(Normalised):
    """A convolution over a period, and one linear map from the past's periods to the future's for every phase."""

    def __init__(self, lookback: int, horizon: int, season: int) -> None:
        super().__init__()
        self.season, self.horizon, before, after = season, horizon, lookback // season, -(-horizon // season)
        kernel = 1 + 2 * (season // 2)
        self.smooth, self.linear = nn.Conv1d(1, 1, kernel, padding=season // 2, bias=False), nn.Linear(before, after, bias=False)
        self.multiply_adds = kernel * lookback + before * after * season

    def map(self, past: Tensor) -> Tensor:
        x = past + self.smooth(past[:, None])[:, 0]
        phases = x.unflatten(-1, (-1, self.season)).transpose(-2, -1)
        return self.linear(phases).transpose(-2, -1).flatten(-2)[..., : self.horizon]


def two_banks(lookback: int, horizon: int, season: int) -> FilterBankNet:
    return FilterBankNet(lookback, horizon, [(12, lookback // 2, lookback // 12), (12, 4, 3)])


TRAINED = {"DLinear": DLinear, "FITS": Fits, "SparseTSF": SparseTsf, "two banks, GELU": two_banks}


def exact(past, future, matrix: np.ndarray, centre: str, bias: np.ndarray | float = 0.0) -> tuple[float, float]:
    """Mean squared and absolute error of a linear map."""
    squared = absolute = 0.0
    step = max(1, 16384 // past.shape[1])
    for i in range(0, len(past), step):
        x, y = past[i : i + step], future[i : i + step]
        middle = x.mean(-1, keepdims=True) if centre == "mean" else x[..., -1:] * (centre == "last")
        gap = (x - middle) @ matrix + middle + bias - y
        squared += float((gap**2).sum())
        absolute += float(np.abs(gap).sum())
    return squared / future.size, absolute / future.size


def best_dense(fit: Moments, held: Moments) -> np.ndarray:
    return min((dense(fit, r) for r in RIDGES), key=held.error)


def fitted(name: str, horizon: int, parts: dict, lookback: int, season: int, rates: dict[str, float]) -> list[dict]:
    """What Adam trains; ``rates`` keeps the rate that was best at the first horizon."""
    rows = []
    some = max(1, len(parts["validation"][0]) * parts["validation"][0].shape[1] // 4096)
    held = tuple(w[::some] for w in parts["validation"])
    for model, make in TRAINED.items():

        def one(rate: float, seed: int):
            torch.manual_seed(seed)
            net = make(lookback, horizon, season)
            error, passes = train(net, *parts["train"], held, rate, epochs=PASSES, patience=PATIENCE, rows=16384, seed=seed)
            return error, net, passes

        if model not in rates:
            rates[model] = min(RATES, key=lambda r: one(r, 100)[0])
        found, passes, started = [], [], time.perf_counter()
        for seed in SEEDS:
            _, net, took = one(rates[model], seed)
            found.append(errors(net, *parts["test"]))
            passes.append(took)
        row = {
            "series": name,
            "horizon": horizon,
            "model": model,
            "mse": float(np.mean([f[0] for f in found])),
            "mae": float(np.mean([f[1] for f in found])),
        }
        row |= {"multiply_adds": net.multiply_adds, "parameters": sum(p.numel() for p in net.parameters())}
        row |= {
            "seconds": (time.perf_counter() - started) / len(SEEDS),
            "mse_std": float(np.std([f[0] for f in found])),
            "rate": rates[model],
            "passes": passes,
        }
        rows.append(row)
    return rows


def seasons(series: Series, lookback: int) -> int:
    return max(d for d in range(1, series.season + 1) if lookback % d == 0)


def again(document: dict) -> None:
    """The trained rows of what is in the document, anew."""
    for name in [*PACKAGED, *OUTSIDE]:
        try:
            series = load_series(name)
        except DataError as error:
            print(f"left out: {error}")
            continue
        if series.name not in document["series"] or document["series"][series.name].get("passes") == PASSES:
            continue
        lookback, rates = document["series"][series.name]["lookback"], {}
        for horizon in sorted({r["horizon"] for r in document["rows"] if r["series"] == series.name}):
            parts = {p: windows(series.part(p, lookback), lookback, horizon) for p in ("train", "validation", "test")}
            for row in fitted(series.name, horizon, parts, lookback, seasons(series, lookback), rates):
                key = tuple(row[n] for n in ("series", "horizon", "model"))
                at = next(i for i, r in enumerate(document["rows"]) if tuple(r[n] for n in ("series", "horizon", "model")) == key)
                print(
                    series.name,
                    horizon,
                    row["model"],
                    f"{document['rows'][at]['mse']:.4f} -> {row['mse']:.4f}",
                    row["passes"],
                    f"{row['seconds']:.0f} s",
                    flush=True,
                )
                document["rows"][at] = row
        document["series"][series.name]["passes"] = PASSES
        OUT.write_text(json.dumps(document, indent=1) + "\n")


def examine(series: Series, lookback: int) -> list[dict]:
    rows: list[dict] = []
    season = seasons(series, lookback)
    rates: dict[str, float] = {}
    for horizon in HORIZONS:
        if min(len(series.part(p, lookback)) for p in ("train", "validation", "test")) < lookback + horizon + 50:
            continue
        parts = {p: windows(series.part(p, lookback), lookback, horizon) for p in ("train", "validation", "test")}
        test = parts["test"]

        def add(model: str, found: tuple[float, float], cost: int, parameters: int, seconds: float, horizon=horizon, **more) -> None:
            row = {"series": series.name, "horizon": horizon, "model": model, "mse": found[0], "mae": found[1]}
            rows.append(row | {"multiply_adds": cost, "parameters": parameters, "seconds": seconds} | more)

        naive = np.zeros((lookback, horizon))
        naive[lookback - series.season + np.arange(horizon) % series.season if series.season <= lookback else -1, np.arange(horizon)] = 1
        add("seasonal naive", exact(*test, naive, "none"), 0, 0, 0.0)
        known: dict[str, tuple[Moments, Moments]] = {}
        for model, centre in (("Linear", "none"), ("NLinear", "last"), ("RLinear", "mean")):
            started = time.perf_counter()
            known[centre] = moments(*parts["train"], centre), moments(*parts["validation"], centre)
            matrix = best_dense(*known[centre])
            seconds = time.perf_counter() - started
            add(model, exact(*test, matrix, centre), lookback * horizon, matrix.size, seconds)
        tried, seconds = [], time.perf_counter()
        for filters, length, stride in BANKS:
            bank = FilterBank(filters, lookback // length, lookback // stride, max_iter=8).fit_moments(*known["mean"])
            tried.append((known["mean"][1].error(bank.matrix_), bank))
        seconds = time.perf_counter() - seconds
        chosen = min(tried, key=lambda t: t[0])[1]
        # the cheapest whose validation error is within one per cent of the best
        cheap = min((b for e, b in tried if e <= 1.01 * min(t[0] for t in tried)), key=lambda b: b.multiply_adds_)
        for name, bank in (("filter bank", chosen), ("filter bank, cheapest within 1 %", cheap)):
            size = [bank.filters, bank.length, bank.stride]
            add(name, exact(*test, bank.matrix_, "mean"), bank.multiply_adds_, bank.parameters_, seconds, size=size, rank=bank.rank_)
        for bank in (b for _, b in tried):
            size = [bank.filters, bank.length, bank.stride]
            add(
                "bank of one size",
                exact(*test, bank.matrix_, "mean"),
                bank.multiply_adds_,
                bank.parameters_,
                0.0,
                size=size,
                rank=bank.rank_,
            )
        rows += fitted(series.name, horizon, parts, lookback, season, rates)
        print(
            series.name,
            horizon,
            {r["model"]: round(r["mse"], 3) for r in rows if r["horizon"] == horizon and r["model"] != "bank of one size"},
            flush=True,
        )
    return rows


def main() -> None:
    names = [*PACKAGED, *OUTSIDE]
    document = json.loads(OUT.read_text()) if OUT.exists() and "--again" not in sys.argv else {"rows": [], "rank": {}, "series": {}}
    if "--trained" in sys.argv:
        return again(document)
    for name in names:
        try:
            series = load_series(name)
        except DataError as error:
            print(f"left out: {error}")
            continue
        if series.name in document["series"]:
            continue
        lookback = 432 if series.season == 144 else 336
        document["rows"] += examine(series, lookback)
        parts = [moments(*windows(series.part(p, lookback), lookback, 96)) for p in ("train", "test")]
        document["rank"][series.name] = rank_report(*parts, ridge=1e-4)
        document["series"][series.name] = {
            "steps": len(series.values),
            "channels": len(series.channels),
            "lookback": lookback,
            "notes": series.notes,
            "passes": PASSES,
        }
        document["versions"] = {n: importlib.metadata.version(n) for n in ("torch", "numpy")} | {"python": platform.python_version()}
        OUT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
