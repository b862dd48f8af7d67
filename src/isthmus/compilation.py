"""`isthmus compile`: a finished run of logic-gate networks as hardware and as C, checked on every test image."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .core.checkpoint import write_atomic
from .core.recipe import RecipeError
from .runner import reopen
from .tasks.logic import LogicTask
from .tasks.netlist import Circuit, YosysError, c_source, cells, circuit, verilog


def circuit_of(task: LogicTask, params: dict[str, torch.Tensor]) -> Circuit:
    """The aggregated model's circuit: its selection, or, where nothing was selected, its own network with a vote of every last gate."""
    s = task.shape
    if "select.sign" in params and bool(params["select.sign"].any()):
        pool = params["pool.types"].numpy()
        wiring = np.stack([s.wiring(task.seed, torch.tensor(k)).numpy() for k in range(len(pool))])
        return circuit(pool, wiring, s.bits, params["select.index"].numpy(), params["select.sign"].numpy(), params["select.bias"].tolist())
    types = params["gates.weight"].argmax(-1).numpy()[None]
    index = np.arange(s.width).reshape(s.labels, -1)
    return circuit(types, task.wiring(params).numpy()[None], s.bits, index, np.ones_like(index), [0] * s.labels)


def compile_run(run: Path, synthesise: bool = True) -> dict[str, Any]:
    """Write ``circuit/classifier.v``, ``classifier.c`` and ``circuit.json`` into a run folder, and say how large it is and how right.

    Raises:
        RecipeError: a run of another task.
    """
    result = reopen(run)
    if not isinstance(result.task, LogicTask):
        raise RecipeError(f"{run}: task.kind = {result.recipe.task.kind!r}; only logic-gate networks compile (task.kind = 'logic')")
    task, params = result.task, result.line.engine.global_params(result.line.server)
    made = circuit_of(task, params)
    rows = torch.cat(list(task.test))
    mine, ours = made.predict(task.x[rows].numpy()), task.predict(params, task.x[rows]).numpy()
    folder = run / "circuit"
    folder.mkdir(exist_ok=True)
    source = verilog(made)
    write_atomic(folder / "classifier.v", source.encode())
    write_atomic(folder / "classifier.c", c_source(made).encode())
    write_atomic(folder / "circuit.json", made.json().encode())
    out: dict[str, Any] = {
        "gates": len(made.gates),
        "accuracy": float((torch.from_numpy(mine) == task.y[rows]).float().mean()),
        "test_rows": len(rows),
        "mismatches": int((mine != ours).sum()),
        "folder": str(folder),
    }
    if synthesise:
        try:
            out["cells"] = cells(source, folder)
        except YosysError as error:
            out["cells"], out["why"] = None, str(error)
    write_atomic(folder / "circuit-summary.json", json.dumps(out, indent=1).encode())
    return out
