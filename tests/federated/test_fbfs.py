from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch

from isthmus.core.recipe import RecipeError
from isthmus.core.rounds import RunError
from isthmus.core.types import CompositionError
from isthmus.federated.fbfs import selection
from isthmus.runner import make_method, run
from isthmus.tasks.logic import COEFFICIENTS, TABLE, Shape, hard, logic, pack, packed, soft, unpack
from isthmus.tasks.netlist import Circuit, c_source, cells, circuit, verilog

from ..conftest import digits_recipe, logic_task
from ..contracts.contracts import difference, play


def method(**options):
    more = {n: options.pop(n) for n in ("channels",) if n in options}
    return make_method(digits_recipe(**{"method.kind": "fbfs", **{f"method.{n}": v for n, v in ({"gates": 8} | options).items()}, **more}))


def test_all_sixteen_functions():
    a, b = torch.tensor([0.0, 0, 1, 1]), torch.tensor([0.0, 1, 0, 1])
    for t in range(16):
        c = COEFFICIENTS[t]
        assert torch.equal(c[0] + c[1] * a + c[2] * b + c[3] * a * b, TABLE[t])
    names = {1: a * b, 3: a, 5: b, 6: (a != b).float(), 7: torch.maximum(a, b), 15: torch.ones(4), 9: (a == b).float()}
    for t, expected in names.items():
        assert torch.equal(TABLE[t], expected)


def test_packed_soft_and_hard_evaluation_agree():
    shape = Shape(30, 40, 3, 4)
    wiring = shape.wiring(0, torch.tensor(3))
    assert len(set(wiring[0].flatten().tolist())) == 30  # every input is used
    types = torch.randint(0, 16, (3, 40), generator=torch.Generator().manual_seed(0))
    x = torch.randint(0, 2, (150, 30), generator=torch.Generator().manual_seed(1)).float()
    expected = hard(types, wiring, x)
    sharp = 60.0 * torch.nn.functional.one_hot(types, 16).float()
    assert torch.allclose(soft(sharp, wiring, x), expected, atol=1e-5)
    words = packed(types.numpy(), wiring.numpy(), pack(x.numpy().astype(np.uint8)))
    assert np.array_equal(unpack(words, 150), expected.numpy().astype(np.uint8))


def test_a_gate_that_is_the_label_scores_one_and_is_chosen():
    rows = torch.tensor([10, 20, 30])
    fires = torch.randint(0, 10, (3, 12), generator=torch.Generator().manual_seed(0))
    fires[:, 5] = torch.tensor([0, 20, 0])
    fires[:, 7] = torch.tensor([10, 20, 0])  # the complement of class 2
    index, sign, bias = selection(fires, rows, 1)
    assert index[1].tolist() == [5]
    assert sign[1].tolist() == [1]
    assert index[2].tolist() == [7]
    assert sign[2].tolist() == [-1]
    assert bias[1].item() in (0, 1)
    with pytest.raises(RunError, match="class 1"):
        selection(fires, torch.tensor([5, 0, 5]), 1)


def test_diversity_does_not_choose_the_same_twice():
    rows = torch.tensor([100, 100, 100])
    fires = torch.tensor([[90, 90, 60, 10], [10, 10, 5, 50], [10, 10, 30, 90]])
    plain, _, _ = selection(fires, rows, 2)
    diverse, _, _ = selection(fires, rows, 2, 3.0)
    assert plain[0].tolist() == [0, 1]
    assert diverse[0].tolist()[0] == 0
    assert diverse[0].tolist()[1] != 1


