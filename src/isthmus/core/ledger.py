"""The ledger: one JSON line for each round, appended and never rewritten; every line is chained to the one before."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint import CheckpointError, write_atomic
from .rounds import RoundRecord


@dataclass
class Ledger:
    """What a run did: participants, who was missing and why, bytes per client and direction, metrics, seconds."""

    path: Path

    def append(self, record: RoundRecord, evaluation: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Add a round.

        Raises:
            CheckpointError: when the disk is full; lines before it stay.
        """
        row = {
            "round": record.round,
            "cohort": record.cohort,
            "missing": {str(c): why for c, why in record.missing.items()},
            "up": {str(c): list(size) for c, size in record.up.items()},
            "down": {str(c): list(size) for c, size in record.down.items()},
            "metrics": record.metrics,
            "evaluation": evaluation,
            "simulated_seconds": record.seconds,
            "seconds": seconds,
        }
        row["chain"] = link(self._last(), row)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(f"cannot append to {self.path.name}: {error.strerror or error}; earlier rounds are untouched") from error
        return row

    def _last(self) -> str:
        """The chain value of the last whole line, read from the end of the file."""
        if not self.path.is_file():
            return ""
        with self.path.open("rb") as file:
            end, size = file.seek(0, os.SEEK_END), 1 << 16
            while True:
                at = max(0, end - size)
                file.seek(at)
                lines = file.read(end - at).splitlines()[1 if at else 0 :]
                for line in reversed(lines):
                    try:
                        return str(json.loads(line)["chain"])
                    except (ValueError, KeyError, TypeError):
                        continue
                if not at:
                    return ""
                size *= 4

    def rows(self) -> list[dict[str, Any]]:
        """All complete rounds; a last line that was cut off by a crash is left out."""
        if not self.path.exists():
            return []
        out = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                out.append(json.loads(line))
            except ValueError:
                break
        return out

    def verify(self) -> int:
        """How many lines there are, all of them as they were written and in their order.

        Raises:
            CheckpointError: naming the first line that was changed, or that one before it is gone.
        """
        chain, rows = "", self.rows()
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        for i, row in enumerate(rows):
            if row.get("chain") != (chain := link(chain, row)):
                raise CheckpointError(f"{self.path.name}: line {i + 1} is not as it was written, or a line before it is gone")
        if len(lines) > len(rows):
            raise CheckpointError(f"{self.path.name}: line {len(rows) + 1} cannot be read")
        return len(rows)

    def cut(self, round: int) -> None:
        """Drop rounds from ``round`` on: a resumed run writes them again."""
        kept = [r for r in self.rows() if r["round"] < round]
        write_atomic(self.path, "".join(json.dumps(r) + "\n" for r in kept).encode())


def link(before: str, row: dict[str, Any]) -> str:
    """The chain value of a line after the line whose value is ``before``."""
    text = json.dumps({n: v for n, v in row.items() if n != "chain"}, sort_keys=True)
    return hashlib.sha256((before + text).encode()).hexdigest()[:32]


def total(rows: list[dict[str, Any]], direction: str, wire: bool = True) -> int:
    """Bytes "up" or "down" over all clients and rounds, on the wire or of payload alone."""
    return sum(size[1 if wire else 0] for r in rows for size in r[direction].values())
