"""The same federated round in other frameworks: a plain loop with peft, Flower's simulation, pfl-research.

Each contestant is given its data once, keeps its model between calls, and returns the seconds of every round without its start.
This module is imported by Flower's worker processes, so it must stay importable by name.
"""

from __future__ import annotations

import time
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

RANK = 8


# MiniLM with LoRA


class LoraClassifier(nn.Module):
    """MiniLM with peft's LoRA on query and value of ``layers``, mean pooling and a linear head."""

    def __init__(self, layers: tuple[int, ...], labels: int) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model

        from isthmus.tasks.build import load_pretrained

        encoder, _ = load_pretrained("minilm", causal=False)
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["query", "value"], layers_to_transform=list(layers))
        self.encoder = get_peft_model(encoder.eval(), config)
        self.head = nn.Linear(384, labels)
        self.names = [n for n, p in self.named_parameters() if p.requires_grad]

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.head(pooled)

    def trainable(self) -> dict[str, Tensor]:
        own = dict(self.named_parameters())
        return {n: own[n] for n in self.names}


def theirs(name: str) -> str:
    """Our name of a tensor to peft's."""
    if name.startswith("head."):
        return name
    _, layer, role, factor = name.split(".")
    return f"encoder.base_model.model.encoder.layer.{layer}.attention.self.{role}.lora_{factor[-1].upper()}.default.weight"


@lru_cache(maxsize=2)
def classifier(layers: tuple[int, ...], labels: int) -> LoraClassifier:
    """One model a process."""
    return LoraClassifier(layers, labels)


def train_lora(model: LoraClassifier, start: dict[str, Tensor], ids: Tensor, mask: Tensor, y: Tensor, lr: float) -> dict[str, Tensor]:
    """Steps of SGD over batches ids (S, B, L), y (S, B); returns the delta."""
    own = model.trainable()
    with torch.no_grad():
        for n, t in start.items():
            own[n].copy_(t)
    optimiser = torch.optim.SGD(list(own.values()), lr=lr)
    for i in range(len(ids)):
        optimiser.zero_grad()
        F.cross_entropy(model(ids[i], mask[i]), y[i]).backward()
        optimiser.step()
    return {n: (own[n].detach() - start[n]).clone() for n in start}


def peft_loop(work: dict, rounds: int) -> tuple[list[float], dict[str, Tensor]]:
    """A plain loop over clients in this process."""
    model, shared, seconds = classifier(work["layers"], work["labels"]), dict(work["start"]), []
    for _ in range(rounds):
        began = time.perf_counter()
        total = {n: torch.zeros_like(t) for n, t in shared.items()}
        for k in range(work["clients"]):
            delta = train_lora(model, shared, work["ids"][k], work["mask"][k], work["y"][k], work["lr"])
            for n, d in delta.items():
                total[n] += d / work["clients"]
        shared = {n: t + total[n] for n, t in shared.items()}
        seconds.append(time.perf_counter() - began)
    return seconds, shared


# A small network: 64 - 128 - 10


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


@lru_cache(maxsize=1)
def kept_small_net() -> nn.Module:
    """One model a process."""
    return small_net()


def train_small(net: nn.Module, start: list[Tensor], x: Tensor, y: Tensor, lr: float) -> list[Tensor]:
    """Steps of SGD over batches x (S, B, 64), y (S, B); returns the weights after."""
    with torch.no_grad():
        for p, t in zip(net.parameters(), start, strict=True):
            p.copy_(t)
    optimiser = torch.optim.SGD(net.parameters(), lr=lr)
    for i in range(len(x)):
        optimiser.zero_grad()
        F.cross_entropy(net(x[i]), y[i]).backward()
        optimiser.step()
    return [p.detach().clone() for p in net.parameters()]


def small_loop(work: dict, rounds: int) -> list[float]:
    """A plain loop over clients in this process."""
    net, shared, seconds = kept_small_net(), list(work["start"]), []
    for _ in range(rounds):
        began = time.perf_counter()
        total = [torch.zeros_like(t) for t in shared]
        for k in range(work["clients"]):
            for t, w in zip(total, train_small(net, shared, work["x"][k], work["y"][k], work["lr"]), strict=True):
                t += w / work["clients"]
        shared = total
        seconds.append(time.perf_counter() - began)
    return seconds


