"""Speed and memory of the simulator against a plain loop with peft, Flower's simulation and pfl-research.

    pip install 'flwr[simulation]==1.42.0' pfl==0.6.0      # beside isthmus[newsroom]; peers that are missing are left out
    python benchmarks/simulator.py                         # about 20 minutes on two cores; results/simulator.json

Same data, same batches, same number of rounds and steps for everybody; contestants take turns, medians over turns, ratios within the run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import peers  # noqa: E402
import torch  # noqa: E402

from isthmus.adapters.frozen import measure  # noqa: E402
from isthmus.adapters.host import Host  # noqa: E402
from isthmus.adapters.lora import Lora  # noqa: E402
from isthmus.core.batches import Batches  # noqa: E402
from isthmus.core.rounds import server_round, server_start  # noqa: E402
from isthmus.engines.simulator import Simulator  # noqa: E402
from isthmus.federated.fedavg import plain  # noqa: E402
from isthmus.parts.work import LocalTraining, NoTraining  # noqa: E402
from isthmus.tasks.arrays import ArrayTask, Perceptron  # noqa: E402
from isthmus.tasks.build import _tokens, load_pretrained  # noqa: E402
from isthmus.tasks.hosted import HostTask  # noqa: E402
from isthmus.tasks.sources import load  # noqa: E402
from isthmus.tasks.text import Classifier, Texts  # noqa: E402

CLIENTS, STEPS, SIZE, LENGTH, LR = 24, 3, 16, 64, 0.05


def installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def bbc(clients: int, rows: int) -> tuple[Texts, list[torch.Tensor]]:
    """``rows`` articles for each client, drawn with replacement where BBC News has too few."""
    corpus = load("bbc")
    _, tokenizer = load_pretrained("minilm", causal=False)
    ids, length = _tokens(tokenizer, corpus.text, LENGTH)
    names = sorted(set(corpus.label))
    label = torch.tensor([names.index(v) for v in corpus.label])
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    train = [order[torch.arange(k * rows, (k + 1) * rows) % len(order)] for k in range(clients)]
    return Texts(ids, length, label, torch.zeros(len(ids), dtype=torch.long)), train


def minilm_task(texts: Texts, train, precision="fp32", layers="all", keep=2 << 30, product="auto") -> HostTask:
    net, _ = load_pretrained("minilm", causal=False)
    host = Host(net, [Lora(peers.RANK, layers=layers)], precision, product=product)
    head = Classifier(384, texts, torch.ones(1, 5, dtype=torch.bool))
    return HostTask(host, head, texts, train, [t[:4] for t in train], keep=keep)


class Ours:
    """A federation that plays rounds when asked."""

    def __init__(self, task, work, batches: Batches, way: str = "together", chunk: int | None = None) -> None:
        self.method, self.task = plain(work), task
        self.method = replace(self.method, observers=())
        self.engine = Simulator(self.method, task, 0, batches, way, chunk)
        self.server = server_start(self.method, task, 0)
        self.warm = False

    def __call__(self, rounds: int) -> list[float]:
        seconds = []
        for _ in range(rounds + (not self.warm)):
            began = time.perf_counter()
            self.server, _ = server_round(self.method, self.task, self.server, self.engine)
            seconds.append(time.perf_counter() - began)
        seconds, self.warm = seconds[-rounds:], True
        return seconds


def turns(contestants: dict, rounds: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of every round of every contestant, who take turns."""
    out: dict[str, list[float]] = {n: [] for n in contestants}
    for i in range(repeats):
        for name, play in contestants.items():
            out[name] += play(rounds)
            print(f"  turn {i + 1}: {name}: {statistics.median(out[name]):.2f} s a round", flush=True)
    return out


def summarise(seconds: dict[str, list[float]]) -> dict:
    return {n: {"median_s": round(statistics.median(s), 4), "min_s": round(min(s), 4), "rounds": len(s)} for n, s in seconds.items() if s}


def ratio(seconds: dict[str, list[float]], slow: str, fast: str) -> float | None:
    if not seconds.get(slow) or not seconds.get(fast):
        return None
    return round(statistics.median(seconds[slow]) / statistics.median(seconds[fast]), 2)


