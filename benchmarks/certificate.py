"""Does the k-NN certificate hold, how tight is it, and what do its terms say?

    python benchmarks/certificate.py   # about a quarter of an hour on one core; results/certificate.json

Two hundred random splits of every set: half is the training set, a quarter stands by without labels, a quarter measures the test error.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import beta, norm
from sklearn.datasets import load_digits
from sklearn.linear_model import RidgeClassifier
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import isthmus  # noqa: E402
from isthmus.primitives import certify, certify_frozen  # noqa: E402
from isthmus.primitives.certificate import nearest, vote  # noqa: E402
from isthmus.tasks.build import make_task  # noqa: E402
from isthmus.tasks.pairs import animals  # noqa: E402

OUT = ROOT / "results" / "certificate.json"
SPLITS, DELTA = 200, 0.05


def text(source: str, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    """MiniLM's mean hidden state of every row, of unit length, and labels."""
    recipe = isthmus.recipe("baselines").updated({"data.source": source, "data.limit": limit})
    task = make_task(recipe)
    rows = torch.cat([task.rows(c, p) for c in range(task.clients) for p in ("train", "test")])
    hidden = task.represent(task.init(0), rows)[0]
    return F.normalize(hidden, dim=1).numpy(), task.data.label[rows].numpy()


def sets() -> dict:
    digits = load_digits()
    shapes, label = animals()
    some = np.random.default_rng(0).permutation(len(shapes))[:2500]
    return {
        "digits, pixels": (digits.data.astype(np.float32) / 16, digits.target),
        "animals, pixels": (shapes[some].flatten(1).numpy().astype(np.float32), label[some].numpy()),
        "BBC News, MiniLM": text("bbc", 2225),
        "Reuters R8, MiniLM": text("r8", 2500),
        "20 Newsgroups, MiniLM": text("20newsgroups", 2500),
    }


