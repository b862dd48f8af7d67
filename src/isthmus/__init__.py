"""Isthmus: adapt pretrained models where the data lives.

    import isthmus
    recipe = isthmus.recipe("newsroom", "rounds=3")
    result = isthmus.run(recipe)
    print(result.document["accuracy_global"], result.folder)

Everything heavy is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapters.export import base_model, classify
    from .comparison import compare
    from .core.recipe import Recipe
    from .core.types import Method
    from .runner import Result, run

__version__ = "0.1.0"

_LAZY = {
    "Method": "core.types",
    "Recipe": "core.recipe",
    "Result": "runner",
    "run": "runner",
    "compare": "comparison",
    "base_model": "adapters.export",
    "classify": "adapters.export",
}


def recipe(name: str, *changes: str) -> Recipe:
    """A packaged recipe by name, or a .toml file by path, with changes like ``"train.lr=0.01"``.

    Raises:
        RecipeError: naming the field, the value and what is accepted.
    """
    from .core.recipe import load

    return load(name, changes)[0]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Method", "Recipe", "Result", "__version__", "base_model", "classify", "compare", "recipe", "run"]
