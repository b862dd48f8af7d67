"""Linear regression from sources of unknown noise: error against sqrt(n d) / m, beside other robust estimators.

    python benchmarks/regression.py   # about a quarter of an hour on one core; results/regression.json

n sources, m of them with standard deviation 1, the others loud: "huge" (1,000), "spread" (log-uniform from 2 to 10,000), "hard" (max(2, n / m),
what hurts medians most), or one scale of a grid, of which the worst for the estimator counts ("worst").  Seeds from 1000 on, twenty of
them, which no setting was chosen on.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
import time
import warnings
from pathlib import Path

import numpy as np
from sklearn.linear_model import HuberRegressor, RANSACRegressor, TheilSenRegressor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from isthmus.primitives import SubsetOfSignals  # noqa: E402

OUT = ROOT / "results" / "regression.json"
SEEDS = range(1000, 1020)
LOUD = {
    "huge": lambda r, k, n, m: np.full(k, 1e3),
    "spread": lambda r, k, n, m: 10 ** r.uniform(np.log10(2), 4, k),
    "hard": lambda r, k, n, m: np.full(k, max(2.0, n / m)),
}
warnings.filterwarnings("ignore")


def problem(n: int, d: int, m: int, loud, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    r = np.random.default_rng(seed)
    x, beta = r.normal(size=(n, d)), r.normal(size=d)
    scale = np.ones(n)
    scale[r.permutation(n)[m:]] = loud(r, n - m, n, m)
    return x, x @ beta + scale * r.normal(size=n), beta, scale


def reweighted(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Iterative reweighting by each residual alone, with the median residual as floor."""
    b = np.linalg.lstsq(x, y, rcond=None)[0]
    for _ in range(50):
        r = np.abs(y - x @ b)
        w = 1 / np.maximum(r, np.median(r)) ** 2
        b = np.linalg.solve(x.T * w @ x, x.T * w @ y)
    return b


def ours(method: str):
    return lambda x, y: SubsetOfSignals(unit=1.0, method=method, fit_intercept=False).fit(x, y).coef_


ESTIMATORS = {
    "least squares": lambda x, y: np.linalg.lstsq(x, y, rcond=None)[0],
    "Huber": lambda x, y: HuberRegressor(fit_intercept=False, alpha=0, max_iter=500).fit(x, y).coef_,
    "RANSAC": lambda x, y: RANSACRegressor(random_state=0, residual_threshold=2.0, max_trials=300).fit(x, y).estimator_.coef_,
    "Theil-Sen": lambda x, y: TheilSenRegressor(fit_intercept=False, random_state=0, max_subpopulation=300).fit(x, y).coef_,
    "reweighted": reweighted,
    "absolute deviations": ours("absolute"),
    "scale mixture": ours("mixture"),
    "SubsetOfSignals": ours("auto"),
    "SubsetOfSignals, unit unknown": lambda x, y: SubsetOfSignals(fit_intercept=False).fit(x, y).coef_,
}


def summary(values: list[float]) -> dict[str, float]:
    return {"median": float(np.median(values)), "low": float(np.quantile(values, 0.25)), "high": float(np.quantile(values, 0.75))}


def oracle(x, y, scale):
    w = 1 / scale**2
    return np.linalg.solve(x.T * w @ x, x.T * w @ y)


def families(n: int = 2000, d: int = 10) -> dict:
    """Every estimator at every m."""
    out: dict = {}
    for family, loud in LOUD.items():
        for m in (100, 400, 1600):
            rate = np.sqrt(n * d) / m
            row: dict[str, list[float]] = {}
            for seed in SEEDS:
                x, y, beta, scale = problem(n, d, m, loud, seed)
                row.setdefault("oracle", []).append(np.linalg.norm(oracle(x, y, scale) - beta) / rate)
                for name, estimate in ESTIMATORS.items():
                    if name == "Theil-Sen" and seed >= SEEDS.start + 5:
                        continue  # seconds each
                    try:
                        row.setdefault(name, []).append(np.linalg.norm(estimate(x, y) - beta) / rate)
                    except ValueError:  # RANSAC that finds no consensus
                        row.setdefault(name, []).append(np.inf)
            out[f"{family}, m = {m}"] = {"family": family, "n": n, "d": d, "m": m, "ratio": {k: summary(v) for k, v in row.items()}}
            print(family, m, {k: round(float(np.median(v)), 2) for k, v in row.items()}, flush=True)
    return out


