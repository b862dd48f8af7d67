"""Builds the compiled kernels into the wheel where there is a C++ compiler; without one the wheel is pure and runs on NumPy.

The libraries need no Python headers (they are loaded with ctypes), so one wheel serves every Python version of a platform.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path(__file__).parent / "src" / "isthmus" / "primitives" / "native"
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-ffinite-math-only",
    "-fno-signed-zeros",
    "-fno-trapping-math",
    "-Wno-psabi",
]
WIDE = "-mfma -mavx512f -mavx512bw -mavx512vl -mavx512dq"
UNITS = {"base": "", "avx2": "-mavx2 -mfma", "avx512": WIDE, "amx": f"{WIDE} -mavx512bf16 -mamx-tile -mamx-bf16"}


def build() -> list[Path]:
    """The libraries that could be built; an instruction set that the compiler does not know is left out."""
    compiler = os.environ.get("CXX") or next((c for c in ("g++", "clang++", "c++") if shutil.which(c)), None)
    if compiler is None or sys.platform == "win32":
        return []
    alone = ["-pthread", "-s"] if sys.platform == "linux" else []
    source, started = NATIVE / "kernels.cpp", {}
    for name, flags in UNITS.items() if platform.machine() == "x86_64" else [("base", "")]:
        made = NATIVE / f"kernels_{name}.so"
        if not made.exists() or made.stat().st_mtime < max(source.stat().st_mtime, Path(__file__).stat().st_mtime):
            command = [compiler, *FLAGS, *flags.split(), str(source), *alone, "-o", str(made)]
            started[made] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for made, process in started.items():
        text, _ = process.communicate()
        if process.returncode:
            made.unlink(missing_ok=True)
            print(f"{made.name} was not built; {' '.join(process.args)}\n{text[:2000]}", file=sys.stderr)
    return sorted(NATIVE.glob("kernels_*.so"))


class KernelHook(BuildHookInterface):
    """Hatchling's hook."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, and name the wheel by its platform."""
        libraries = build()
        if libraries:
            build_data["artifacts"] += [str(p.relative_to(self.root)) for p in libraries]
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
