from __future__ import annotations

import sys
import textwrap

import pytest

from isthmus.core import registry
from isthmus.core.recipe import parse
from isthmus.core.registry import RegistryError

from ..conftest import digits_recipe, digits_task

METHOD = '''
"""Halving: half of every update counts."""
from dataclasses import replace
from isthmus.parts.apply import Add


def halving(base, factor: float = 0.5):
    """Half of every update counts."""
    return replace(base, apply=Add(factor))
'''


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a package with entry points where Python finds it, as an installer would."""

    def put(name: str, source: str, points: str):
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(textwrap.dedent(points))

    monkeypatch.syspath_prepend(str(tmp_path))
    yield put
    for name in list(sys.modules):
        if name.startswith("third_party"):
            del sys.modules[name]


def test_a_third_party_method_runs_like_a_built_in_one(install, tmp_path):
    install("third_party_halving", METHOD, "[isthmus.methods]\nhalving = third_party_halving:halving\n")
    from isthmus.runner import run

    changes = {"method.kind": "halving", "method.factor": 0.25, "evaluate.references": False}
    result = run(digits_recipe(**changes), tmp_path / "run", task=digits_task())
    assert result.document["method"] == "halving"
    assert result.line.method.apply.lr == 0.25
    assert result.document["accuracy_global"] is not None
    assert registry.entries("methods")["halving"].summary() == "Half of every update counts."
    with pytest.raises(ValueError, match="did you mean 'factor'"):
        parse({"name": "x", "method": {"kind": "halving", "facto": 1}})


def test_a_broken_plug_in_is_named_and_breaks_nothing_else(install):
    install("third_party_broken", "import no_such_module\n", "[isthmus.methods]\nbroken = third_party_broken:method\n")
    assert (
        registry.entries("methods")["broken"]
        .summary()
        .startswith("broken: method 'broken' of the package third_party_broken does not import")
    )
    assert registry.get("methods", "fedavg")
    with pytest.raises(RegistryError, match="no_such_module"):
        registry.get("methods", "broken")


def test_a_name_cannot_be_taken_twice(install):
    install("third_party_thief", METHOD, "[isthmus.methods]\nfedavg = third_party_thief:halving\n")
    with pytest.raises(RegistryError, match="registered by isthmus and by third_party_thief"):
        registry.entries("methods")


@pytest.mark.parametrize("kind", registry.KINDS)
def test_every_built_in_name_imports_and_says_what_it_is(kind):
    for entry in registry.entries(kind).values():
        text = entry.summary()
        assert text
        assert not text.startswith("broken")
