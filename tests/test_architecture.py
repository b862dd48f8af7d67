"""Imports point one way; no system imports another; nothing unpickles."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "isthmus"
FILES = sorted(SOURCE.rglob("*.py"))
# a folder may import those that stand at its right
ALLOWED = {
    "core": set(),
    "parts": {"core"},
    "federated": {"core", "parts", "primitives"},
    "adapters": {"core", "tasks"},  # export loads a pretrained model through tasks.build, lazily
    "tasks": {"core", "parts", "adapters", "primitives"},
    "engines": {"core"},
    "primitives": set(),
    "deploy": {"core", "engines", "runner", "tasks", "report", "cli"},
    "report": {"core", "runner", "adapters", "primitives"},
}
# base methods that others may be made of
BASES = {"fedavg", "ffa_lora", "rational", "rolora"}


def imports(path: Path) -> list[tuple[str, int]]:
    """Absolute names of the package's own modules that a file imports."""
    package = ["isthmus", *path.relative_to(SOURCE).parts[:-1]]
    out = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            if name == "isthmus" or name.startswith("isthmus."):
                out += [(f"{name}.{a.name}", node.lineno) for a in node.names]
        elif isinstance(node, ast.Import):
            out += [(a.name, node.lineno) for a in node.names if a.name.split(".")[0] == "isthmus"]
    return out


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    place = path.relative_to(SOURCE).parts
    if len(place) == 1:
        return
    for name, line in imports(path):
        target = name.split(".")[1]
        if target != place[0]:
            assert target in ALLOWED[place[0]], f"{path.name}:{line} imports {name}"
        elif place[0] == "federated":
            assert name.split(".")[2] in BASES, f"{path.name}:{line}: a system imports another"


def test_the_core_stays_small():
    code = 0
    for path in (SOURCE / "core").glob("*.py"):
        tree = ast.parse(path.read_text())
        documentation = {
            line
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)
            for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
        }
        lines = path.read_text().splitlines()
        code += sum(1 for i, text in enumerate(lines, 1) if text.strip() and not text.strip().startswith("#") and i not in documentation)
    assert code < 1200


def test_nothing_unpickles():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"pickle.load", "pickle.loads", "torch.load", "eval", "exec", "yaml.load"}, (
                    f"{path.name}:{node.lineno}: {called}"
                )
            if isinstance(node, ast.keyword):
                assert node.arg != "allow_pickle"


def test_methods_are_small_files():
    for path in (SOURCE / "federated").glob("*.py"):
        assert len(path.read_text().splitlines()) < 200, path.name
