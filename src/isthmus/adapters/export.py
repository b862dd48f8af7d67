"""Adapters in peft's format: what a client takes home, and how it comes back.

The folder loads with peft alone: ``PeftModel.from_pretrained(base_model(folder), folder)`` gives a module whose output are the
logits of training, in fp32.  Layers that several roles share (fused projections) and merged bases become one LoRA of a larger rank
each, exactly.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.checkpoint import tensor_bytes, write_atomic
from ..core.tensors import Tensors
from .families import Site
from .host import Host
from .lora import Lora
from .prompt import Prompts

_FILE, _HEAD = "isthmus.json", "head.safetensors"


class ExportError(ValueError):
    """An adapter that cannot be written in peft's format, or a folder that is none."""


class SequenceClassifier(nn.Module):
    """An encoder, pooling and a linear head: what a federation of text classification trains."""

    def __init__(self, encoder: nn.Module, labels: int, pooling: str) -> None:
        super().__init__()
        self.encoder, self.pooling = encoder, pooling
        self.config = encoder.config
        self.head = nn.Linear(int(encoder.config.hidden_size), labels)  # type: ignore[union-attr, arg-type]

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
        """ids and mask (R, L) to logits (R, labels)."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        if self.pooling == "mean":
            weight = attention_mask.to(hidden.dtype)
            pooled = torch.bmm(weight[:, None], hidden)[:, 0] / attention_mask.sum(1, keepdim=True)
        else:
            at = attention_mask.sum(1) - 1 if self.pooling == "last" else torch.zeros(len(hidden), dtype=torch.long)
            pooled = hidden[torch.arange(len(hidden)), at]
        return self.head(pooled)


def _module_factors(here: list[tuple[Site, Lora]], params: Tensors, out_features: int) -> tuple[Tensor, Tensor]:
    """One (A, B) for a module, in units of B A: its sites' factors and bypasses side by side, a merged base by its SVD."""
    rows_a, columns_b = [], []
    for site, _ in here:
        a, b = params[f"{site.name}.lora_a"], params[f"{site.name}.lora_b"]
        if f"{site.name}.delta" in params:
            u, s, vh = torch.linalg.svd(params[f"{site.name}.delta"].double(), full_matrices=False)
            keep = int((s > s[0] * 1e-9).sum()) if float(s[0]) else 0
            a = torch.cat([a, (s[:keep].sqrt()[:, None] * vh[:keep]).to(a.dtype)])
            b = torch.cat([b, (u[:, :keep] * s[:keep].sqrt()).to(b.dtype)], 1)
        if f"{site.name}.bypass_b" in params:
            a, b = torch.cat([a, params[f"{site.name}.bypass_a"]]), torch.cat([b, params[f"{site.name}.bypass_b"]], 1)
        if site.rows is not None:
            whole = b.new_zeros(out_features, b.shape[1])
            whole[site.rows] = b
            b = whole
        rows_a.append(a)
        columns_b.append(b)
    return torch.cat(rows_a), torch.cat(columns_b, 1)


def save(folder: Path, host: Host, params: Tensors, about: dict[str, Any]) -> Path:
    """Write ``adapter_config.json``, ``adapter_model.safetensors`` and ``isthmus.json`` for one model's tensors.

    Args:
        folder: is created.
        host: the model that the tensors belong to.
        params: without a client axis.
        about: ``base_model``, ``task``, ``pooling``, ``labels``, ``max_length``; kept beside the adapter.

    Raises:
        ExportError: for adapters that are no LoRA.
    """
    if not all(isinstance(adapter, Lora) for _, adapter in host.sites):
        raise ExportError("only LoRA adapters have a peft format; isthmus export --merge writes the whole model")
    prefix = "base_model.model." + ("encoder." if about["task"] == "classification" else _inner(host))
    by_path: dict[str, list[tuple[Site, Lora]]] = {}
    for site, adapter in host.sites:
        by_path.setdefault(site.path, []).append((site, adapter))  # type: ignore[arg-type]
    tensors: Tensors = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for path, here in by_path.items():
        base: Any = host.base.get_submodule(path).base  # type: ignore[union-attr]
        a, b = _module_factors(here, params, int(base.weight.shape[0]))  # type: ignore[union-attr, arg-type]
        tensors |= {f"{prefix}{path}.lora_A.weight": a, f"{prefix}{path}.lora_B.weight": b}
        ranks[path], alphas[path] = a.shape[0], here[0][1].scale * a.shape[0]
    if "head.weight" in params:
        tensors |= {f"base_model.model.head.{n}": params[f"head.{n}"] for n in ("weight", "bias")}
    first = next(iter(ranks))
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": about["base_model"],
        "task_type": None if about["task"] == "classification" else "CAUSAL_LM",
        "inference_mode": True,
        "r": ranks[first],
        "lora_alpha": alphas[first],
        "rank_pattern": {p: r for p, r in ranks.items() if r != ranks[first]},
        "alpha_pattern": {p: x for p, x in alphas.items() if x != alphas[first]},
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": host.sites[0][0].transposed,
        "target_modules": sorted(by_path),
        "modules_to_save": ["head"] if "head.weight" in params else None,
    }
    write_atomic(folder / "adapter_model.safetensors", tensor_bytes(tensors))
    write_atomic(folder / "adapter_config.json", json.dumps(config, indent=1).encode())
    write_atomic(folder / _FILE, json.dumps(about, indent=1).encode())
    return folder


