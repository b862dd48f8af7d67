"""One payload, one byte array.

Both sides know what a payload must look like (its ``Schema``: names, dtypes and shapes follow from the method, the task and the
round), so only a checksum, a fingerprint of the schema and the raw values travel.  Nothing that arrives is parsed as structure,
and nothing is unpickled: bytes that do not have exactly the expected length, fingerprint and checksum are refused.
"""

from __future__ import annotations

import hashlib
import math
import struct
import zlib

import torch

from .tensors import Tensors, nbytes

Schema = dict[str, tuple[torch.dtype, tuple[int, ...]]]
_MAGIC, _VERSION = b"ISTH", 1
_HEADER = struct.Struct("<4sB3sI8sI")
HEADER_BYTES = _HEADER.size


class WireError(ValueError):
    """Bytes that are not the payload that was expected."""


def schema(payload: Tensors) -> Schema:
    """Names, dtypes and shapes of a payload."""
    return {n: (t.dtype, tuple(t.shape)) for n, t in payload.items()}


def _fingerprint(of: Schema) -> bytes:
    text = "\n".join(f"{n} {d} {s}" for n, (d, s) in sorted(of.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def size(payload: Tensors) -> tuple[int, int]:
    """(payload, wire) bytes: the raw values, and the packed array with its header; nothing to say is no message."""
    return nbytes(payload), nbytes(payload) + HEADER_BYTES if payload else 0


def schema_size(of: Schema) -> tuple[int, int]:
    """(payload, wire) bytes of a payload with this schema."""
    raw = sum(d.itemsize * math.prod(s) for d, s in of.values())
    return raw, raw + HEADER_BYTES if of else 0


def pack(payload: Tensors) -> bytes:
    """Raw values in the order of their names, behind a fixed header."""
    ordered = (payload[n].detach().contiguous().reshape(-1) for n in sorted(payload))
    body = b"".join(t.view(torch.uint8).numpy().tobytes() for t in ordered)
    return _HEADER.pack(_MAGIC, _VERSION, bytes(3), len(body), _fingerprint(schema(payload)), zlib.crc32(body)) + body


def unpack(data: bytes, expected: Schema) -> Tensors:
    """The tensors of ``data``, which must have exactly the ``expected`` schema.

    Raises:
        WireError: naming what is wrong: truncated, oversized, corrupted, another schema, another version.
    """
    if len(data) < HEADER_BYTES:
        raise WireError(f"truncated payload: {len(data)} bytes, the header alone has {HEADER_BYTES}")
    magic, version, pad, length, print_, checksum = _HEADER.unpack_from(data)
    if magic != _MAGIC or any(pad):
        raise WireError("not an Isthmus payload: the first bytes are wrong")
    if version != _VERSION:
        raise WireError(f"payload format version {version}; this release reads version {_VERSION}")
    if print_ != _fingerprint(expected):
        raise WireError("payload of another schema: names, dtypes or shapes differ from what this round asks for")
    wanted = schema_size(expected)[0]
    if len(data) - HEADER_BYTES != wanted or length != wanted:
        kind = "truncated" if len(data) - HEADER_BYTES < wanted else "oversized"
        raise WireError(f"{kind} payload: {len(data) - HEADER_BYTES} bytes of values, expected {wanted}")
    body = memoryview(data)[HEADER_BYTES:]
    if zlib.crc32(body) != checksum:
        raise WireError("corrupted payload: the checksum does not match")
    out, at = {}, 0
    for n in sorted(expected):
        dtype, shape = expected[n]
        count = math.prod(shape) * dtype.itemsize
        raw = torch.frombuffer(bytearray(body[at : at + count]), dtype=torch.uint8) if count else torch.empty(0, dtype=torch.uint8)
        out[n] = raw.view(dtype).reshape(shape)
        at += count
    return out


def trim(payload: Tensors, to: Schema) -> Tensors:
    """Cut each tensor to the leading corner that ``to`` names: what a client of a smaller rank really sends."""
    return {n: t[tuple(slice(0, s) for s in to[n][1])] for n, t in payload.items()}


def pad(payload: Tensors, to: Schema) -> Tensors:
    """The inverse of `trim`: zeros behind the leading corner, up to the shapes of ``to``."""
    out = {}
    for n, t in payload.items():
        out[n] = t.new_zeros(to[n][1])
        out[n][tuple(slice(0, s) for s in t.shape)] = t
    return out
