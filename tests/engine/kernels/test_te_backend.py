"""The Transformer Engine adapter against a fake with TE's parameters; ``tests/te`` uses the real package."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import fake_te
import library_tiles
import pytest
import torch
from oracle import Case, assert_close

from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.core.problem import CallInfo
from cp_plugin.engine.core.scaling import E4M3, E5M2
from cp_plugin.engine.kernels.backends import te, te_fp8
from cp_plugin.engine.kernels.backends.te import TransformerEngine

CUDA = torch.device("cuda")


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    fake_te.forget()
    yield monkeypatch
    fake_te.forget()


@pytest.mark.parametrize("sizes", [(16, 16), (24, 16)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_out_and_gradients(patch: pytest.MonkeyPatch, sizes: tuple[int, int], causal: bool) -> None:
    fake_te.install(patch)
    dims = {"head_dim": sizes[0], "v_head_dim": sizes[1]}
    for kv_heads in (4, 2, 1):
        case = Case(seq_length=24, heads=4, kv_heads=kv_heads, causal=causal, dtype=torch.bfloat16, **dims)
        assert_close(library_tiles.run(TransformerEngine(), case, strided=True), case.reference(), 1e-2, case)


def test_gradients_of_tiles_add_up(patch: pytest.MonkeyPatch) -> None:
    fake_te.install(patch)
    case = Case(seq_length=32, heads=4, kv_heads=2, causal=False, dtype=torch.bfloat16)
    assert_close(library_tiles.run_in_two(TransformerEngine(), case), case.reference(), 1e-2, case)


def test_own_random_generator(patch: pytest.MonkeyPatch) -> None:
    fake_te.install(patch)
    q, k, v, _ = Case(seq_length=8, heads=2, kv_heads=2, causal=True, dtype=torch.bfloat16).inputs()
    first, second = (te.forward_arguments(te.tile_arguments(q, k, v, 0, Scores(0.25)))["rng_gen"] for _ in range(2))
    assert isinstance(first, torch.Generator) and first is second is not torch.default_generator


def test_queries_both_masks(patch: pytest.MonkeyPatch) -> None:
    questions = fake_te.install(patch)
    assert TransformerEngine().unsupported(CallInfo(CUDA, torch.bfloat16, 192, 128)) is None
    assert [(a["attn_mask_type"], a["head_dim_qk"], a["head_dim_v"]) for a in questions] == [
        ("no_mask", 192, 128),
        ("causal", 192, 128),
    ]
    assert "has no kernel for no_mask, torch.bfloat16, head sizes 512, 512: too large" in refused(512)
    patch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    assert TransformerEngine().unsupported(CallInfo(CUDA, torch.bfloat16, 64, 64)) is None
    assert [a["deterministic"] for a in questions] == [False] * 3 + [True] * 2


def test_deterministic_backwards(patch: pytest.MonkeyPatch) -> None:
    fake_te.install(patch)
    q, k, v, dout = Case(seq_length=8, heads=2, kv_heads=2, causal=True, dtype=torch.bfloat16).inputs()
    tile, lse = te.tile_arguments(q, k, v, 0, Scores(0.25)), torch.zeros(q.shape[:3])
    assert te.backward_arguments(tile, dout, lse, dout)["deterministic"] is False
    patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert te.backward_arguments(tile, dout, lse, dout)["deterministic"] is True


def refused(head_dim: int = 64) -> str:
    return str(TransformerEngine().unsupported(CallInfo(CUDA, torch.bfloat16, head_dim, head_dim)))


def test_missing_libraries_are_named_with_install_advice(patch: pytest.MonkeyPatch) -> None:
    assert "CUDA" in str(TransformerEngine().unsupported(CallInfo(torch.device("cpu"), torch.bfloat16, 64, 64)))
    assert "not torch.float32" in str(TransformerEngine().unsupported(CallInfo(CUDA, torch.float32, 64, 64)))
    assert refused() == "Transformer Engine is not installed: ci/gpu/build_te.sh builds it"
    fake_te.install(patch)
    patch.setitem(sys.modules, "transformer_engine_torch", None)
    fake_te.forget()
    assert "Transformer Engine 2.20.2 does not import: " in refused() and "build_te.sh --env" in refused()


def test_unknown_versions_are_refused_by_parameter(patch: pytest.MonkeyPatch) -> None:
    fake_te.install(patch, fake_te.FORWARD.replace("attn_scale=None", "scale=None"))
    assert "not a version that this plugin can call (2.20 is): fused_attn_fwd: " in refused()
    assert refused().endswith("got an unexpected keyword argument 'attn_scale'")
    fake_te.install(patch, fake_te.FORWARD.replace("q, k, v,", "q, k, v, sink,"))
    assert "fused_attn_fwd: missing a required argument: 'sink'" in refused()
    fake_te.install(patch, FusedAttentionParams=None)
    assert "has no attribute 'FusedAttentionParams'" in refused()


def test_a_library_that_fails_when_asked(patch: pytest.MonkeyPatch) -> None:
    def query(parameters: object) -> None:
        raise RuntimeError("no driver")

    fake_te.install(patch, get_fused_attn_backend=query)
    assert refused() == "Transformer Engine 2.20.2 fails to select a kernel: no driver"


def test_an_fp8_kernel_for_some_sizes_of_tiles_is_refused(patch: pytest.MonkeyPatch) -> None:
    """As cuDNN's before 9.7; striped tokens have tiles that are one token shorter."""

    def query(question: fake_te.Call) -> tuple[fake_te.Kinds, str]:
        fits = all(question[f"max_seqlen_{side}"] % 128 == 0 for side in ("q", "kv"))
        return (fake_te.Kinds.FP8, "") if fits else (fake_te.Kinds.No_Backend, "multiples of 128")

    fake_te.install(patch, get_fused_attn_backend=query)
    patch.setattr(te_fp8, "load", lambda: SimpleNamespace(types={E4M3: "e4m3", E5M2: "e5m2"}))
    patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    reason = te_fp8.BACKEND.unsupported(CallInfo(CUDA, torch.bfloat16, 128, 128))
    assert "has no FP8 kernel for no_mask, torch.bfloat16, head sizes 128, 128: multiples of 128" in str(reason)


def test_results_of_another_shape_are_refused(patch: pytest.MonkeyPatch) -> None:
    body = fake_te.function("fused_attn_fwd", fake_te.FORWARD, lambda tile: (tile["q"], [tile["q"], None]))
    fake_te.install(patch, fused_attn_fwd=body)
    q, k, v, _ = Case(seq_length=8, heads=2, kv_heads=2, causal=True, dtype=torch.bfloat16).inputs()
    with pytest.raises(RuntimeError, match=r"for a q .*use --cp-backend sdpa"):
        TransformerEngine().forward(q, k, v, 0, Scores(0.25))