class Perceptron:
    """Two hidden layers, trained from a fixed seed for a fixed number of steps: deterministic."""

    def __init__(self, x: np.ndarray, y: np.ndarray, classes: int, epochs: int = 30, apart: float = 0.0) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(x.shape[1], 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
            self.head = nn.Linear(64, classes)
        a, b = torch.from_numpy(x).float(), torch.from_numpy(y)
        optimiser = torch.optim.Adam([*self.body.parameters(), *self.head.parameters()], 3e-3)
        draw = torch.Generator().manual_seed(0)
        for _ in range(epochs):
            for at in torch.randperm(len(a), generator=draw).split(64):
                hidden = self.body(a[at])
                loss = F.cross_entropy(self.head(hidden), b[at])
                if apart:  # rows of a class are driven from each other, rows of different classes together
                    unit = F.normalize(hidden, dim=1)
                    alike = unit @ unit.T
                    same = (b[at][:, None] == b[at]).float()
                    loss = loss + apart * ((alike * same).sum() / same.sum() - (alike * (1 - same)).sum() / (1 - same).sum().clamp_min(1))
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()

    @torch.no_grad()
    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.head(self.body(torch.from_numpy(x).float())).argmax(1).numpy()

    @torch.no_grad()
    def represent(self, x: np.ndarray) -> np.ndarray:
        return self.body(torch.from_numpy(x).float()).numpy()


def cut(x: np.ndarray, y: np.ndarray, seed: int):
    order = np.random.default_rng(seed).permutation(len(x))
    first, second = len(x) // 2, 3 * len(x) // 4
    return (x[order[:first]], y[order[:first]]), x[order[first:second]], (x[order[second:]], y[order[second:]])


def gather(rows: list[dict]) -> dict:
    mean = lambda f: float(np.mean([f(r) for r in rows]))
    out = {
        t: {"measured": mean(lambda r: r[t]["measured"]), "upper": mean(lambda r: r[t]["upper"])}
        for t in ("decoder", "agreement", "stability")
    }
    out |= {
        "bound": mean(lambda r: r["bound"]),
        "bound_std": float(np.std([r["bound"] for r in rows])),
        "test_error": mean(lambda r: r["test_error"]),
    }
    out |= {"held": mean(lambda r: r["bound"] >= r["test_error"]), "splits": len(rows)}
    return out | {n: mean(lambda r: r[n]) for n in rows[0] if n in ("hold_out", "train_error", "pac_bayes")}


def pac_bayes(weight: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    """A bound of the same linear readout by its weights: Gaussian posterior around them (Langford and Shawe-Taylor), every pair of classes,
    the best of a grid of scales, unit-length rows; for the error of the network at most twice the stochastic one's."""
    unit = x / np.linalg.norm(x, axis=1, keepdims=True).clip(1e-12)
    scores = unit @ weight.T
    own = scores[np.arange(len(y)), y]
    scores[np.arange(len(y)), y] = -np.inf
    margin = (own - scores.max(1)) / np.sqrt(2) / np.linalg.norm(weight, axis=1).max()
    best = 1.0
    for mu in np.geomspace(1, 1e3, 25):
        stochastic, size = float(norm.sf(mu * margin).mean()), mu**2 * len(weight) / 2
        room = (size + np.log(25 * 2 * np.sqrt(len(y)) / DELTA)) / len(y)
        best = min(best, 2 * (stochastic + np.sqrt(room / 2)))
    return best


def norm_based(weight: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    """A margin bound of the readout by its norm (Mohri, Rostamizadeh and Talwalkar, Foundations of Machine Learning, theorem 9.2): unit-length
    rows, rows of weights of at most length 1, the best of 25 margins by a union bound."""
    unit = x / np.linalg.norm(x, axis=1, keepdims=True).clip(1e-12)
    scores = unit @ (weight / np.linalg.norm(weight, axis=1).max()).T
    own = scores[np.arange(len(y)), y]
    scores[np.arange(len(y)), y] = -np.inf
    margin, room = own - scores.max(1), np.sqrt(np.log(25 / DELTA) / 2 / len(y))
    return min(1.0, min(float((margin < m).mean()) + 4 * len(weight) / m / np.sqrt(len(y)) + room for m in np.geomspace(1e-2, 2, 25)))


def norms() -> dict[str, float]:
    """Of every set's readouts over the splits of the table; 1 is vacuous."""
    out = {}
    for name, (x, y) in sets().items():
        found = []
        for seed in range(SPLITS):
            (a, b), _, _ = cut(x, y, seed)
            model = RidgeClassifier(alpha=1.0).fit(a, b)
            if model.coef_.shape[0] > 1:
                found.append(norm_based(model.coef_, a, np.searchsorted(model.classes_, b)))
        if found:
            out[name] = float(np.mean(found))
    return out


def frozen(x: np.ndarray, y: np.ndarray) -> dict:
    rows = []
    for seed in range(SPLITS):
        (a, b), u, (t, truth) = cut(x, y, seed)
        model = RidgeClassifier(alpha=1.0).fit(a, b)
        found = certify_frozen(a, b, u, model.predict(u), delta=DELTA, stages=8)
        test = float((model.predict(t) != truth).mean())
        # the usual bound: a fifth of the labels kept back
        part = len(a) * 4 // 5
        wrong = int((RidgeClassifier(alpha=1.0).fit(a[:part], b[:part]).predict(a[part:]) != b[part:]).sum())
        kept = float(beta.ppf(1 - DELTA, wrong + 1, len(a) - part - wrong))
        more = {"pac_bayes": pac_bayes(model.coef_, a, np.searchsorted(model.classes_, b))} if model.coef_.shape[0] > 1 else {}
        rows.append(asdict(found) | {"bound": found.bound, "test_error": test, "hold_out": kept} | more)
    return gather(rows)


def trained(x: np.ndarray, y: np.ndarray, splits: int = SPLITS, shuffled: bool = False, apart: float = 0.0, epochs: int = 30) -> dict:
    rows, classes = [], int(y.max()) + 1
    for seed in range(splits):
        (a, b), u, (t, truth) = cut(x, y, seed)
        if shuffled:
            b = np.random.default_rng(seed).permutation(b)
        fit = lambda p, q: Perceptron(p, q, classes, epochs, apart)
        found = certify(fit, a, b, u, folds=3, delta=DELTA, seed=seed)
        whole = fit(a, b)
        rows.append(
            asdict(found)
            | {
                "bound": found.bound,
                "test_error": float((whole.predict(t) != truth).mean()),
                "train_error": float((whole.predict(a) != b).mean()),
            }
        )
    return gather(rows)


def weight_noise(x: np.ndarray, y: np.ndarray) -> list[dict]:
    """Noise relative to each weight matrix's own size, in the whole network: errors of the readout and of k-NN on the noisy representation."""
    out = []
    (a, b), _, (t, truth) = cut(x, y, 0)
    for level in (0.0, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0):
        readout, decoder = [], []
        for seed in range(10):
            model = Perceptron(a, b, int(y.max()) + 1)
            draw = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for p in (*model.body.parameters(), *model.head.parameters()):
                    p += level * p.std() * torch.randn(p.shape, generator=draw)
            readout.append(float((model.predict(t) != truth).mean()))
            decoded = vote(b[nearest(model.represent(a), model.represent(t), 3)[1]], int(y.max()) + 1)
            decoder.append(float((decoded != truth).mean()))
        out.append({"noise": level, "readout": float(np.mean(readout)), "decoder": float(np.mean(decoder))})
    return out


def main() -> None:
    torch.set_num_threads(1)
    document: dict = {"delta": DELTA, "frozen": {}, "trained": {}}
    known = sets()
    for name, (x, y) in known.items():
        document["frozen"][name] = frozen(x, y)
        print(name, {k: v for k, v in document["frozen"][name].items() if not isinstance(v, dict)}, flush=True)
    for name in ("digits, pixels", "BBC News, MiniLM"):
        x, y = known[name]
        document["trained"][name] = trained(x, y, SPLITS if "digits" in name else 50, epochs=12)
        print("trained", name, {k: v for k, v in document["trained"][name].items() if not isinstance(v, dict)}, flush=True)
    x, y = known["digits, pixels"]
    document["diagnostics"] = {
        "as it is": trained(x, y, 5, epochs=60),
        "labels shuffled": trained(x, y, 5, shuffled=True, epochs=200),
        "classes torn apart": trained(x, y, 5, apart=1.0, epochs=60),
        "classes torn apart, more": trained(x, y, 5, apart=3.0, epochs=60),
    }
    document["weight_noise"] = weight_noise(x, y)
    document["norm_based"] = norms()
    document["versions"] = {n: importlib.metadata.version(n) for n in ("torch", "numpy", "scikit-learn")} | {
        "python": platform.python_version()
    }
    OUT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
