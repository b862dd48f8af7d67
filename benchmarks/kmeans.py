"""Speed and memory of k-means against its peers, and each phase against what the machine can do.

    pip install faiss-cpu scikit-learn-intelex   # beside isthmus; peers that are missing are left out
    python benchmarks/kmeans.py                  # about ten minutes on two cores; results/kmeans.json

Everybody starts from the same centres; contestants take turns with a pause between them (BLAS threads spin after a product), the best of
the rounds counts.  NumPy's BLAS runs unpinned: the script starts itself again without OPENBLAS_CORETYPE and OPENBLAS_L2_SIZE, and once more
with AVX2 kernels, for peers that are faster so; each peer's better setting counts.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
OUT = ROOT / "results" / "kmeans.json"

import numpy as np  # noqa: E402

SHAPES = [(100_000, 64, 256), (1_000_000, 16, 64), (200_000, 128, 1024), (50_000, 384, 100)]
ROUNDS, STEPS, PAUSE = 2, 10, 0.25
warnings.filterwarnings("ignore")


def blobs(n: int, d: int, k: int, separation: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = ((random.normal(size=(k, d)) * separation)[random.integers(0, k, n)] + random.normal(size=(n, d))).astype(np.float32)
    return x, x[random.choice(n, k, False)].copy()


def contestants() -> dict:
    import sklearn.cluster

    from isthmus.primitives import KMeans
    from isthmus.primitives import kmeans as ours

    def isthmus(x, c, steps, algorithm="auto", half=True):
        kept = ours._FILTER
        ours._FILTER = kept if half else (10**9, 0)
        try:
            m = KMeans(len(c), init=c, max_iter=steps, tol=0, algorithm=algorithm).fit(x)
        finally:
            ours._FILTER = kept
        return m.labels_, m.inertia_

    def scikit(module, algorithm):
        def run(x, c, steps):
            m = module.KMeans(len(c), init=c, n_init=1, max_iter=steps, tol=0, algorithm=algorithm).fit(x)
            return m.labels_, m.inertia_

        return run

    def torch_loop(x, c, steps):
        import torch

        x, c = torch.from_numpy(x), torch.from_numpy(c)
        size = x.square().sum(1)
        for step in range(steps + 1):
            labels = torch.cat([(c.square().sum(1) - 2 * part @ c.T).argmin(1) for part in x.split(8192)])
            if step == steps:
                break
            count = torch.bincount(labels, minlength=len(c))
            c = torch.where(count[:, None] > 0, torch.zeros_like(c).index_add_(0, labels, x) / count.clamp_min(1)[:, None], c)
        return labels.numpy(), float((size + c.square().sum(1)[labels] - 2 * (x * c[labels]).sum(1)).sum())

    found = {
        "isthmus": isthmus,
        "isthmus, float32 only": lambda x, c, s: isthmus(x, c, s, half=False),
        "scikit-learn Lloyd": scikit(sklearn.cluster, "lloyd"),
        "scikit-learn Elkan": scikit(sklearn.cluster, "elkan"),
        "torch": torch_loop,
    }
    try:
        import sklearnex.cluster

        found["scikit-learn-intelex"] = scikit(sklearnex.cluster, "lloyd")
    except ImportError:
        pass
    try:
        import faiss

        def faiss_run(x, c, steps):
            faiss.omp_set_num_threads(os.cpu_count() or 1)
            m = faiss.Kmeans(x.shape[1], len(c), niter=steps, max_points_per_centroid=10**9, min_points_per_centroid=1)
            m.train(x, init_centroids=c)
            square, labels = m.index.search(x, 1)
            return labels[:, 0], float(square.sum(dtype=np.float64))

        found["faiss"] = faiss_run
    except ImportError:
        pass
    return found


def race(runs: dict, x: np.ndarray, c: np.ndarray, steps: int, rounds: int = ROUNDS) -> dict[str, dict]:
    best: dict[str, dict] = {}
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(PAUSE)
            started = time.perf_counter()
            labels, inertia = run(x, c.copy(), steps)
            seconds = time.perf_counter() - started
            if name not in best or seconds < best[name]["seconds"]:
                best[name] = {"seconds": seconds, "inertia": float(inertia), "labels": labels}
    first = best["isthmus"]["labels"]
    for row in best.values():
        row["agreement"] = float((row.pop("labels") == first).mean())
    return best


def peers() -> dict:
    """All contestants at all shapes, on data with structure and on noise."""
    out: dict = {}
    for separation in (1.0,) if "--structure" in sys.argv else (1.0, 0.0):
        for n, d, k in SHAPES:
            runs = contestants()
            if separation == 0.0:
                runs = {
                    n: r for n, r in runs.items() if n in ("isthmus", "isthmus, float32 only", "scikit-learn Lloyd", "scikit-learn-intelex")
                }
            elif n * d * k > 1e10:
                del runs["scikit-learn Elkan"]
            found = race(runs, *blobs(n, d, k, separation), STEPS)
            out[f"{'structure' if separation else 'noise'}, {n} x {d}, K = {k}"] = found
            print(n, d, k, separation, {m: round(r["seconds"], 3) for m, r in found.items()}, file=sys.stderr, flush=True)
    return out


def timed(work, times: int = 5) -> float:
    best = np.inf
    for _ in range(times):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def phases(limits: tuple[float, float]) -> dict:
    """Each phase at each shape: seconds, and shares of the machine's multiply-adds and reading."""
    from isthmus.primitives import kernels
    from isthmus.primitives.kmeans import plus_plus

    lib, n_threads = kernels.load(), kernels.threads()
    out = {}
    for n, d, k in SHAPES:
        x, c = blobs(n, d, k, 1.0)
        shift, labels = x.mean(0), np.empty(n, np.int32)
        sums, counts, near = np.zeros((k, d)), np.zeros(k), np.full(n, 1e30, np.float32)
        phase = {
            "assign": timed(lambda: lib.assign(x, shift, c, labels, None, None, None, False, n_threads)),
            "assign and sum": timed(lambda: lib.assign(x, shift, c, labels, sums, counts, None, False, n_threads)),
            "sum by scatter alone": None,
            "sum by sorted labels": timed(lambda: lib.update(x, labels, sums, counts, None, n_threads)),
            "distances to own centres": timed(lambda: lib.own(x, c, labels, None, None, n_threads)),
            "take a seed": timed(lambda: lib.take(x, c[0], near, None, n_threads)),
            "k-means++, 32 seeds": timed(lambda: plus_plus(x, 32, np.random.RandomState(0)), 2),
        }
        phase["sum by scatter alone"] = phase["assign and sum"] - phase["assign"]
        if lib.can_filter:
            looked = lib.assign(x, shift, c, labels, None, None, None, True, n_threads)[1]
            phase["assign, products in bfloat16"] = timed(lambda: lib.assign(x, shift, c, labels, None, None, None, True, n_threads))
            phase["rows that were scanned again"] = looked / n
        flop = 2.0 * n * d * k
        shares = {
            "assign": flop / phase["assign"] / limits[0],
            "distances to own centres": x.nbytes / phase["distances to own centres"] / limits[1],
            "sum by sorted labels": x.nbytes / phase["sum by sorted labels"] / limits[1],
            "take a seed": x.nbytes / phase["take a seed"] / limits[1],
        }
        by_unit = {
            name: timed(lambda u=kernels.load(name): u.assign(x, shift, c, labels, None, None, None, False, n_threads))
            for name in kernels.available()
        }
        by_unit["numpy"] = timed(lambda: kernels.Plain().assign(x, shift, c, labels, None, None, None, False, n_threads), 2)
        out[f"{n} x {d}, K = {k}"] = {"seconds": phase, "share of the limit": shares, "assign by instruction set": by_unit}
    return out


