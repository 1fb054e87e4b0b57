"""Compile the attention kernels for a GPU that need not be here; a line of JSON for each.

python compile_kernels.py CAPABILITY HEAD_DIM V_HEAD_DIM
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from cp_kernels import backward, forward, sizes
from cp_kernels.parts import Parts
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HALF = ("q", "k", "v", "dout", "dq", "dk", "dv")
TABLES = ("blocks", "first", "last", "runs")
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"


def argument_types(fn: Any, constants: dict[str, Any], wide: bool) -> tuple[dict[str, str], dict[Any, Any]]:
    """The type of every argument, and which are multiples of 16, as they are for dense bfloat16 tensors."""
    types, attributes = {}, {}
    for index, name in enumerate(fn.arg_names):
        if name in constants:
            types[name] = "constexpr"
            continue
        if name in HALF or name == "out":
            types[name] = "*fp32" if name == "out" and wide else "*bf16"
        elif name in TABLES:
            types[name] = "*i32"
        else:
            types[name] = {"lse": "*fp32", "delta": "*fp32", "scale": "fp32"}.get(name, "i32")
        stride_of_rows = re.fullmatch(r"(q|k|v|dout|out|dq|dk|dv)_[sbhg]", name)
        if types[name].startswith("*") or stride_of_rows:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return types, attributes


def compile_one(
    name: str, fn: Any, capability: int, d: int, e: int, chosen: sizes.Sizes, **extra: bool
) -> dict[str, Any]:
    (d0, d1), (e0, e1) = Parts.of(d), Parts.of(e)
    constants = dict(D=d, D0=d0, D1=d1, E=e, E0=e0, E1=e1, M=chosen.queries, N=chosen.keys, PRECISION="tf32", **extra)
    types, attributes = argument_types(fn, constants, extra.get("ONTO", False))
    source = ASTSource(fn, types, {(fn.arg_names.index(key),): value for key, value in constants.items()}, attributes)
    options = {"num_warps": chosen.warps, "num_stages": chosen.stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = kernel.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        target = f"sm_{capability}{'a' if capability >= 90 else ''}"
        command = [str(PTXAS), "-v", f"-arch={target}", str(path), "-o", str(path.with_suffix(".cubin"))]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    products = len(re.findall(r"wgmma\.mma_async|mma\.sync", ptx))
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", log)))
    registers = max(map(int, re.findall(r"Used (\d+) registers", log)))
    return {
        "name": name, "shared": kernel.metadata.shared, "registers": registers, "spilled": spilled,
        "matrix products": products,
    }  # fmt: skip


def main() -> None:
    capability, d, e = map(int, sys.argv[1:])
    half = torch.bfloat16
    for name, fn, choose, extra in (
        ("forward", forward._forward, sizes.forward_sizes, {"ONTO": False}),
        ("forward onto", forward._forward, sizes.forward_sizes, {"ONTO": True}),
        ("dq", backward._dq, sizes.dq_sizes, {}),
        ("dkv", backward._dkv, sizes.dkv_sizes, {}),
    ):
        print(json.dumps(compile_one(name, fn, capability, d, e, choose(d, e, half), **extra)), flush=True)


if __name__ == "__main__":
    main()