def test_the_choice_is_that_of_the_union_whatever_the_split():
    """Counts of all clients together are those of one client with all rows, and so is the choice, index for index."""
    t = logic_task()
    _, server, _ = play(method(), t, rounds=2)
    pool = server.shared["pool.types"]
    rows = torch.cat(list(t.train))
    held = rows[t.held(rows)]
    fires = t.candidates(pool, t.x[held])
    one = torch.nn.functional.one_hot(t.y[held], 10)
    counts, total = (one.float().T @ fires).round().long(), one.sum(0)
    for name, expected in zip(("index", "sign", "bias"), selection(counts, total, 8, 0.4), strict=True):
        assert torch.equal(server.shared[f"select.{name}"].long(), expected.long()), name


def test_the_order_of_clients_and_sums_instead_of_single_codes_change_nothing():
    t = logic_task()
    _, one, records = play(method(), t, rounds=2)
    _, other, more = play(method(secure=True), t, rounds=2)
    _, summed, _ = play(method(secure=True, channels=[{"kind": "secure_sum"}]), t, rounds=2)
    names = [n for n in one.shared if n.startswith(("select", "pool"))]
    for n in names:
        assert torch.equal(one.shared[n], other.shared[n]), n
        assert torch.equal(one.shared[n], summed.shared[n]), n
    with pytest.raises(CompositionError, match="individual"):
        method(channels=[{"kind": "secure_sum"}])
    # four bits a gate, then counts and no images
    assert records[0].up[0][0] == 2 * 40 // 2
    assert records[1].up[0][0] == 4 * (10 * 4 * 40 + 10)
    assert more[0].up[0][0] == 4 * 2 * 40


def test_no_held_out_row_is_trained_on():
    t = logic_task()
    rows = t.train[0]
    poisoned = replace(t, y=t.y.clone())
    held = rows[t.held(rows)]
    assert 0.1 < len(held) / len(rows) < 0.35
    poisoned.y[held] = (poisoned.y[held] + 1) % 10
    _, a, _ = play(method(), t, rounds=1)
    _, b, _ = play(method(), poisoned, rounds=1)
    assert difference(a.shared, b.shared) == 0.0


def random_circuit(seed: int = 0, inputs: int = 12, width: int = 20, layers: int = 3, classes: int = 3):
    g = np.random.default_rng(seed)
    shape = Shape(inputs, width, layers, classes)
    types = g.integers(0, 16, (2, layers, width))
    wiring = np.stack([shape.wiring(seed, torch.tensor(k)).numpy() for k in range(2)])
    index, sign = g.integers(0, 2 * width, (classes, 7)), g.choice([-1, 1], (classes, 7))
    bias = g.integers(-2, 3, classes)
    x = g.integers(0, 2, (300, inputs))
    fires = np.concatenate(
        [hard(torch.from_numpy(types[k]), torch.from_numpy(wiring[k]), torch.from_numpy(x).float()).numpy() for k in range(2)], 1
    )
    expected = ((fires[:, index] * sign).sum(-1) - bias).argmax(1)
    return circuit(types, wiring, inputs, index, sign, bias.tolist()), x, expected


@pytest.mark.parametrize("seed", range(20))
def test_simplified_circuits_say_the_same(seed):
    made, x, expected = random_circuit(seed)
    assert np.array_equal(made.predict(x), expected)
    assert len(made.gates) <= 2 * 3 * 20
    assert all(a < made.inputs + i and b < made.inputs + i for i, (_, a, b) in enumerate(made.gates))


def test_constants_and_copies_cost_no_gate():
    made = Circuit(3)
    assert made.gate(0, 0, 1) == -1
    assert made.gate(15, 0, 1) == -2
    assert made.gate(3, 2, 1) == 2
    assert made.gate(5, 2, 1) == 1
    assert made.gate(6, 1, 1) == -1
    assert made.gate(1, 1, -2) == 1
    assert made.gate(1, 1, -1) == -1
    assert not made.gates
    first = made.gate(2, 0, 1)
    assert made.gate(4, 1, 0) == first
    inverted = made.gate(12, first, first)
    assert made.gate(12, inverted, inverted) == first
    assert len(made.gates) == 2


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
@pytest.mark.parametrize("seed", range(3))
def test_c_is_bit_exact(seed, tmp_path):
    made, x, expected = random_circuit(seed)
    (tmp_path / "c.c").write_text(c_source(made))
    subprocess.run(["gcc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", "c.so", "c.c"], cwd=tmp_path, check=True)
    function, found = ctypes.CDLL(str(tmp_path / "c.so")).classify, []
    words = pack(x.astype(np.uint8))
    for w in range(words.shape[1]):
        labels = (ctypes.c_int * 64)()
        function(np.ascontiguousarray(words[:, w]).ctypes.data_as(ctypes.c_void_p), labels)
        found += list(labels)
    assert found[: len(expected)] == expected.tolist()


