"""The documentation says what the code does: its tables are those of the code, its examples run, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isthmus.core import recipe, registry

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_tables_are_those_of_results_and_code(page, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import pages

    text = page.read_text()
    assert pages.filled(text) == text, "run python benchmarks/pages.py"


@pytest.mark.parametrize("kind", ["methods", "channels"])
def test_every_part_has_a_row(kind):
    page = (ROOT / "docs" / "methods.md").read_text()
    missing = [n for n in registry.BUILT_IN[kind] if f"`{n}`" not in page]
    assert not missing


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
@pytest.mark.weights
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "example"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec", dont_inherit=True), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_recipes_in_pages_are_valid(page):
    for block in blocks(page, "toml"):
        table = recipe.tomllib.loads(block)
        if "project" not in table:
            recipe.parse({"name": "example"} | table)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"
