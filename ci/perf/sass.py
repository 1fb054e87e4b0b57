"""Machine code of every kernel: registers, spills, shared memory and instructions must not change unnoticed.

    python ci/perf/sass.py                      compare with sass.json: PASS or FAIL, and the differences
    python ci/perf/sass.py --update             show the differences, and write
    python ci/perf/sass.py --table              only print what the kernels are compiled to
    ... --gpu 90 --only "attention 128"         some GPUs, and cases with these words

Kernels are compiled through their own launches (``tests/kernels/launches.py``), by the assembler that comes with
Triton; no GPU is needed and nothing is timed. Each version of Triton compiles to other code and has counts of its own
in the file. A new kernel is one entry of ``CASES``.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import launch_cases
import torch
import triton
import typer
from compile_kernels import NVIDIA, assembled
from counts import CONSOLE, Counts, compare, lines, read
from launches import Launch, launches

from cp_plugin.tools.output import print_table

FILE = Path(__file__).with_name("sass.json")
GPUS = (80, 90, 100)
BF16 = torch.bfloat16
CASES: dict[str, Callable[[], dict[str, launch_cases.Call]]] = {
    **{f"attention {d}": lambda d=d: launch_cases.attention(d, d, BF16) for d in (64, 96, 128, 256)},
    "attention 192/128": lambda: launch_cases.attention(192, 128, BF16),
    "cache 128": lambda: launch_cases.decodes(128, 128, BF16),
    "cache 576/512": lambda: launch_cases.decodes(576, 512, BF16),
    "merge 128": lambda: launch_cases.merges(128),
    "copy 128": lambda: launch_cases.copies(128, BF16),
    "row term 128": lambda: launch_cases.row_terms(128, BF16),
    "float8 128": lambda: launch_cases.float8s(128, BF16),
    "convolution 1024": lambda: launch_cases.convolutions(1024, BF16),
}
"""All in bfloat16; of a case several calls, and of a call several launches."""
OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)([^;]*)", re.MULTILINE)
PRODUCT = re.compile(r"(?:[A-Z]*MMA)(?:\.\w+)?")
"""With its shape, which on 8.0 and 9.0 is part of the name."""


def count(gpus: tuple[int, ...] = GPUS, only: str = "") -> dict[str, Counts]:
    """Return ``sm_GPU, case, call: kernel`` -> counts."""
    counted: dict[str, Counts] = {}
    for gpu in gpus:
        for case, calls in CASES.items():
            for name, call in calls().items() if only in case else ():
                with launches(gpu) as made:
                    call()
                for launch in made:
                    key = f"sm_{gpu}, {case}, {name}: {launch.kernel}"
                    assert key not in counted, f"{key} is launched twice"
                    counted[key] = counts(launch, gpu)
    return counted


def counts(launch: Launch, gpu: int) -> dict[str, int]:
    """Registers of a thread, bytes that it spills, bytes of shared memory, and instructions: all of them, asynchronous
    copies to shared memory, matrix products by shape, and where there are any, tensor copies by descriptor (UTMALDG),
    accesses to spilled values (LDL, STL), and waits for products of a group of warps: how many let some go on (``wait
    some``), and how many let none (``wait all``).
    """
    instructions = OPCODE.findall(disassembled(launch.cubin))
    opcodes = [opcode for opcode, _ in instructions]
    kinds = Counter(opcode.split(".")[0] for opcode in opcodes)
    waits = Counter(
        "wait all" if operands.rstrip().endswith(" 0x0") else "wait some"
        for opcode, operands in instructions
        if opcode.startswith("WARPGROUP.DEPBAR")
    )
    products = Counter(PRODUCT.match(opcode)[0] for opcode in opcodes if PRODUCT.match(opcode))
    return {
        **assembled(launch.ptx, gpu),
        "shared": launch.shared,
        "instructions": len(opcodes),
        "LDGSTS": kinds["LDGSTS"],
        **{name: kinds[name] for name in ("UTMALDG", "LDL", "STL") if kinds[name]},
        **dict(sorted((products | waits).items())),
    }


def disassembled(cubin: bytes) -> str:
    """Return SASS, an instruction per line."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(NVIDIA / "cuobjdump"), "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def selected(counted: Mapping[str, Counts], gpus: tuple[int, ...], only: str) -> dict[str, Counts]:
    """Select the counts of these GPUs and cases."""
    parts = {key: key.split(", ") for key in counted}
    return {key: counted[key] for key, (gpu, case, *_) in parts.items() if int(gpu[3:]) in gpus and only in case}


def write(file: Path, now: Mapping[str, Counts]) -> None:
    """Replace the counts of this version of Triton."""
    versions = read(file) | {triton.__version__: dict(now)}
    parts = (f"{json.dumps(version)}: {lines(versions[version])}" for version in sorted(versions))
    file.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def show(counted: Mapping[str, Counts]) -> None:
    """Print a row per kernel."""
    always, rows = ("registers", "spilled", "shared", "instructions", "LDGSTS"), []
    for key, numbers in counted.items():
        others = ", ".join(f"{n} x {name}" for name, n in numbers.items() if name not in always)
        rows.append(((key, *(f"{numbers[name]:,}" for name in always), others), ""))
    print_table(CONSOLE, "", ("kernel", *always, "others"), rows)


def main(
    update: Annotated[bool, typer.Option("--update", help="Show what differs, and write.")] = False,
    table: Annotated[bool, typer.Option("--table", help="Only print the counts.")] = False,
    gpu: Annotated[list[int] | None, typer.Option(help=f"Compute capability; default {GPUS}.")] = None,
    only: Annotated[str, typer.Option(help="Cases with these words in their name.")] = "",
    file: Annotated[Path, typer.Option(help="The file of counts.")] = FILE,
) -> None:
    """Compile the kernels and compare their machine code with the file."""
    gpus, versions = tuple(gpu or GPUS), read(file)
    before = versions.get(triton.__version__, {})
    if not any(only in case for case in CASES):
        raise typer.BadParameter(f"no case has {only!r} in its name; there are {', '.join(CASES)}")
    if not before and not update and not table:
        print(f"{file.name} has no counts of Triton {triton.__version__}, but of {', '.join(versions)}: --update")
        raise typer.Exit(2)
    now = count(gpus, only)
    if table:
        show(now)
        return
    kept = {key: before[key] for key in before.keys() - selected(before, gpus, only)}
    merged = {key: (kept | now)[key] for key in sorted(kept | now)}
    compare(selected(before, gpus, only), now, "kernel", (lambda: write(file, merged)) if update else None)


if __name__ == "__main__":
    typer.run(main)