def minilm(repeats: int, scratch: Path) -> dict:
    """24 clients x 3 steps x 16 articles x 64 tokens, LoRA rank 8 on query and value."""
    texts, train = bbc(CLIENTS, STEPS * SIZE)
    batches, sgd = Batches(SIZE), LocalTraining("sgd", LR)
    out = {}
    for title, layers, chosen in (("all layers", "all", (0, 1, 2, 3, 4, 5)), ("upper two layers", "upper:2", (4, 5))):
        print(f"MiniLM, {title}", flush=True)
        exact = minilm_task(texts, train, layers=layers)
        order = torch.stack([batches.draw(train[k], 0, 0, k) for k in range(CLIENTS)])  # (K, S, B)
        mask = (torch.arange(texts.ids.shape[1]) < texts.length[order][..., None]).long()
        work = {"layers": chosen, "labels": 5, "clients": CLIENTS, "lr": LR, "ids": texts.ids[order], "mask": mask, "y": texts.label[order]}
        work |= {"start": {peers.theirs(n): t for n, t in exact.init(0).items()}, "path": str(scratch / f"{layers.replace(':', '')}.pt")}
        contestants = {
            "isthmus fp32": Ours(exact, sgd, batches),
            "isthmus fp32, loop": Ours(exact, sgd, batches, "loop"),
            "isthmus bf16": Ours(minilm_task(texts, train, "bf16", layers), sgd, batches),
            "peft loop": lambda rounds, w=work: peers.peft_loop(w, rounds)[0],
        }
        if layers != "all":
            contestants["isthmus fp32, nothing kept"] = Ours(minilm_task(texts, train, layers=layers, keep=0), sgd, batches)
        if installed("flwr"):
            contestants["Flower"] = lambda rounds, w=work: peers.flower(w, rounds, "minilm")
        seconds = turns(contestants, 1, repeats)
        # the same first round, compared: together, loop, peft
        ends = {}
        for name, way in (("together", "together"), ("loop", "loop")):
            one = Ours(exact, sgd, batches, way)
            one.server, _ = server_round(one.method, exact, one.server, one.engine)
            ends[name] = one.server.shared
        reference = peers.peft_loop(work, 1)[1]
        gap = lambda a, b: max(float((a[n] - b[n]).abs().max()) for n in a)
        out[title] = {
            "seconds": summarise(seconds),
            "together_against_loop": gap(ends["together"], ends["loop"]),
            "together_against_peft": max(float((t - reference[peers.theirs(n)]).abs().max()) for n, t in ends["together"].items()),
            "largest_update": max(float((t - exact.init(0)[n]).abs().max()) for n, t in ends["together"].items()),
            "ratios": {
                "fp32 over Flower": ratio(seconds, "Flower", "isthmus fp32"),
                "fp32 over peft loop": ratio(seconds, "peft loop", "isthmus fp32"),
                "bf16 over Flower": ratio(seconds, "Flower", "isthmus bf16"),
                "bf16 over peft loop": ratio(seconds, "peft loop", "isthmus bf16"),
                "kept over not kept": ratio(seconds, "isthmus fp32, nothing kept", "isthmus fp32"),
            },
        }
    return out


