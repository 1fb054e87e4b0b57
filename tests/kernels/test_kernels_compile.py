"""Every kernel compiles for its GPUs through its own launch; needs no GPU. Registers: ``test_sass``.

Shared memory suffices, memory is accessed 16 bytes at a time, and in-place stores wait for readers.
Compilation runs in a separate process, since kernels are interpreted in this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from nightly import each_value, nightly

SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory limit of a program in bytes, by compute capability."""
HEAD_SIZES = (*map(str, (16, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256)), "128x64", "192x128")
"""Head size of q and k, and of v where it differs."""
DTYPES = "bfloat16", "float16", "float32"
GENERATIONS = 80, 90, 100


@cache
def compiled(what: str, capability: int, *arguments: str) -> list[dict[str, Any]]:
    """Output of ``compile_kernels.py``, per launch."""
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), what, str(capability), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    launches = [json.loads(line) for line in done.stdout.splitlines()]
    assert launches
    return launches


def check(launch: dict[str, Any], capability: int) -> None:
    assert launch["shared"] <= SHARED[capability], launch
    if "onto" in launch["name"] or "into" in launch["name"]:
        assert launch["waits"], launch


@nightly
@each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", HEAD_SIZES)
@pytest.mark.parametrize("capability", SHARED)
def test_attention_of_every_head_size_compiles_and_fits(capability: int, sizes: str, dtype: str) -> None:
    launches = compiled("attention", capability, sizes, dtype)
    names = ["forward", "forward onto", "backward", "backward", "unaligned forward onto"]
    assert [launch["name"] for launch in launches] == names
    assert [launch["kernel"] for launch in launches] == ["_forward", "_forward", "_dq", "_dkv", "_forward"]
    for launch in launches:
        check(launch, capability)
        if dtype != "float32":
            assert launch["matrix products"] > 0, launch


def test_memory_bound_kernels_move_16_bytes_at_a_time() -> None:
    launches = compiled("memory", 90, "128", "bfloat16")
    assert len({launch["name"] for launch in launches}) == len(launches), "each call is one launch"
    for launch in launches:
        check(launch, 90)
        wide = {what[:2] for what in launch["instructions"] if ".v4.b32" in what or ".v2.b64" in what}
        reduces = launch["kernel"] in ("_delta_kernel", "_extents_kernel")
        assert wide == ({"ld"} if reduces else {"ld", "st"}), launch


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=nightly)])
def test_float8_instructions_are_used(capability: int) -> None:
    instructions = {
        launch["name"]: launch["instructions"] for launch in compiled("memory", capability, "128", "bfloat16")
    }
    assert instructions["pack_message"]["ld.global.v4.b32"] == 8, "a block of 16 KiB is read once, by 256 threads"
    kinds = {"pack_message": "e4m3", "unpack_message": "e4m3", "quantize e4m3": "e4m3", "quantize e5m2": "e5m2"}
    for name, kind in kinds.items():
        assert any(kind in what for what in instructions[name]) == (capability >= 89), name


@nightly
@each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [size for size in HEAD_SIZES if size.isdecimal()])
@pytest.mark.parametrize("capability", GENERATIONS)
def test_memory_bound_kernels_of_every_head_size_compile_and_fit(capability: int, size: str, dtype: str) -> None:
    for launch in compiled("memory", capability, size, dtype):
        check(launch, capability)


@nightly
@each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [*HEAD_SIZES, "320x256", "576x512"])
@pytest.mark.parametrize("capability", GENERATIONS)
def test_decode_of_every_head_size_compiles_and_fits(capability: int, sizes: str, dtype: str) -> None:
    launches = compiled("decode", capability, sizes, dtype)
    names = ["decode", "decode of 16 tokens", "decode of a packed cache"]
    names.append("decode of one sequence, heads with keys of their own")
    assert [(launch["name"], launch["kernel"]) for launch in launches] == [
        (name, kernel) for name in names for kernel in ("_decode", "_merge")
    ], "two launches for 128k slots"
    for launch in launches:
        check(launch, capability)
        if launch["kernel"] == "_decode":
            assert launch["grid"][0] * launch["grid"][1] >= 128, "programs enough for one sequence or two"
            assert launch["matrix products"] > 0 or dtype == "float32", launch


def test_in_place_stores_wait_for_readers() -> None:
    """Of all sizes and dtypes: among the kernels of attention, and of one pass over memory."""
    *right, planted = compiled("in_place", 90)
    for launch in right:
        check(launch, 90)
    assert planted["name"] == "without its barrier" and not planted["waits"]