def bounds() -> dict:
    """Runs to convergence from k-means++ on clustered data, and 30 steps on less: bounds never, always, and when they pay."""
    from isthmus.primitives import kmeans as ours

    out = {}
    for n, d, k, separation in [
        (200_000, 128, 1024, 1.0),
        (200_000, 128, 1024, 0.3),
        (100_000, 64, 256, 1.0),
        (100_000, 64, 256, 0.0),
        (50_000, 384, 100, 1.0),
        (1_000_000, 16, 64, 1.0),
    ]:
        x, c = blobs(n, d, k, separation)
        row = {}
        for half in (False, True):
            for algorithm in ("lloyd", "bounds", "auto") if not half else ("lloyd", "auto"):
                kept = ours._FILTER
                ours._FILTER = kept if half else (10**9, 0)
                m = ours.KMeans(k, init=c, max_iter=60, tol=0, algorithm=algorithm)
                row[algorithm + (", bfloat16" if half else "")] = timed(lambda m=m: m.fit(x), 2)
                ours._FILTER = kept
        out[f"{n} x {d}, K = {k}, separation {separation}"] = row | {"steps": m.n_iter_}
        print(list(out.items())[-1], file=sys.stderr, flush=True)
    return out


MEMORY = """
import sys, numpy as np
sys.path.insert(0, {src!r})
from isthmus.primitives import KMeans, kernels
kernels.load()
x = {data}
c = np.array(x[:{k}])
KMeans(2, init=np.array(x[:2]), max_iter=1).fit(np.array(x[:1000]))
open("/proc/self/clear_refs", "w").write("5")
peak = lambda: int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
import time
before, started = peak(), time.perf_counter()
KMeans({k}, init=c, max_iter={steps}, tol=0, algorithm="{algorithm}").fit(x)
print(peak() - before, peak(), time.perf_counter() - started)
"""


