"""TensorBoard and MLflow, through their own libraries, where they are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..core.recipe import Recipe, RecipeError
from ..runner import Callback


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """A ledger line as names and numbers."""
    out = {f"training/{n}": v for n, v in row["metrics"].items()}
    for which in ("global", "personal"):
        out |= {f"{which}/{n}": v for n, v in row["evaluation"].get(which, {}).items()}
    out |= {f"bytes/{way}": float(sum(s[1] for s in row[way].values())) for way in ("up", "down")}
    return out | {"seconds": row["seconds"], "missing": float(len(row["missing"]))}


class TensorBoard(Callback):
    """Event files in the run folder."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise RecipeError("logs.tensorboard: needs the package tensorboard: pip install 'isthmus[logs]'") from None
        self.make, self.folder = SummaryWriter, folder
        self.writer: Any = None

    def begin(self, line: str, recipe: Recipe, start: int) -> None:
        """One writer for each line."""
        self.writer = self.make(str(self.folder / line))

    def round(self, line: str, row: dict[str, Any]) -> None:
        """Every number of the round."""
        for name, value in scalars(row).items():
            self.writer.add_scalar(name, value, row["round"])

    def end(self, line: str) -> None:
        """Flush."""
        self.writer.close()


class MLflow(Callback):
    """A run at a tracking URI for each line."""

    def __init__(self, uri: str) -> None:
        try:
            import mlflow
        except ImportError:
            raise RecipeError("logs.mlflow: needs the package mlflow: pip install mlflow-skinny") from None
        self.mlflow = mlflow
        mlflow.set_tracking_uri(uri)

    def begin(self, line: str, recipe: Recipe, start: int) -> None:
        """Parameters once."""
        self.mlflow.set_experiment(recipe.name)
        self.mlflow.start_run(run_name=line)
        self.mlflow.log_params({"method": line, "rounds": recipe.rounds, "seed": recipe.seed, "lr": recipe.train.lr})

    def round(self, line: str, row: dict[str, Any]) -> None:
        """Every number of the round."""
        self.mlflow.log_metrics({n.replace("/", "."): v for n, v in scalars(row).items()}, step=row["round"])

    def end(self, line: str) -> None:
        """Close the run."""
        self.mlflow.end_run()


def loggers(recipe: Recipe, folder: Path) -> list[Callback]:
    """Those that the recipe asks for."""
    out: list[Callback] = [TensorBoard(folder / "tensorboard")] if recipe.logs.tensorboard else []
    return out + ([MLflow(recipe.logs.mlflow)] if recipe.logs.mlflow else [])
