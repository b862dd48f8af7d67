"""Named tensors: the one data structure that everything else is made of.

A ``Tensors`` is a flat ``dict[str, Tensor]``, keyed like ``"layers.0.value.lora_b"``.  Flat and named on purpose: it is what
safetensors stores, what ``functional_call`` takes, what ``vmap`` maps over and what a message carries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether ``name`` fits any of the shell-style patterns."""
    return any(fnmatchcase(name, p) for p in patterns)


def tmap(fn: Callable[..., Tensor], *trees: Tensors) -> Tensors:
    """Apply ``fn`` name by name over the names of the first tree."""
    return {name: fn(*(t[name] for t in trees)) for name in trees[0]}


def under(tree: Tensors, prefix: str) -> Tensors:
    """The entries below ``prefix``, without it: ``under(memory, "kept/")``."""
    return {n[len(prefix) :]: t for n, t in tree.items() if n.startswith(prefix)}


def prefixed(tree: Tensors, prefix: str) -> Tensors:
    """The same entries, each name behind ``prefix``."""
    return {prefix + n: t for n, t in tree.items()}


def stack(trees: list[Tensors]) -> Tensors:
    """K trees to one with a leading client axis: each entry ``(K, *shape)``."""
    return {n: torch.stack([t[n] for t in trees]) for n in trees[0]}


def select(tree: Tensors, index: Tensor | int) -> Tensors:
    """Rows ``index`` of the leading axis of every entry."""
    return {n: t[index] for n, t in tree.items()}


def nbytes(tree: Tensors) -> int:
    """Bytes of the raw values."""
    return sum(t.numel() * t.element_size() for t in tree.values())


def expand_to(values: Tensor, like: Tensor) -> Tensor:
    """``values (K,)`` with trailing axes of one, so that it broadcasts against ``like (K, ...)``."""
    return values.reshape(values.shape + (1,) * (like.dim() - values.dim()))
