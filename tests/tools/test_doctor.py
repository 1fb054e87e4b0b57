"""``cp-plugin doctor``: kernels, versions, and PyPI's unrelated apex."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from commands import cp_plugin
from rich.console import Console

from cp_plugin.engine.kernels import backends, blocks
from cp_plugin.engine.kernels.backends import sdpa
from cp_plugin.engine.kernels.backends.flash import Flash
from cp_plugin.tools import doctor


def test_it_passes_here_and_names_every_kernel() -> None:
    result = cp_plugin("doctor", "--all", columns=250)
    assert result.exit_code == 0, result.output
    assert result.output.rstrip().endswith("PASS: everything required works here")
    for word in (
        *("sdpa", "cudnn", "reference", "megatron-core", "works, relative error", "cp-plugin[te]", "flash"),
        *("flash-attn not installed", "build_te.sh", "hopper"),
    ):
        assert word in " ".join(result.output.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU more can run")
def test_kernels_that_cannot_run_here_are_one_line() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    assert doctor.show(console, everything=False)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(line.rstrip()) <= 100 for line in lines) and not any("not here: " in line for line in lines)
    (line,) = [line for line in lines if line.startswith("not here, without a GPU: ")]
    assert "flash" in line and "te_fp8" in " ".join(lines) and "--all shows why" in " ".join(lines)


@pytest.mark.parametrize(
    ("version", "files", "ok", "part"),
    [
        ("", (), True, "never `pip install apex`"),
        ("0.9.10", ("__init__.py", "lib/x.py"), False, "pip uninstall apex"),
        ("0.1", ("__init__.py", "normalization/__init__.py"), True, ""),
    ],
    ids=["none", "unrelated", "nvidia"],
)
def test_apex(
    version: str, files: tuple[str, ...], ok: bool, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version:
        info = tmp_path / f"apex-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: apex\nVersion: {version}\n")
        (info / "RECORD").write_text("".join(f"apex/{name},,\n" for name in files))
        for name in files:
            (tmp_path / "apex" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "apex" / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    check = next(check for check in doctor.library_checks() if check.name == "NVIDIA Apex")
    assert check.ok == ok and part in check.result and bool(part) == bool(check.result)
    assert check.which == ("no" if not version else version if ok else f"WRONG: {version}")


def test_a_broken_kernel_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "out_from_delta", lambda dout, delta: dout)  # planted fault: wrong delta
    result = cp_plugin("doctor")
    assert result.exit_code == 1 and "FAIL: sdpa" in result.output


def test_a_broken_kernel_that_auto_does_not_take_is_shown_and_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def unbuilt(*tile: object) -> str:
        raise ModuleNotFoundError("flash_attn_2_cuda")

    monkeypatch.setattr(Flash, "unsupported", lambda *call: None)
    monkeypatch.setattr(Flash, "forward", unbuilt)
    checks = [doctor._run_tile(backends.get("flash"), torch.device("cpu"), torch.bfloat16)]
    assert checks[0].works is False and checks[0].ok and "ModuleNotFoundError: flash_attn_2_cuda" in checks[0].result
    monkeypatch.setattr(Flash, "forward", lambda self, *tile: backends.get("sdpa").forward(*tile))
    monkeypatch.setattr(Flash, "backward", lambda self, dout, q, *rest: (q, *rest[:2]))  # planted fault
    result = cp_plugin("doctor", columns=200)
    assert result.exit_code == 0 and "WRONG: relative error" in result.output
    assert "broken, but never chosen automatically: flash" in result.output


def test_the_kernel_for_blocks_of_several_tiles_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    own, tiled = backends.get("triton"), blocks.Tiled(backends.get("sdpa"))
    both = blocks.Either(tiled, blocks.InOrder(blocks.Whole(own)))
    monkeypatch.setattr(blocks, "kernel", lambda backend, *call, auto: both)  # as on CUDA
    assert doctor._run_tile(own, torch.device("cpu"), torch.bfloat16).needed
