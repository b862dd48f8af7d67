"""Signed messages between the coordinator of a federation and its sites.

A message is a head (JSON, at most one MiB), a signature and a body (one packed payload, see `core.wire`).  The signature covers head and
body; it is checked before anything of either is parsed.  The head names federation, run, round, client and a nonce, so that no
message counts twice or elsewhere.  Keys are those that Flower's nodes have: ECDSA on P-384, in OpenSSH's format.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ..core.wire import Schema

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey
HEAD_BYTES = 1 << 20
_PREFIX, _MAGIC, _VERSION = b"isthmus message 1\n", b"ISTM", 1
_FRAME = struct.Struct("<4sBBHIQ")
_DTYPES = {str(d).removeprefix("torch."): d for d in (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
)}  # fmt: skip


class Refused(ValueError):
    """A message that is not accepted; says why."""


def new_key() -> PrivateKey:
    """A fresh signing key."""
    return ec.generate_private_key(ec.SECP384R1())


def private_bytes(key: PrivateKey) -> bytes:
    """OpenSSH PEM, not encrypted: protect the file."""
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())


def public_text(key: PrivateKey | PublicKey) -> str:
    """One line, as in an ``authorized_keys`` file."""
    public = key.public_key() if isinstance(key, PrivateKey) else key
    return public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def read_private(path: Path) -> PrivateKey:
    """The key in a file.

    Raises:
        Refused: unreadable, or no ECDSA key.
    """
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise Refused(f"{path.name}: not a readable private key: {error}") from None
    if not isinstance(key, PrivateKey):
        raise Refused(f"{path.name}: must be an ECDSA key")
    return key


def read_public(text: str) -> PublicKey:
    """The key of one line.

    Raises:
        Refused: no ECDSA key.
    """
    try:
        key = serialization.load_ssh_public_key(text.strip().encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise Refused(f"not a public key: {error}") from None
    if not isinstance(key, PublicKey):
        raise Refused("public key: must be an ECDSA key")
    return key


def _signed(head: bytes, body: bytes) -> bytes:
    return _PREFIX + hashlib.sha256(head).digest() + hashlib.sha256(body).digest()


def seal(head: dict[str, Any], body: bytes, key: PrivateKey) -> bytes:
    """One message."""
    text = json.dumps(head, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > HEAD_BYTES:
        raise Refused(f"head of {len(text)} bytes; at most {HEAD_BYTES}")
    signature = key.sign(_signed(text, body), ec.ECDSA(hashes.SHA256()))
    return _FRAME.pack(_MAGIC, _VERSION, 0, len(signature), len(text), len(body)) + text + signature + body


def unseal(data: bytes, key: PublicKey, largest: int) -> tuple[dict[str, Any], bytes]:
    """Head and body of a message that ``key`` signed, of at most ``largest`` bytes of body.

    Raises:
        Refused: naming what is wrong: truncated, oversized, not signed by that key, a head that is no flat JSON object.
    """
    if len(data) < _FRAME.size:
        raise Refused(f"truncated message: {len(data)} bytes")
    magic, version, pad, signature_length, head_length, body_length = _FRAME.unpack_from(data)
    if magic != _MAGIC or pad:
        raise Refused("not an Isthmus message: the first bytes are wrong")
    if version != _VERSION:
        raise Refused(f"message format version {version}; this release reads version {_VERSION}")
    if head_length > HEAD_BYTES or body_length > largest:
        raise Refused(f"oversized message: head {head_length}, body {body_length} bytes; at most {HEAD_BYTES} and {largest}")
    if len(data) != _FRAME.size + head_length + signature_length + body_length:
        raise Refused(f"message of {len(data)} bytes says that it has {_FRAME.size + head_length + signature_length + body_length}")
    at = _FRAME.size
    head, signature = data[at : at + head_length], data[at + head_length : at + head_length + signature_length]
    body = data[at + head_length + signature_length :]
    try:
        key.verify(signature, _signed(head, body), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise Refused("signature: not made by the expected key over this message") from None
    return read_head(head), body


def read_head(text: bytes) -> dict[str, Any]:
    """A JSON object without doubled keys or non-finite numbers.

    Raises:
        Refused: otherwise.
    """

    def no_doubles(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        names = [n for n, _ in pairs]
        if len(names) != len(set(names)):
            raise ValueError("a key stands twice")
        return dict(pairs)

    def no_constants(name: str) -> Any:
        raise ValueError(f"{name} is not a number")

    try:
        head = json.loads(text.decode("utf-8"), object_pairs_hook=no_doubles, parse_constant=no_constants)
    except (ValueError, RecursionError) as error:
        raise Refused(f"head: {error}") from None
    if not isinstance(head, dict):
        raise Refused("head: not an object")
    return head


def get(head: dict[str, Any], name: str, kind: type, default: Any = ...) -> Any:
    """A field of a head, of exactly this type (a whole number also passes for a float).

    Raises:
        Refused: missing, or of another type.
    """
    if name not in head:
        if default is ...:
            raise Refused(f"head: {name} is missing")
        return default
    value = head[name]
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < 1 << 53 else float("inf")
    if type(value) is not kind:
        raise Refused(f"head: {name} = {str(value)[:40]!r}: must be {kind.__name__}")
    return value


def schema_table(of: Schema) -> list[list[Any]]:
    """A schema for a head."""
    return [[n, str(d).removeprefix("torch."), list(s)] for n, (d, s) in of.items()]


def read_schema(table: list[Any]) -> Schema:
    """The inverse of `schema_table`, for a table from elsewhere.

    Raises:
        Refused: entries that are no name, known dtype and shape of whole numbers from 0 on.
    """
    out: Schema = {}
    for row in table:
        if not (isinstance(row, list) and len(row) == 3 and isinstance(row[0], str) and len(row[0]) <= 500):
            raise Refused("schema: an entry is not [name, dtype, shape]")
        name, dtype, shape = row
        if name in out or not isinstance(dtype, str) or dtype not in _DTYPES:
            raise Refused(f"schema: {name[:60]!r} stands twice, or has an unknown dtype")
        if not isinstance(shape, list) or len(shape) > 8 or not all(type(x) is int and 0 <= x < 1 << 40 for x in shape):
            raise Refused(f"schema: {name[:60]!r} has no shape of whole numbers")
        out[name] = (_DTYPES[dtype], tuple(shape))
    return out
