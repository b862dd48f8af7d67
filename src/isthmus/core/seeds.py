"""Random numbers named by what they are for: (seed, round, client, purpose) instead of a stream that somebody may have advanced.

``generator`` gives an ordinary torch generator for host-side draws (who takes part, the order of examples, initial values).
``key`` and ``normal`` are counter-based and made of tensor operations, so they give the same numbers for one client alone, for all
clients under ``vmap``, and in another process.  They are predictable to whoever knows the seed: a privacy promise needs noise
from the operating system instead (`parts.channels.privacy`).
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed from its parts; the same parts give the same seed on every machine."""
    text = "\x1f".join(f"{type(p).__name__}:{p}" for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A generator of its own for these parts: ``generator(seed, round, client, "order")``."""
    return torch.Generator().manual_seed(seed_of(*parts))


def _mix(x: Tensor) -> Tensor:
    """32-bit avalanche (lowbias32), held in int64 so that it is exact under ``vmap``."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def key(*parts: int | str | Tensor) -> Tensor:
    """Fold parts into a scalar int64 key in ``[0, 2**32)``; a part may be a tensor under ``vmap`` (a client's number)."""
    k = torch.tensor(0x9E3779B9)
    for p in parts:
        value = zlib.crc32(p.encode()) if isinstance(p, str) else p
        k = _mix((k ^ value) & _MASK)
    return k


def uniform(k: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Numbers in (0, 1) of ``shape`` for the key ``k``."""
    index = torch.arange(math.prod(shape)).reshape(shape)
    return ((_mix(_mix((index + k) & _MASK) ^ k).double() + 0.5) / 2**32).float()


def normal(k: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Standard normal numbers of ``shape`` for the key ``k`` (Box-Muller)."""
    u, v = uniform(_mix(k ^ 1), shape), uniform(_mix(k ^ 2), shape)
    return torch.sqrt(-2 * torch.log(u)) * torch.cos(2 * math.pi * v)


def system_normal(shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Standard normal numbers from the operating system's secure source (Box-Muller in fp64, then fp32); never the same twice."""
    count = math.prod(shape)
    words = torch.frombuffer(bytearray(os.urandom(16 * max(1, count))), dtype=torch.int64)
    u = ((words >> 11 & ((1 << 53) - 1)).double() + 0.5) / 2.0**53
    x = torch.sqrt(-2 * torch.log(u[0::2])) * torch.cos(2 * math.pi * u[1::2])
    return x[:count].float().reshape(shape)


_GLOBAL = threading.RLock()


@contextmanager
def globally(seed: int) -> Iterator[None]:
    """torch's global generator seeded for the block and put back after it, for code that knows no other; one thread at a time."""
    with _GLOBAL, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