@torch.no_grad()
def merge(folder: Path, host: Host, params: Tensors, about: dict[str, Any]) -> Path:
    """Write the adapted model itself: the pretrained one with the update in its own weights and biases, and nothing beside them.

    The folder loads with ``transformers`` (``AutoModel.from_pretrained``); a classifier's head lies beside it in ``head.safetensors``.

    Raises:
        ExportError: for a bias where the pretrained module has none, and for prompts.
    """
    from ..tasks.build import load_pretrained

    if any(isinstance(adapter, Prompts) for _, adapter in host.sites):
        raise ExportError("prompts are tokens, no part of a model's weights: there is nothing to merge")
    net, tokenizer = load_pretrained(about["base_model"], causal=about["task"] == "language")
    base = getattr(net, "base_model", net)
    for site, adapter in host.sites:
        module: Any = base.get_submodule(site.path)
        mine = {n.removeprefix(f"{site.name}."): t for n, t in params.items() if n.startswith(f"{site.name}.")}
        rows = slice(None) if site.rows is None else site.rows
        if isinstance(adapter, Lora):
            change = adapter.weight(mine)
            if site.transposed:
                module.weight[:, rows] += change.T
            else:
                module.weight[rows] += change
        elif module.bias is None:
            raise ExportError(f"{site.path} has no bias to merge into; export the adapter instead, or run without adapter.add_bias")
        else:
            module.bias[rows] += mine["bias"]
    folder.mkdir(parents=True, exist_ok=True)
    net.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
    if "head.weight" in params:
        write_atomic(folder / _HEAD, tensor_bytes({n: params[f"head.{n}"] for n in ("weight", "bias")}))
    write_atomic(folder / _FILE, json.dumps(about | {"merged": True}, indent=1).encode())
    return folder


def _inner(host: Host) -> str:
    """Path from a causal model to its base, with a dot."""
    name = getattr(host.net, "base_model_prefix", "")
    return f"{name}." if host.base is not host.net and name else ""


def about(folder: Path) -> dict[str, Any]:
    """What is written beside an exported adapter.

    Raises:
        ExportError: no such file.
    """
    try:
        return dict(json.loads((folder / _FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ExportError(f"{folder} is not an adapter that Isthmus exported: {error}") from None


def base_model(folder: str | Path) -> nn.Module:
    """The module that an exported adapter belongs on: pass it to ``peft.PeftModel.from_pretrained``."""
    from ..tasks.build import load_pretrained

    what = about(Path(folder))
    net, _ = load_pretrained(what["base_model"], causal=what["task"] == "language")
    return SequenceClassifier(net, len(what["labels"]), what["pooling"]) if what["task"] == "classification" else net


def load(folder: str | Path) -> tuple[nn.Module, Any, dict[str, Any]]:
    """(adapted model in fp32, tokenizer, what it is) from an exported adapter, through peft, or from a merged model."""
    from peft import PeftModel

    from ..tasks.build import load_pretrained

    what = about(Path(folder))
    if what.get("merged"):
        from safetensors.torch import load_file

        net, tokenizer = load_pretrained(str(folder), causal=what["task"] == "language")
        if what["task"] != "classification":
            return net.eval(), tokenizer, what
        whole = SequenceClassifier(net, len(what["labels"]), what["pooling"])
        whole.head.load_state_dict(load_file(Path(folder) / _HEAD))
        return whole.eval(), tokenizer, what
    _, tokenizer = load_pretrained(what["base_model"], causal=what["task"] == "language")
    model = PeftModel.from_pretrained(base_model(folder), str(folder))  # type: ignore[arg-type]
    return model.eval(), tokenizer, what


@torch.no_grad()
def classify(folder: str | Path, texts: list[str]) -> list[tuple[str, float]]:
    """(label, probability) of each text, by an exported classifier."""
    model, tokenizer, what = load(folder)
    tokens = tokenizer(texts, truncation=True, max_length=what["max_length"], padding=True, return_tensors="pt")
    chance = F.softmax(model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]), -1)
    return [(what["labels"][int(i)], float(p)) for p, i in zip(*chance.max(-1), strict=True)]
