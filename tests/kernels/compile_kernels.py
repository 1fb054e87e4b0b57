"""Compile this project's kernels, through their own launches, for a GPU that need not be here; JSON of each launch.

python tests/kernels/compile_kernels.py WHAT CAPABILITY [HEAD_SIZE[xHEAD_SIZE_OF_V] DTYPE]

attention      forward, forward onto, backward, of one head size and dtype
decode         attention to a cache, of one head size and dtype
memory         the kernels of one pass over memory, of one head size and dtype
in_place       kernels that store where they read, and merge_into without its barrier
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import launch_cases
import triton
from launches import Launch, launches

NVIDIA = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
GLOBAL = re.compile(r"^\s*(?:@!?%p\d+ )?(st|ld|cp\.async)\b\S*\.global|^\s*(bar\.sync)\s+0;", re.MULTILINE)
INSTRUCTION = re.compile(r"^\s*(?:@%p\d+ )?((?:ld|st)\.global\S*|cvt\.\S*e[45]m[23]\S*)", re.MULTILINE)
PRODUCT = re.compile(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma")


def described(name: str, launch: Launch) -> dict[str, Any]:
    return {
        "name": name,
        "kernel": launch.kernel,
        "grid": launch.grid,
        "shared": launch.shared,
        "matrix products": len(PRODUCT.findall(launch.ptx)),
        "instructions": Counter(INSTRUCTION.findall(launch.ptx)),
        "waits": waits(launch.ptx),
    }


def waits(ptx: str) -> bool:
    """Return True if all threads wait for each other between the last read of global memory and the first store.

    Several threads may read one element, such as a row's log-sum-exp that all columns need: if one of them stores the
    new value, another warp may read it instead of the old one. The interpreter has a single thread, and
    ``compute-sanitizer racecheck`` covers shared memory only.
    """
    order = "".join("b" if barrier else access[0] for access, barrier in GLOBAL.findall(ptx))
    return re.fullmatch("[lcb]*b+s[sb]*", order) is not None


def assembled(ptx: str, capability: int) -> dict[str, int]:
    """Registers and spilled bytes."""
    ptxas = NVIDIA / ("ptxas-blackwell" if capability >= 100 and (NVIDIA / "ptxas-blackwell").exists() else "ptxas")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        target = f"sm_{capability}{'a' if capability >= 90 else ''}"
        command = [str(ptxas), "-v", f"-arch={target}", str(path), "-o", str(path.with_suffix(".cubin"))]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", log))),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill stores", log))),
    }


def cases(what: str, arguments: list[str], folder: str) -> dict[str, launch_cases.Call]:
    if what == "in_place":
        bfloat16, float32 = launch_cases.DTYPES["bfloat16"], launch_cases.DTYPES["float32"]
        calls = launch_cases.attention(128, 128, bfloat16) | launch_cases.merges(128, float32)
        in_place = {name: calls[name] for name in ("forward onto", "merge_into", "merge_into rows")}
        return in_place | {"without its barrier": launch_cases.without_barriers(folder)}
    d, _, e = arguments[0].partition("x")
    dtype = launch_cases.DTYPES[arguments[1]]
    if what == "memory":
        return launch_cases.memory_bound(int(d), dtype)
    if what == "decode":
        return launch_cases.decodes(int(d), int(e or d), dtype)
    return launch_cases.attention(int(d), int(e or d), dtype) | launch_cases.unaligned_attention(int(d), dtype)


def main() -> None:
    what, capability, *arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        for name, call in cases(what, arguments, folder).items():
            with launches(int(capability)) as made:
                call()
            for launch in made:
                print(json.dumps(described(name, launch)), flush=True)


if __name__ == "__main__":
    main()
