"""A live display for a terminal: what each round brought, and how long the rest will take."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ..core.recipe import Recipe
from ..runner import Callback


def size(count: float) -> str:
    """1,536,000 as "1.5 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """75 as "1:15"."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class LiveProgress(Callback):
    """A bar for each line, on standard error, so that standard output stays for results."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stderr)
        self.progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=10),
            TextColumn("{task.completed:>3.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[said]}"),
            console=self.console,
        )
        self.bars: dict[str, TaskID] = {}
        self.spent: dict[str, int] = {}
        self.began: dict[str, tuple[float, int]] = {}

    def begin(self, line: str, recipe: Recipe, start: int) -> None:
        """A bar of its own."""
        if not self.bars:
            self.progress.start()
        self.bars[line] = self.progress.add_task(line, total=recipe.rounds, completed=start, said="")
        self.spent[line], self.began[line] = 0, (time.perf_counter(), start)

    def round(self, line: str, row: dict[str, Any]) -> None:
        """Accuracy, bytes so far, seconds, time left."""
        self.spent[line] += sum(s[1] for way in ("up", "down") for s in row[way].values())
        began, start = self.began[line]
        done, elapsed = row["round"] + 1, time.perf_counter() - began
        left = elapsed / (done - start) * ((self.progress.tasks[self.bars[line]].total or 0) - done)
        scores = row["evaluation"]
        said = [f"{which} {100 * scores[which]['accuracy']:.1f} %" for which in ("global", "personal") if scores.get(which)]
        if not said and "loss" in row["metrics"]:
            said = [f"loss {row['metrics']['loss']:.3f}"]
        said += [size(self.spent[line]), f"{row['seconds']:.1f} s", f"{duration(left)} left"]
        if row["missing"]:
            said.append(f"{len(row['missing'])} missing")
        self.progress.update(self.bars[line], completed=done, said="  ".join(said))

    def end(self, line: str) -> None:
        """Nothing to do: the bar stays."""

    def close(self) -> None:
        """Leave the bars as they are on the screen."""
        if self.bars:
            self.progress.stop()
