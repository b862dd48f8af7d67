"""A chosen Boolean classifier as a circuit: simplified, evaluated 64 rows at a time, written as Verilog and C, counted by Yosys.

Signals are numbered: inputs 0 to F - 1, then gates in an order in which every gate's inputs come before it.  Building a circuit leaves out what no
output needs, folds constants and gates that pass an input, and shares gates that compute the same.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .logic import pack, unpack

ZERO, ONE = -1, -2  # constants, as signals
_SWAP = [t & 0b1001 | (t & 0b0100) >> 1 | (t & 0b0010) << 1 for t in range(16)]  # the same function of (b, a)


class YosysError(RuntimeError):
    """Yosys is missing, or does not take the circuit."""


@dataclass
class Circuit:
    """Gates (type, a, b) over ``inputs`` signals, and for every class the signals that vote for and against it, less ``bias``."""

    inputs: int
    gates: list[tuple[int, int, int]] = field(default_factory=list)
    plus: list[list[int]] = field(default_factory=list)
    minus: list[list[int]] = field(default_factory=list)
    bias: list[int] = field(default_factory=list)
    _known: dict[tuple[int, int, int], int] = field(default_factory=dict, repr=False)

    def gate(self, t: int, a: int, b: int) -> int:
        """The signal of function ``t`` of two signals, which may be constants; one that is there already is used again."""
        values = [t >> (3 - i) & 1 for i in range(4)]
        for which, signal in enumerate((a, b)):
            if signal in (ZERO, ONE):
                fixed = int(signal == ONE)
                values = [values[2 * fixed + (i & 1)] if which == 0 else values[(i & 2) + fixed] for i in range(4)]
        if a == b:
            values = [values[0], values[0], values[3], values[3]]
        t = sum(v << (3 - i) for i, v in enumerate(values))
        if t == 0:
            return ZERO
        if t == 15:
            return ONE
        if values[0] == values[2] and values[1] == values[3]:  # of b alone
            t, a = (3, b) if values[1] else (12, b)
            b = a
        elif values[0] == values[1] and values[2] == values[3]:  # of a alone
            t, b = (3 if values[2] else 12), a
        if t == 3:
            return a
        if t == 12 and a >= self.inputs and self.gates[a - self.inputs][0] == 12:
            return self.gates[a - self.inputs][1]
        if a > b:
            a, b, t = b, a, _SWAP[t]
        key = (t, a, b)
        if key not in self._known:
            self._known[key] = self.inputs + len(self.gates)
            self.gates.append(key)
        return self._known[key]

    def votes(self, words: np.ndarray, rows: int) -> np.ndarray:
        """Scores (rows, classes) from packed inputs (F, w)."""
        signals = np.zeros((self.inputs + len(self.gates), words.shape[1]), dtype=np.uint64)
        signals[: self.inputs] = words
        for i, (t, a, b) in enumerate(self.gates):
            x, y, out = signals[a], signals[b], signals[self.inputs + i]
            for corner, term in enumerate((~x & ~y, ~x & y, x & ~y, x & y)):
                if t >> (3 - corner) & 1:
                    out |= term
        out = np.zeros((rows, len(self.bias)), dtype=np.int64)
        for c in range(len(self.bias)):
            for sign, chosen in ((1, self.plus[c]), (-1, self.minus[c])):
                constant = sum(s == ONE for s in chosen)
                real = [s for s in chosen if s >= 0]
                counted = unpack(signals[real], rows).sum(1, dtype=np.int64) if real else 0
                out[:, c] += sign * (counted + constant)
            out[:, c] -= self.bias[c]
        return out

    def predict(self, bits: np.ndarray) -> np.ndarray:
        """Labels (n,) of rows of bits (n, F), the first of equals."""
        return self.votes(pack(np.asarray(bits, dtype=np.uint8)), len(bits)).argmax(1)

    def json(self) -> str:
        """As a document: {inputs, gates: [[type, a, b]], plus, minus, bias}; -1 and -2 are the constants 0 and 1."""
        return json.dumps({"inputs": self.inputs, "gates": self.gates, "plus": self.plus, "minus": self.minus, "bias": self.bias})


def circuit(types: np.ndarray, wiring: np.ndarray, inputs: int, index: np.ndarray, sign: np.ndarray, bias: Sequence[int]) -> Circuit:
    """The circuit of chosen gates.

    Args:
        types: functions (K, layers, width) of all networks.
        wiring: their inputs (K, layers, 2, width).
        inputs: bits of a row.
        index, sign: chosen last-layer gates (C, m), numbered k width + g, and whether each votes for or against.
        bias: an integer a class.
    """
    made, (_, layers, width) = Circuit(inputs), types.shape
    memo: dict[tuple[int, int, int], int] = {}

    def signal(k: int, layer: int, g: int) -> int:
        if layer < 0:
            return g
        at = (k, layer, g)
        if at not in memo:
            t = int(types[k, layer, g])
            # an input that the function does not look at is not followed
            needs_a = (t >> 3 & 1, t >> 2 & 1) != (t >> 1 & 1, t & 1)
            needs_b = (t >> 3 & 1, t >> 1 & 1) != (t >> 2 & 1, t & 1)
            a = signal(k, layer - 1, int(wiring[k, layer, 0, g])) if needs_a else ZERO
            b = signal(k, layer - 1, int(wiring[k, layer, 1, g])) if needs_b else ZERO
            memo[at] = made.gate(t, a, b)
        return memo[at]

    for c in range(len(bias)):
        chosen = [(signal(int(g) // width, layers - 1, int(g) % width), int(s)) for g, s in zip(index[c], sign[c], strict=True) if s]
        made.plus.append([x for x, s in chosen if s > 0 and x != ZERO])
        made.minus.append([x for x, s in chosen if s < 0 and x != ZERO])
        made.bias.append(int(bias[c]))
    return made


def _tree(terms: list[str]) -> str:
    """A balanced sum: long chains of + take synthesis tools down."""
    while len(terms) > 1:
        terms = [f"({' + '.join(terms[i : i + 2])})" if i + 1 < len(terms) else terms[i] for i in range(0, len(terms), 2)]
    return terms[0] if terms else "0"


# the same in Verilog and in C
_EXPRESSION = {
    1: "{a} & {b}", 2: "{a} & ~{b}", 4: "~{a} & {b}", 6: "{a} ^ {b}", 7: "{a} | {b}", 8: "~({a} | {b})", 9: "~({a} ^ {b})", 11: "{a} | ~{b}",
    12: "~{a}", 13: "~{a} | {b}", 14: "~({a} & {b})",
}  # fmt: skip


def verilog(of: Circuit, name: str = "classifier") -> str:
    """A combinational module: ``input [F-1:0] x``, ``output [.:0] label``, the first class of the largest score."""
    classes = len(of.bias)
    most = max(len(p) + len(m) + abs(b) for p, m, b in zip(of.plus, of.minus, of.bias, strict=True))
    wide, label = int(most).bit_length() + 1, max(1, (classes - 1).bit_length())
    net = lambda s: f"x[{s}]" if s < of.inputs else f"g{s - of.inputs}"  # noqa: E731
    lines = [f"module {name}(input [{of.inputs - 1}:0] x, output [{label - 1}:0] label);"]
    for i, (t, a, b) in enumerate(of.gates):
        lines.append(f"  wire g{i} = {_EXPRESSION[t].format(a=net(a), b=net(b))};")
    word = lambda s: f"{{{{{wide - 1}{{1'b0}}}}, {net(s)}}}" if s >= 0 else f"{wide}'d1"  # noqa: E731
    for c in range(classes):
        parts = [f"$signed({_tree([word(s) for s in group])})" for group in (of.plus[c], of.minus[c]) if group]
        first = parts[0] if of.plus[c] else f"{wide}'sd0"
        rest = f" - {parts[-1]}" if of.minus[c] else ""
        offset = f" {'-' if of.bias[c] >= 0 else '+'} {wide}'sd{abs(of.bias[c])}" if of.bias[c] else ""
        lines.append(f"  wire signed [{wide - 1}:0] s{c} = {first}{rest}{offset};")
    best, where = "s0", f"{label}'d0"
    for c in range(1, classes):
        lines.append(f"  wire t{c} = s{c} > {best};")
        lines.append(f"  wire signed [{wide - 1}:0] m{c} = t{c} ? s{c} : {best};")
        lines.append(f"  wire [{label - 1}:0] l{c} = t{c} ? {label}'d{c} : {where};")
        best, where = f"m{c}", f"l{c}"
    return "\n".join([*lines, f"  assign label = {where};", "endmodule", ""])


def c_source(of: Circuit, name: str = "classify") -> str:
    """C99: ``void classify(const uint64_t x[F], int label[64])`` takes 64 rows at once, row i in bit i of every word."""
    net = lambda s: f"x[{s}]" if s < of.inputs else f"g[{s - of.inputs}]"  # noqa: E731
    lines = ["#include <stdint.h>", "", f"void {name}(const uint64_t x[{of.inputs}], int label[64]) {{"]
    lines.append(f"  static uint64_t g[{max(1, len(of.gates))}];")
    lines += [f"  g[{i}] = {_EXPRESSION[t].format(a=net(a), b=net(b))};" for i, (t, a, b) in enumerate(of.gates)]
    lines.append("  for (int i = 0; i < 64; i++) {")
    lines.append("    int best = 0, top = 0, s;")
    bit = lambda s: f"(int)({net(s)} >> i & 1)" if s >= 0 else "1"  # noqa: E731
    for c in range(len(of.bias)):
        plus, minus = " + ".join(map(bit, of.plus[c])) or "0", " + ".join(map(bit, of.minus[c])) or "0"
        lines.append(f"    s = ({plus}) - ({minus}) - ({of.bias[c]});")
        lines.append(f"    if ({c} == 0 || s > top) {{ top = s; best = {c}; }}")
    return "\n".join([*lines, "    label[i] = best;", "  }", "}", ""])


def cells(source: str, folder: Path, name: str = "classifier", timeout: float = 600.0) -> dict[str, int]:
    """Cells after synthesis to two-input gates, by kind and "total"; leaves ``NAME.v`` and the netlist ``NAME_net.v`` in ``folder``.

    Raises:
        YosysError: not installed, or it fails.
    """
    if shutil.which("yosys") is None:
        raise YosysError("yosys is not installed (Debian: apt-get install yosys)")
    (folder / f"{name}.v").write_text(source)
    script = (
        f"read_verilog {name}.v; hierarchy -top {name}; synth -flatten -top {name}; "
        f"abc -g AND,OR,XOR,NAND,NOR,XNOR,ANDNOT,ORNOT,MUX; opt_clean -purge; stat; write_verilog -noattr {name}_net.v"
    )
    try:
        done = subprocess.run(
            ["yosys", "-l", f"{name}.log", "-q", "-p", script], cwd=folder, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        raise YosysError(f"synthesis took more than {timeout:g} s") from None
    if done.returncode:
        raise YosysError((done.stdout + done.stderr).strip()[-500:])
    text = (folder / f"{name}.log").read_text()
    tail = text[text.rindex("Number of cells:") :]
    found = {kind.strip("$_"): int(n) for kind, n in re.findall(r"^\s+(\$\w+)\s+(\d+)\s*$", tail, re.M)}
    return {"total": int(re.search(r"Number of cells:\s+(\d+)", tail)[1])} | found  # type: ignore[index]