def memory() -> dict:
    """Peak memory beyond the input, and a file of 4 GiB."""
    out = {}

    def measure(data: str, k: int, steps: int, algorithm: str) -> tuple[float, float, float]:
        code = MEMORY.format(src=str(ROOT / "src"), data=data, k=k, steps=steps, algorithm=algorithm)
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        a, b, c = map(float, found.stdout.split())
        return a, b, c

    for n, d, k in SHAPES:
        for algorithm in ("lloyd", "bounds"):
            extra, _, _ = measure(f"np.random.default_rng(0).normal(size=({n}, {d})).astype(np.float32)", k, 3, algorithm)
            out[f"{n} x {d}, K = {k}, {algorithm}"] = {"beyond the input": extra / (4 * n * d)}
    with tempfile.TemporaryDirectory() as folder:
        path, rows = Path(folder) / "rows", 2**24
        made = np.memmap(path, np.float32, "w+", shape=(rows, 64))
        for i in range(0, rows, 2**20):
            made[i : i + 2**20] = np.random.default_rng(i).normal(size=(2**20, 64)).astype(np.float32)
        made.flush()
        del made
        _, peak, seconds = measure(f"np.memmap({str(path)!r}, np.float32, 'r', shape=({rows}, 64))", 64, 3, "lloyd")
        out["a file of 4 GiB, K = 64, three steps"] = {"resident": peak, "seconds": seconds}
    return out


def neighbours() -> dict:
    """10,000 queries against 50,000 rows of 512."""
    import torch
    from sklearn.neighbors import NearestNeighbors

    from isthmus.primitives.certificate import nearest

    random = np.random.default_rng(0)
    memory_, queries = (random.normal(size=(n, 512)).astype(np.float32) for n in (50_000, 10_000))

    def with_torch():
        m, q = torch.from_numpy(memory_), torch.from_numpy(queries)
        size = m.square().sum(1)
        return torch.cat([torch.addmm(size, part, m.T, alpha=-2).topk(5, largest=False).indices for part in q.split(2048)])

    out = {
        "isthmus": timed(lambda: nearest(memory_, queries, 5), 3),
        "torch, product and topk": timed(with_torch, 3),
        "scikit-learn brute": timed(lambda: NearestNeighbors(n_neighbors=5, algorithm="brute").fit(memory_).kneighbors(queries), 2),
    }
    try:
        import faiss

        index = faiss.IndexFlatL2(512)
        index.add(memory_)
        out["faiss flat"] = timed(lambda: index.search(queries, 5), 3)
    except ImportError:
        pass
    return out


def seeding() -> dict:
    from sklearn.cluster import kmeans_plusplus

    from isthmus.primitives.kmeans import plus_plus

    out = {}
    for n, d, k in [(100_000, 64, 256), (1_000_000, 16, 64)]:
        x, _ = blobs(n, d, k, 1.0)
        out[f"{n} x {d}, K = {k}"] = {
            "isthmus": timed(lambda x=x, k=k: plus_plus(x, k, np.random.RandomState(0)), 2),
            "scikit-learn": timed(lambda x=x, k=k: kmeans_plusplus(x, k, random_state=0), 2),
        }
    return out


def versions() -> dict[str, str]:
    out = {"python": platform.python_version()}
    for name in ("numpy", "scikit-learn", "faiss-cpu", "scikit-learn-intelex", "torch"):
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = "not installed"
    return out


def child(setting: dict[str, str], *more: str) -> dict:
    kept = {n: v for n, v in os.environ.items() if n not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
    found = subprocess.run([sys.executable, __file__, "--peers", *more], env=kept | setting, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(found.stdout)


def main() -> None:
    if "--peers" in sys.argv:
        print(json.dumps(peers()))
        return
    if "OPENBLAS_CORETYPE" in os.environ or "OPENBLAS_L2_SIZE" in os.environ:
        kept = {n: v for n, v in os.environ.items() if n not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
        raise SystemExit(subprocess.run([sys.executable, __file__, *sys.argv[1:]], env=kept, check=False).returncode)
    from isthmus.primitives import kernels

    lib = kernels.load()
    limits = lib.limits(kernels.threads())
    found, pinned = child({}), child({"OPENBLAS_CORETYPE": "Haswell"}, "--structure")
    for title, rows in found.items():
        for name, row in rows.items():
            other = pinned.get(title, rows)[name]
            row["setting"] = "AVX2 BLAS" if other["seconds"] < row["seconds"] else "BLAS as it comes"
            row["seconds"] = min(row["seconds"], other["seconds"])
        peer = {n: r["seconds"] for n, r in rows.items() if not n.startswith("isthmus")}
        for name in ("isthmus", "isthmus, float32 only"):
            rows[name]["best peer over it"] = min(peer.values()) / rows[name]["seconds"]
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    document = {
        "machine": {
            "processor": cpu,
            "threads": kernels.threads(),
            "kernels": lib.name,
            "float32 flop/s": limits[0],
            "read bytes/s": limits[1],
        },
        "versions": versions(),
        "steps": STEPS,
        "peers": found,
        "phases": phases(limits),
        "bounds": bounds(),
        "memory": memory(),
        "neighbours": neighbours(),
        "seeding": seeding(),
    }
    OUT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