@pytest.mark.skipif(shutil.which("iverilog") is None, reason="no Verilog simulator (Debian: iverilog)")
@pytest.mark.parametrize("after", ["source", "synthesis"])
@pytest.mark.parametrize("seed", range(2))
def test_verilog_is_bit_exact_before_and_after_synthesis(seed, after, tmp_path):
    made, x, expected = random_circuit(seed)
    source, file = verilog(made), "classifier.v"
    (tmp_path / file).write_text(source)
    if after == "synthesis":
        if shutil.which("yosys") is None:
            pytest.skip("no Yosys (Debian: yosys)")
        found = cells(source, tmp_path)
        assert found["total"] > 0
        assert sum(n for k, n in found.items() if k != "total") == found["total"]
        file = "classifier_net.v"
    rows = "\n".join(f'    x = {x.shape[1]}\'b{"".join(map(str, row[::-1]))}; #1 $display("%0d", label);' for row in x)
    bench = f"module bench; reg [{x.shape[1] - 1}:0] x; wire [1:0] label; classifier c(x, label); initial begin\n{rows}\n end endmodule\n"
    (tmp_path / "bench.v").write_text(bench)
    subprocess.run(["iverilog", "-g2012", "-o", "bench", "bench.v", file], cwd=tmp_path, check=True)
    said = subprocess.run(["vvp", "bench"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.split()
    assert [int(s) for s in said] == expected.tolist()


def test_a_run_compiles_and_agrees_with_the_model_on_every_test_row(tmp_path):
    from isthmus.compilation import compile_run

    recipe = digits_recipe(
        **{
            "task": {"kind": "logic", "width": 100, "layers": 2},
            "data.limit": 600,
            "partition.clients": 4,
            "method.kind": "fbfs",
            "method.gates": 20,
            "train": {"lr": 0.02, "steps": 60, "size": 64},
            "evaluate.references": False,
        }
    )
    result = run(recipe, tmp_path / "run")
    found = compile_run(tmp_path / "run", synthesise=False)
    assert found["mismatches"] == 0
    assert found["test_rows"] == sum(len(r) for r in result.task.test)
    assert found["accuracy"] == pytest.approx(result.document["accuracy_global"], abs=1e-6)
    assert found["accuracy"] > 0.5
    first = (tmp_path / "run" / "circuit" / "classifier.v").read_bytes()
    compile_run(tmp_path / "run", synthesise=False)
    assert (tmp_path / "run" / "circuit" / "classifier.v").read_bytes() == first
    run(digits_recipe(**{"evaluate.references": False, "rounds": 1}), tmp_path / "other")
    with pytest.raises(RecipeError, match="only logic-gate networks"):
        compile_run(tmp_path / "other")


def test_bad_settings_are_named():
    for changes, match in (
        ({"task.width": 33}, "multiple of the 10"),
        ({"task.layers": 0}, "from 1 on"),
        ({"task.thresholds": []}, "thresholds"),
        ({"task.wide": 1}, "no such field"),
    ):
        with pytest.raises(RecipeError, match=match):
            logic(digits_recipe(**{"task.kind": "logic"}).updated(changes))
    with pytest.raises(Exception, match="gates"):
        method(gates=0)