def small(repeats: int, scratch: Path) -> dict:
    """64-128-10 network, 20 steps x 32 rows for each of 100 and 1,000 clients."""
    out = {}
    for clients in (100, 1000):
        print(f"small network, {clients} clients", flush=True)
        g = torch.Generator().manual_seed(0)
        x, y = torch.randn(clients * 640, 64, generator=g), torch.randint(0, 10, (clients * 640,), generator=g)
        train = [torch.arange(k * 640, (k + 1) * 640) for k in range(clients)]
        task = ArrayTask(Perceptron(64, 10, 128), x, y, train, [t[:8] for t in train])
        work = {"clients": clients, "lr": 0.05, "x": x.view(clients, 20, 32, 64), "y": y.view(clients, 20, 32)}
        work |= {"start": [p.detach() for p in peers.small_net().parameters()], "path": str(scratch / f"small{clients}.pt")}
        sgd, batches = LocalTraining("sgd", 0.05), Batches(32)
        contestants = {
            "isthmus": Ours(task, sgd, batches),
            "isthmus, loop": Ours(task, sgd, batches, "loop"),
            "plain loop": lambda rounds, w=work: peers.small_loop(w, rounds),
        }
        if installed("pfl"):
            contestants["pfl-research"] = lambda rounds, w=work: peers.small_pfl(w, rounds)
        if installed("flwr"):
            contestants["Flower"] = lambda rounds, w=work: peers.flower(w, rounds, "small")
        seconds = turns(contestants, 2 if clients == 100 else 1, repeats)
        out[f"{clients} clients"] = {
            "seconds": summarise(seconds),
            "clients_per_second": {n: round(clients / statistics.median(s)) for n, s in seconds.items() if s},
            "ratios": {f"over {n}": ratio(seconds, n, "isthmus") for n in ("Flower", "pfl-research", "plain loop", "isthmus, loop")},
        }
    return out


def peak(code: str) -> dict:
    """Run a function of this file in a process of its own; its result, and its peak resident memory."""
    command = [sys.executable, str(Path(__file__)), "--only", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    return json.loads(done.stdout.strip().splitlines()[-1])


def memory(clients: int) -> dict:
    """One round of ``clients`` clients with MiniLM LoRA of which B stays private, so that every client is resident."""
    from isthmus.federated.fedsa_lora import fedsa_lora

    texts, train = bbc(clients, 16)
    task = minilm_task(texts, train, "bf16")
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    method = replace(fedsa_lora(plain(LocalTraining("sgd", LR))), observers=())
    engine, server = Simulator(method, task, 0, Batches(16)), server_start(method, task, 0)
    server_round(method, task, server, engine)
    adapter = sum(t.numel() * 4 for t in task.init(0).values())
    top = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"clients": clients, "peak_mib": round(top), "base_mib": round(begin), "adapter_bytes": adapter}


def platform_cost() -> dict:
    """A round of 1,000 clients with rank-8 MiniLM payloads and no training: what the platform itself costs."""
    texts, train = bbc(1000, 16)
    one = Ours(minilm_task(texts, train, "bf16"), NoTraining(), Batches(16))
    one(1)
    return {"seconds": [round(s, 3) for s in one(3)]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", default="minilm,small,memory,platform")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(eval_only(options.only)))
        return
    out = ROOT / "results" / "simulator.json"
    out.parent.mkdir(exist_ok=True)
    document = json.loads(out.read_text()) if out.exists() else {}
    names = ("torch", "transformers", "peft", "flwr", "pfl", "ray", "numpy")
    document["machine"] = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gflops_fp32": {k: round(v) for k, v in measure().items()},
        "gflops_bf16": round(max(measure(torch.bfloat16).values())),
        "versions": {n: importlib.metadata.version(n) for n in names if installed(n)} | {"python": platform.python_version()},
        "load_before": round(os.getloadavg()[0], 2),
    }
    with tempfile.TemporaryDirectory() as scratch:
        for part in options.parts.split(","):
            if part == "minilm":
                document["minilm"] = minilm(options.repeats, Path(scratch))
            elif part == "small":
                document["small"] = small(options.repeats, Path(scratch))
            elif part == "memory":
                few, many = peak("memory:100"), peak("memory:1000")
                per_client = (many["peak_mib"] - few["peak_mib"]) * 2**20 / (many["clients"] - few["clients"])
                document["memory"] = {
                    "runs": [few, many],
                    "bytes_per_resident_client": round(per_client),
                    "times_the_adapter": round(per_client / many["adapter_bytes"], 2),
                }
            elif part == "platform":
                document["platform"] = peak("platform")
            out.write_text(json.dumps(document, indent=1) + "\n")
            print(json.dumps(document.get(part), indent=1), flush=True)


def eval_only(name: str) -> dict:
    kind, _, number = name.partition(":")
    return memory(int(number)) if kind == "memory" else platform_cost()


if __name__ == "__main__":
    main()
