"""Secure aggregation: the coordinator learns the sum of its clients' vectors and nothing else (Bonawitz et al., CCS 2017).

Every client u has two X25519 key pairs for one round: ``c`` to encrypt shares to others, ``s`` to agree on masks with them.  It sends

    y_u = x_u + PRG(b_u) + sum_{v > u} PRG(s_uv) - sum_{v < u} PRG(s_uv)    in Z_2^64,

with a seed b_u of its own.  Shamir shares of b_u and of its secret s key lie with the others, so that after dropouts the coordinator can ask
for b_u of those who answered, and for the s key of those who did not, never for both of one client.  A client tells either kind of share
once a round.  With a threshold above two thirds of the clients a coordinator that tells different clients different lists still cannot
gather enough shares of both kinds.  Shares come from pycryptodome, the rest from cryptography; here is only how they fit together.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from .messages import Refused

SHARE = 64  # bytes: two halves of a 32-byte secret, of each of two secrets


def threshold_of(clients: int) -> int:
    """Shares that reconstruct a secret: more than two thirds."""
    return 2 * clients // 3 + 1


def keystream(seed: bytes, count: int) -> np.ndarray:
    """``count`` numbers uniform in Z_2^64 from a 32-byte seed (ChaCha20)."""
    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor().update(bytes(8 * count))
    return np.frombuffer(stream, dtype="<u8")


def agree(secret: X25519PrivateKey, public: bytes, context: bytes) -> bytes:
    """A 32-byte key that both sides derive.

    Raises:
        Refused: a public key of low order.
    """
    try:
        shared = secret.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise Refused(f"public key: {error}") from None
    return HKDF(hashes.SHA256(), 32, None, b"isthmus secure sum " + context).derive(shared)


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """A 32-byte secret to ``count`` shares of 32 bytes; share i belongs to index i + 1."""
    from Crypto.Protocol.SecretSharing import Shamir

    halves = [dict(Shamir.split(threshold, count, secret[i : i + 16], ssss=False)) for i in (0, 16)]
    return [halves[0][i + 1] + halves[1][i + 1] for i in range(count)]


def join(shares: Mapping[int, bytes]) -> bytes:
    """The secret from enough shares by index."""
    from Crypto.Protocol.SecretSharing import Shamir

    return b"".join(Shamir.combine([(i, s[at : at + 16]) for i, s in shares.items()], ssss=False) for at in (0, 16))


def pairwise(me: int, others: Mapping[int, bytes], secret: X25519PrivateKey, context: bytes, count: int) -> np.ndarray:
    """sum_{v > me} PRG(s_uv) - sum_{v < me} PRG(s_uv), over the public keys of ``others``."""
    total = np.zeros(count, dtype=np.uint64)
    for v, public in others.items():
        stream = keystream(agree(secret, public, context + b" mask"), count)
        total = total + stream if v > me else total - stream
    return total


@dataclass
class Secrets:
    """One client's secrets of one round; they are never written anywhere.

    Args:
        me: its number.
        context: names federation, run and round; masks and encryption depend on it.
        fewest: participants that it insists on.
    """

    me: int
    context: bytes
    fewest: int = 3
    _c: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)
    _s: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)
    _b: bytes = field(default_factory=lambda: os.urandom(32), repr=False)
    _keys: dict[int, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)
    _shares: dict[int, bytes] = field(default_factory=dict, repr=False)
    _told: str = ""
    _spent: bool = False
    threshold: int = 0

    @property
    def public(self) -> tuple[bytes, bytes]:
        """Public halves of ``c`` and ``s``."""
        return self._c.public_key().public_bytes_raw(), self._s.public_key().public_bytes_raw()

    def _pair(self, v: int) -> bytes:
        low, high = sorted((self.me, v))
        return self.context + f" share {low} {high}".encode()

    def deal(self, keys: Mapping[int, tuple[bytes, bytes]], threshold: int) -> dict[int, bytes]:
        """Encrypted shares for every other participant, from everybody's public keys.

        Raises:
            Refused: too few participants, a doubtful threshold, keys that are not distinct, its own keys changed, a second call.
        """
        if self._keys:
            raise Refused("secure sum: shares were dealt already in this round")
        if len(keys) < self.fewest:
            raise Refused(f"secure sum: {len(keys)} participants; this site insists on {self.fewest}")
        if not len(keys) // 2 < threshold <= len(keys):
            raise Refused(f"secure sum: threshold {threshold} of {len(keys)}; it must be more than half")
        if keys.get(self.me) != self.public or len({k for pair in keys.values() for k in pair}) < 2 * len(keys):
            raise Refused("secure sum: the list of keys does not hold this site's own, or holds one twice")
        self._keys, self.threshold = dict(keys), threshold
        order = sorted(keys)
        b, s = split(self._b, threshold, len(keys)), split(self._s.private_bytes_raw(), threshold, len(keys))
        out = {}
        for i, v in enumerate(order):
            if v == self.me:
                self._shares[v] = b[i] + s[i]
                continue
            nonce = os.urandom(12)
            sealed = AESGCM(agree(self._c, keys[v][0], self._pair(v))).encrypt(nonce, b[i] + s[i], self._direction(self.me, v))
            out[v] = nonce + sealed
        return out

    def _direction(self, sender: int, receiver: int) -> bytes:
        return self.context + f" from {sender} to {receiver}".encode()

    def receive(self, shares: Mapping[int, bytes]) -> None:
        """Keep what the others dealt; those who did not are out of the round.

        Raises:
            Refused: a share that does not decrypt, fewer than the threshold.
        """
        for v, data in shares.items():
            if v == self.me or v not in self._keys:
                raise Refused(f"secure sum: a share from {v}, who is no other participant")
            try:
                key = agree(self._c, self._keys[v][0], self._pair(v))
                self._shares[v] = AESGCM(key).decrypt(data[:12], data[12:], self._direction(v, self.me))
            except (InvalidTag, ValueError):
                raise Refused(f"secure sum: the share from {v} does not decrypt") from None
            if len(self._shares[v]) != SHARE:
                raise Refused(f"secure sum: the share from {v} has the wrong length")
        if len(self._shares) < max(self.threshold, self.fewest):
            raise Refused(f"secure sum: shares of {len(self._shares)} participants; {max(self.threshold, self.fewest)} are needed")

    def mask(self, x: np.ndarray) -> np.ndarray:
        """``x`` (n,) uint64 behind its masks.

        Raises:
            Refused: a second time, since two vectors behind the same masks tell their difference.
        """
        if self._spent:
            raise Refused("secure sum: this site has sent its vector in this round")
        self._spent = True
        others = {v: self._keys[v][1] for v in self._shares if v != self.me}
        return x + keystream(self._b, len(x)) + pairwise(self.me, others, self._s, self.context, len(x))

    def reveal(self, survivors: Sequence[int]) -> dict[int, bytes]:
        """For survivors the share of their seed, for all others that of their mask key.

        Raises:
            Refused: a list that is too short or strange, or another one than before.
        """
        alive, everybody = sorted(set(survivors)), sorted(self._shares)
        if self._told and self._told != str(alive):
            raise Refused("secure sum: this site has answered for another list of survivors in this round")
        if len(alive) < max(self.threshold, self.fewest) or not set(alive) <= set(everybody) or self.me not in alive:
            raise Refused(
                f"secure sum: {len(alive)} survivors; {max(self.threshold, self.fewest)} participants are needed, this site among them"
            )
        self._told = str(alive)
        return {v: self._shares[v][:32] if v in alive else self._shares[v][32:] for v in everybody}


def unmasked(
    masked: Mapping[int, np.ndarray],
    keys: Mapping[int, tuple[bytes, bytes]],
    dealt: Sequence[int],
    revealed: Mapping[int, Mapping[int, bytes]],
    threshold: int,
    context: bytes,
) -> np.ndarray:
    """The sum over those who answered.

    Args:
        masked: y_u of those who answered.
        keys: public keys of all participants of the first step.
        dealt: participants that dealt shares: who has masks with whom.
        revealed: by client that tells, by client that it is about, the share.
        threshold: shares that a secret needs.
        context: as in `Secrets`.

    Raises:
        Refused: too few shares, or shares that do not give the announced key.
    """
    index = {v: i + 1 for i, v in enumerate(sorted(keys))}
    alive = sorted(masked)
    if len(revealed) < threshold:
        raise Refused(f"secure sum: {len(revealed)} clients revealed their shares; {threshold} are needed")
    total = np.zeros_like(next(iter(masked.values())))
    for y in masked.values():
        total = total + y
    for v in sorted(dealt):
        shares = dict(list({index[u]: r[v] for u, r in revealed.items() if v in r}.items())[:threshold])
        if len(shares) < threshold:
            raise Refused(f"secure sum: {len(shares)} shares of client {v}; {threshold} are needed")
        secret = join(shares)
        if v in masked:
            total = total - keystream(secret, len(total))
            continue
        key = X25519PrivateKey.from_private_bytes(secret)
        if key.public_key().public_bytes_raw() != keys[v][1]:
            raise Refused(f"secure sum: the shares of client {v} do not give its key")
        total = total + pairwise(v, {u: keys[u][1] for u in alive}, key, context, len(total))
    return total


def context_of(federation: str, run: str, round: int) -> bytes:
    """What ties keys and masks to one round."""
    return hashlib.sha256(f"{federation}\x1f{run}\x1f{round}".encode()).digest()
