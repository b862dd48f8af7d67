"""Checkpoints: tensors in safetensors, the rest in JSON, written so that a crash at any moment leaves the last one whole."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch

from .tensors import Tensors


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read."""


def write_atomic(path: Path, data: bytes) -> None:
    """Write beside, flush to the disk, rename: ``path`` has the old content or the new, never a part.

    Raises:
        CheckpointError: a full disk or a folder that cannot be written; what was there stays.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {path.name}: {error.strerror or error}; what was saved before is untouched") from error


def tensor_bytes(tensors: Tensors) -> bytes:
    """safetensors of contiguous copies."""
    return safetensors.torch.save({n: t.detach().contiguous().clone() for n, t in tensors.items()})


def read_tensors(data: bytes, name: str) -> Tensors:
    """Tensors from safetensors bytes.

    Raises:
        CheckpointError: for bytes that are not.
    """
    try:
        return safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{name} is not a readable safetensors file: {error}") from error


def save(folder: Path, round: int, tensors: Tensors, meta: Mapping[str, Any], keep: int = 2) -> Path:
    """Write ``folder/round-00008``, and drop all but the newest ``keep``.

    Raises:
        CheckpointError: when it cannot be written; older checkpoints stay.
    """
    target = folder / f"round-{round:05d}"
    building = folder / f".round-{round:05d}.tmp"
    data = tensor_bytes(tensors)
    document = json.dumps({"round": round, "sha256": hashlib.sha256(data).hexdigest(), "meta": dict(meta)}, indent=1)
    try:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        write_atomic(building / "state.safetensors", data)
        write_atomic(building / "state.json", document.encode())
        shutil.rmtree(target, ignore_errors=True)
        os.replace(building, target)
    except (OSError, CheckpointError) as error:
        shutil.rmtree(building, ignore_errors=True)
        raise CheckpointError(f"checkpoint of round {round} not written: {error}; older ones are untouched") from error
    for old in sorted(folder.glob("round-*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def load(folder: Path) -> tuple[int, Tensors, dict[str, Any]]:
    """(round, tensors, meta) of one checkpoint.

    Raises:
        CheckpointError: truncated, damaged or incomplete.
    """
    try:
        document = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        data = (folder / "state.safetensors").read_bytes()
        round, expected, meta = int(document["round"]), str(document["sha256"]), dict(document["meta"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {folder.name} is incomplete: {error}") from error
    if hashlib.sha256(data).hexdigest() != expected:
        raise CheckpointError(f"checkpoint {folder.name} is damaged: {len(data)} bytes whose checksum does not match (truncated?)")
    return round, read_tensors(data, folder.name), meta


def latest(folder: Path) -> tuple[tuple[int, Tensors, dict[str, Any]] | None, list[str]]:
    """The newest readable checkpoint, or None, and what was wrong with newer ones."""
    problems: list[str] = []
    for candidate in sorted(folder.glob("round-*"), reverse=True):
        try:
            return load(candidate), problems
        except CheckpointError as error:
            problems.append(str(error))
    return None, problems