def envelope() -> list[dict]:
    """The worst loud scale of a grid for each estimator, over sizes from 300 x 3 to 10,000 x 100: median error over five seeds."""
    out = []
    sizes = [
        (300, 3, 70),
        (300, 3, 200),
        (1000, 10, 220),
        (1000, 10, 400),
        (1000, 10, 900),
        (3000, 3, 400),
        (3000, 30, 700),
        (3000, 30, 2400),
    ]
    for n, d, m in [*sizes, (10000, 10, 700), (10000, 10, 3000), (10000, 100, 4000)]:
        errors: dict[str, list[float]] = {}
        for scale in (max(2.0, n / m), 30.0, 1e4):
            for name in ("least squares", "absolute deviations", "scale mixture"):
                found = []
                for seed in SEEDS[:5]:
                    x, y, beta, _ = problem(n, d, m, lambda r, k, n, m, s=scale: np.full(k, s), seed)
                    found.append(np.linalg.norm(ESTIMATORS[name](x, y) - beta))
                errors.setdefault(name, []).append(float(np.median(found)))
        out.append({"n": n, "d": d, "m": m, "rate": float(np.sqrt(n * d) / m), "worst": {k: max(v) for k, v in errors.items()}})
        print(out[-1], flush=True)
    return out


def coverage(n: int = 600, d: int = 5, times: int = 200) -> dict:
    """How often beta lies within 1.96 standard errors, by family and method."""
    out: dict = {}
    for family in (*LOUD, "equal"):
        loud = LOUD.get(family, lambda r, k, n, m: np.ones(k))
        for method in ("absolute", "mixture"):
            hits = []
            for seed in range(5000, 5000 + times):
                x, y, beta, _ = problem(n, d, 200, loud, seed)
                m = SubsetOfSignals(unit=1.0, method=method, fit_intercept=False).fit(x, y)
                hits.append((np.abs(m.coef_ - beta) <= 1.96 * m.std_error_).mean())
            out[f"{family}, {method}"] = float(np.mean(hits))
        print(family, out, flush=True)
    return out


def equal() -> dict:
    """Where all sources are alike: error over that of least squares."""
    out: dict[str, list[float]] = {}
    for seed in SEEDS:
        x, y, beta, _ = problem(1000, 10, 1000, lambda r, k, n, m: np.ones(k), seed)
        base = np.linalg.norm(ESTIMATORS["least squares"](x, y) - beta)
        for name in ("absolute deviations", "scale mixture", "SubsetOfSignals", "SubsetOfSignals, unit unknown", "Huber"):
            out.setdefault(name, []).append(np.linalg.norm(ESTIMATORS[name](x, y) - beta) / base)
    return {k: summary(v) for k, v in out.items()}


def large() -> dict:
    x, y, beta, _ = problem(1_000_000, 100, 50_000, LOUD["spread"], 0)
    started = time.perf_counter()
    m = SubsetOfSignals(unit=1.0, fit_intercept=False).fit(x, y)
    return {
        "n": 1_000_000,
        "d": 100,
        "seconds": time.perf_counter() - started,
        "method": m.method_,
        "error over rate": float(np.linalg.norm(m.coef_ - beta) / (np.sqrt(1e8) / 5e4)),
    }


def main() -> None:
    document = json.loads(OUT.read_text()) if OUT.exists() else {}
    parts = {"families": families, "equal": equal, "envelope": envelope, "coverage": coverage, "large": large}
    for name in sys.argv[1:] or parts:
        document[name] = parts[name]()
        document["versions"] = {n: importlib.metadata.version(n) for n in ("numpy", "scipy", "scikit-learn")} | {
            "python": platform.python_version()
        }
        OUT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
