"""The flash-attn adapter against libraries with the real parameter lists, whose bodies compute with the reference.

See ``fake_flash``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from unittest.mock import patch

import library_tiles
import pytest
import torch
from fake_flash import FA3_2_8, FA3_LATER, FA4, Kernel, Machine, parameters
from library_signatures import function, versions
from oracle import Case, Result, assert_close

from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.core.problem import CallInfo
from cp_plugin.engine.kernels.backends import flash
from cp_plugin.engine.kernels.backends.flash import Flash

CUDA = torch.device("cuda")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    yield Machine(monkeypatch)
    flash._chosen.cache_clear()


def run(case: Case) -> Result:
    return library_tiles.run(Flash(), case, strided=True)


def unsupported(kernel: Flash, head_dim: int = 64, v_head_dim: int = 64) -> str | None:
    return kernel.unsupported(CallInfo(CUDA, torch.bfloat16, head_dim, v_head_dim))


def refused(head_dim: int = 64, v_head_dim: int = 64) -> str:
    return str(unsupported(Flash(), head_dim, v_head_dim))


TOO_OLD = {("flash-attn 2", "2.6.3"): "'window_size_left'", ("flash-attn 3", "2.7.0"): "'cu_seqlens_q'"}
TOO_OLD |= {("flash-attn 4", "4.0.0b3"): "'min_seqlen_k'"}
"""Versions that are refused, and the name by which."""


def install(machine: Machine, library: str, version: str) -> Kernel:
    """Fake that version on its GPU."""
    generation = int(library[-1])
    install = {2: machine.flash2, 3: machine.flash3, 4: machine.flash4}[generation]
    kernel = install(parameters(library, version))
    machine.gpu({2: (8, 0), 3: (9, 0), 4: (10, 0)}[generation])
    return kernel


FLASH = [(library, v) for library in ("flash-attn 2", "flash-attn 3", "flash-attn 4") for v in versions(library)]
TAKEN = [version for version in FLASH if version not in TOO_OLD]
taken = pytest.mark.parametrize(("library", "version"), TAKEN, ids=map(" ".join, TAKEN))


def test_recorded_versions(machine: Machine) -> None:
    for library, version in FLASH:
        install(machine, library, version)
        reason = unsupported(Flash(generation=int(library[-1])))
        assert (reason is None) == ((library, version) in TAKEN), (library, version, reason)
        assert TOO_OLD.get((library, version), "None") in str(reason)


@taken
@pytest.mark.parametrize("sizes", [(16, 16), (192, 128), (16, 8)], ids=str)
def test_out_and_gradients(machine: Machine, library: str, version: str, sizes: tuple[int, int]) -> None:
    kernel = install(machine, library, version)
    for kv_heads, causal in product((4, 2, 1), (True, False)):
        dims = {"kv_heads": kv_heads, "head_dim": sizes[0], "v_head_dim": sizes[1]}
        case = Case(seq_length=24, heads=4, causal=causal, dtype=torch.bfloat16, **dims)
        assert_close(run(case), case.reference(), 1e-2, case)
    native = kernel.two_sizes and sizes == (192, 128)
    assert set(kernel.head_sizes) == {sizes if native else (max(sizes), max(sizes))}


@taken
def test_capped_scores(machine: Machine, library: str, version: str) -> None:
    install(machine, library, version)
    call = CallInfo(CUDA, torch.bfloat16, 16, 16, softcap=True)
    if library == "flash-attn 4":
        assert "flash-attn-4 of unknown version does not cap scores (softcap)" in str(Flash().unsupported(call))
        return
    case = Case(seq_length=24, heads=4, kv_heads=2, causal=True, dtype=torch.bfloat16, softcap=0.5)
    assert Flash().unsupported(call) is None
    assert_close(run(case), case.reference(), 1e-2, case)


def test_a_build_without_caps_is_refused(machine: Machine) -> None:
    machine.flash3(FA3_2_8, FLASHATTENTION_DISABLE_SOFTCAP=True)
    reason = Flash(generation=3).unsupported(CallInfo(CUDA, torch.bfloat16, 16, 16, softcap=True))
    assert reason is not None and reason.endswith("does not cap scores (softcap)")


@taken
def test_gradients_of_tiles_add_up(machine: Machine, library: str, version: str) -> None:
    install(machine, library, version)
    case = Case(seq_length=32, heads=4, kv_heads=2, causal=False, dtype=torch.bfloat16)
    assert_close(library_tiles.run_in_two(Flash(), case), case.reference(), 1e-2, version)


@taken
def test_rows_without_a_finite_score(machine: Machine, library: str, version: str) -> None:
    install(machine, library, version)
    q, k, v, _ = Case(seq_length=8, heads=1, kv_heads=1, causal=True, dtype=torch.bfloat16, batch=1).inputs()
    q[:, :, :, 0], k[:3, :, :, 0] = 1, -torch.inf
    assert Flash().forward(q, k, v, 0, Scores(1.0))[1].flatten().isneginf().tolist() == [True] * 3 + [False] * 5


def test_generation_per_gpu(machine: Machine) -> None:
    two, three, newest = machine.flash2(), machine.flash3(FA3_2_8), machine.flash4()
    case = Case(seq_length=8, heads=2, kv_heads=2, causal=True, dtype=torch.bfloat16)
    for capability, taken in (((9, 0), three), ((10, 0), newest), ((10, 3), newest), ((8, 9), two), ((12, 0), two)):
        machine.gpu(capability)
        before = {kernel: len(kernel.head_sizes) for kernel in (two, three, newest)}
        run(case)
        assert [k for k in before if len(k.head_sizes) > before[k]] == [taken], capability
    machine.gpu((10, 0))
    assert (
        unsupported(Flash(generation=3)) == "flash-attn-3 of unknown version needs Hopper, not compute capability 10.0"
    )


def test_limits_of_version_4(machine: Machine) -> None:
    machine.flash4()
    reason = partial(unsupported, Flash(generation=4))
    assert reason(128, 128) is None and reason(64, 128) is None
    assert "up to 128 on compute capability 9.x, not 192 with 128" in str(reason(192, 128))
    machine.gpu((10, 0))
    assert reason(192, 128) is None
    for sizes in ((256, 256), (60, 60), (192, 192)):
        assert f"up to 128, or 192 with 128 on compute capability 10.x, not {sizes[0]}" in str(reason(*sizes))
    with patch.object(torch, "are_deterministic_algorithms_enabled", lambda: True):
        assert reason(128, 128) is None
        machine.gpu((9, 0))
        assert "deterministic backward on Hopper" in str(reason(128, 128))
    machine.flash4((FA4[0].replace("q, k,", "q, k, tail,"), FA4[1]))
    assert "(4.0.0b36 is): _flash_attn_fwd: missing a required argument: 'tail'" in str(reason())
    machine.flash4((FA4[0], FA4[1].replace(" lse,", " statistics,", 1)))
    assert "_flash_attn_bwd: missing a required argument: 'statistics'" in str(reason())


def test_torchs_deterministic_mode_reaches_the_backward(machine: Machine) -> None:
    kernel = machine.flash3(FA3_2_8)
    case = Case(seq_length=8, heads=2, kv_heads=2, causal=True, dtype=torch.bfloat16)
    run(case)
    with patch.object(torch, "are_deterministic_algorithms_enabled", lambda: True):
        run(case)
        assert "no deterministic backward for head size 256" in refused(256, 256)
    assert kernel.deterministic == [False, True] and unsupported(Flash(), 256, 256) is None


def test_missing_libraries_are_named_with_install_advice(machine: Machine) -> None:
    assert "CUDA" in str(Flash().unsupported(CallInfo(torch.device("cpu"), torch.bfloat16, 64, 64)))
    assert "not torch.float32" in str(Flash().unsupported(CallInfo(CUDA, torch.float32, 64, 64)))
    assert "flash-attn 2 is not installed: pip install" in refused() and "build the folder hopper" in refused()
    assert "flash-attn 4 is not installed: pip install --pre flash-attn-4" in refused()
    machine.flash2()
    assert Flash().unsupported(CallInfo(CUDA, torch.float16, 256, 8)) is None
    assert "multiples of 8 up to 256, not 60" in refused(60, 64) and "not 264" in refused(128, 264)
    machine.gpu((7, 5))
    assert "needs Ampere or newer, not compute capability 7.5" in refused()


def test_build_flags_of_flash_attention_3(machine: Machine) -> None:
    kernel = machine.flash3(FA3_LATER, FLASHATTENTION_DISABLE_HDIM256=True, FLASH_ATTENTION_DISABLE_HDIMDIFF192=True)
    assert "multiples of 8 up to 192, not 256" in refused(256, 256)
    run(Case(seq_length=8, heads=2, kv_heads=2, causal=True, dtype=torch.bfloat16, head_dim=192, v_head_dim=128))
    assert set(kernel.head_sizes) == {(192, 192)}
    machine.flash3(FA3_LATER, FLASHATTENTION_DISABLE_BACKWARD=True)
    assert "built without a backward pass" in refused()


def test_unknown_versions_are_refused_by_parameter(machine: Machine) -> None:
    machine.flash3((FA3_2_8[0].replace("qv,", "qv, head_mask,"), FA3_2_8[1]))
    assert "_flash_attn_forward: missing a required argument: 'head_mask'" in refused()
    machine.flash3((FA3_2_8[0], FA3_2_8[1].replace("softmax_lse", "lse")))
    assert "_flash_attn_backward: missing a required argument: 'lse'" in refused()
    machine.module("flash_attn.flash_attn_interface", _flash_attn_forward=None)
    assert "is not a version" in refused()


def test_results_in_another_order_are_refused(machine: Machine) -> None:
    kernel = machine.flash3(FA3_2_8)
    parts = sys.modules["flash_attn_interface"]
    parts._flash_attn_forward = function("f", FA3_2_8[0], lambda arguments: kernel.forward(arguments)[::-1])
    case = Case(seq_length=8, heads=2, kv_heads=2, causal=True, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"flash-attn-3 of unknown version returned .*use --cp-backend sdpa"):
        run(case)


def test_uncut_tiles_are_refused() -> None:
    q, k, v, _ = Case(seq_length=8, heads=2, kv_heads=2, causal=True, dtype=torch.bfloat16).inputs()
    with pytest.raises(AssertionError, match="diagonal -1, must be cut"):
        Flash().forward(q, k, v, -1, Scores(0.25))


def test_flash_attention_4_is_not_taken_for_version_2(machine: Machine) -> None:
    machine.flash4()
    machine.gpu((8, 0))
    assert "flash-attn 2 is not installed" in str(unsupported(Flash(generation=2)))