def small_pfl(work: dict, rounds: int) -> list[float]:
    """pfl-research's simulated backend with its own FedAvg."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_net()

        def loss(self, x, y, eval=False):
            return F.cross_entropy(self.net(torch.as_tensor(x)), torch.as_tensor(y))

        def metrics(self, x, y, eval=False):
            return {}

    class Clock(TrainingProcessCallback):
        def __init__(self) -> None:
            self.at = [time.perf_counter()]

        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            self.at.append(time.perf_counter())
            return False, Metrics()

    users = {str(k): [work["x"][k].flatten(0, 1), work["y"][k].flatten()] for k in range(work["clients"])}
    data = FederatedDataset(lambda user: Dataset(raw_data=users[user], user_id=user), get_user_sampler("minimize_reuse", list(users)))
    model = PyTorchModel(Net(), local_optimizer_create=torch.optim.SGD, central_optimizer=None)
    model._central_optimizer = torch.optim.SGD(model.pytorch_model.parameters(), lr=1.0)
    params = NNAlgorithmParams(rounds, rounds + 1, work["clients"], None)
    local = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work["lr"], local_batch_size=work["x"].shape[2])
    clock = Clock()
    FederatedAveraging().run(
        algorithm_params=params,
        backend=SimulatedBackend(training_data=data, val_data=None),
        model=model,
        model_train_params=local,
        model_eval_params=None,
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    return np.diff(clock.at).tolist()


# Flower's simulation, for both


def flower(work: dict, rounds: int, kind: str) -> list[float]:
    """Flower's simulation runtime (Ray, one actor a core, model kept in the worker between calls)."""
    import os

    from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    os.environ["RAY_DEDUP_LOGS"] = "0"
    torch.save(work, work["path"])  # what an organisation would read from its own disk; the benchmark wrote it itself
    path, seconds = work["path"], []
    client, server = ClientApp(), ServerApp()

    @client.train()
    def train(message, context):
        import peers

        data = peers.worker_data(path)
        k = int(message.content["config"]["client"])
        shared = message.content["shared"].to_torch_state_dict()
        if kind == "minilm":
            model = peers.classifier(data["layers"], data["labels"])
            out = peers.train_lora(model, shared, data["ids"][k], data["mask"][k], data["y"][k], data["lr"])
        else:
            weights = peers.train_small(peers.kept_small_net(), list(shared.values()), data["x"][k], data["y"][k], data["lr"])
            out = dict(zip(shared, weights, strict=True))
        return Message(content=RecordDict({"update": ArrayRecord(out), "metrics": MetricRecord({"n": 1})}), reply_to=message)

    @server.main()
    def main(grid, context):
        while len(list(grid.get_node_ids())) < work["clients"]:
            time.sleep(0.1)
        nodes = list(grid.get_node_ids())
        shared = dict(work["start"]) if kind == "minilm" else {str(i): t for i, t in enumerate(work["start"])}
        for _ in range(rounds + 1):  # the first round starts the workers and is not counted
            began = time.perf_counter()
            record = ArrayRecord(shared)
            messages = [
                Message(
                    content=RecordDict({"shared": record, "config": ConfigRecord({"client": k})}), message_type="train", dst_node_id=node
                )
                for k, node in enumerate(nodes[: work["clients"]])
            ]
            replies = list(grid.send_and_receive(messages))
            if failed := [r for r in replies if r.has_error()]:
                raise RuntimeError(f"Flower: {len(failed)} clients failed: {failed[0].error}")
            got = [r.content["update"].to_torch_state_dict() for r in replies]
            mean = {n: torch.stack([g[n] for g in got]).mean(0) for n in shared}
            shared = {n: shared[n] + mean[n] for n in shared} if kind == "minilm" else mean
            seconds.append(time.perf_counter() - began)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=work["clients"], backend_config=resources)
    return seconds[1:]


@lru_cache(maxsize=1)
def worker_data(path: str) -> dict:
    """The benchmark's own file, read once in each worker."""
    torch.set_num_threads(1)
    return torch.load(path, weights_only=True)
