"""The flash-attn adapter against libraries with the real parameter lists, whose bodies compute with the reference.

The bodies take what the real kernels take: ``[b, s, h, d]``, a dense last dimension, one head size where there is no
kernel for two, a dense float32 ``lse [b, h, s]``; and insist that everything the adapter does not use is off.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from oracle import Case, Result, assert_close
from torch import Tensor

from cp_plugin.backends import flash
from cp_plugin.backends.flash import Flash
from cp_plugin.backends.reference import Reference

CUDA = torch.device("cuda")

FA3_2_7 = (
    "q, k, v, k_new, v_new, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, max_seqlen_q, "
    "max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, q_descale, k_descale, v_descale, "
    "softmax_scale, causal, window_size=(-1, -1), sink_token_length=0, softcap=0.0, rotary_interleaved=True, "
    "num_splits=1, pack_gqa=None, sm_margin=0",
    "dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k, "
    "dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), sink_token_length=0, softcap=0.0, deterministic=False, "
    "sm_margin=0",
)
FA3_2_8 = (
    "q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, max_seqlen_q, "
    "max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale, "
    "v_descale, softmax_scale, causal, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
    "scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0",
    "dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k, "
    "dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0, deterministic=False, sm_margin=0",
)
FA3_2_8_4 = (
    "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None, "
    "seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None, "
    "leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None, "
    "v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, "
    "softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0",
    "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None, "
    "max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, "
    "window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0",
)
FA3_BETA_1 = (
    "q, k, v, softmax_scale, causal, window_size, descale_q=None, descale_k=None, descale_v=None, gqa_parallel=False",
    "dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, window_size, deterministic=False",
)
FA2_2_6 = (
    "q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax",
    "dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size, softcap, "
    "alibi_slopes, deterministic, rng_state=None",
)

OFF = {"softcap": 0.0, "dropout_p": 0.0, "rotary_interleaved": True, "num_splits": 1, "return_softmax": False}
OFF |= dict.fromkeys(("sm_margin", "attention_chunk", "sink_token_length"), 0)
OFF |= {"window_size": (-1, -1), "window_size_left": -1, "window_size_right": -1}
USED = {"dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv"}
USED |= {"softmax_scale", "causal", "is_causal", "deterministic"}


class Kernel:
    """What stands in for the compiled library."""

    def __init__(self, blind: float, two_sizes: bool = False) -> None:
        self.blind = blind
        """The log-sum-exp of a row without a finite score: +inf in version 2, -inf in version 3."""
        self.two_sizes = two_sizes
        self.deterministic: list[bool] = []
        self.head_sizes: list[tuple[int, int]] = []

    def check(self, given: dict[str, Any], tensors: str) -> tuple[Tensor, ...]:
        """The named tensors as ``[s, b, h, d]``."""
        for name, value in given.items():
            if name not in USED or (name == "out" and "dout" not in given):
                assert value == OFF.get(name), f"{name} is {value}"
        found = [given[name] for name in tensors.split()]
        assert all(x.stride(-1) == 1 and x.dtype == torch.bfloat16 for x in found)
        q, v = given["q"], given["v"]
        self.head_sizes.append((q.size(3), v.size(3)))
        assert self.two_sizes or len({x.size(3) for x in found}) == 1
        return tuple(x.transpose(0, 1) for x in found)

    def forward(self, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        q, k, v = self.check(given, "q k v")
        out, lse = Reference().forward(q, k, v, diagonal(q, k, given), given["softmax_scale"])
        lse = lse.masked_fill(lse == -torch.inf, self.blind)
        return out.transpose(0, 1).contiguous(), lse.permute(1, 2, 0).contiguous()

    def backward(self, given: dict[str, Any]) -> Tensor:
        dout, q, k, v, out = self.check(given, "dout q k v out")
        lse = given["softmax_lse"]
        assert lse.dtype == torch.float32 and lse.is_contiguous() and lse.shape == (q.size(1), q.size(2), q.size(0))
        self.deterministic.append(given["deterministic"])
        delta = (dout.float() * out.float()).sum(-1)
        scale = given["softmax_scale"]
        grads = Reference().backward(dout, q, k, v, lse.permute(2, 0, 1), delta, diagonal(q, k, given), scale)
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            assert given[name].dtype == grad.dtype and given[name].shape == grad.transpose(0, 1).shape
            given[name].copy_(grad.transpose(0, 1))
        return delta.permute(1, 2, 0).contiguous()


def diagonal(q: Tensor, k: Tensor, given: dict[str, Any]) -> int:
    causal = given.get("is_causal", given.get("causal"))
    assert isinstance(causal, bool)
    return 0 if causal else k.size(0) - 1


def function(name: str, parameters: str, body: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """A plain Python function with these parameters."""
    scope: dict[str, Any] = {"body": body}
    exec(f"def {name}({parameters}):\n    return body(locals())", scope)
    return scope[name]


fa2 = Kernel(blind=torch.inf)


@torch.library.custom_op("cp_plugin_tests::_flash_attn_forward", mutates_args=())
def fa2_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *fa2.forward(locals()), q.new_empty(0), torch.empty(2, dtype=torch.int64)


@torch.library.custom_op("cp_plugin_tests::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def fa2_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    return fa2.backward(locals())


class Machine:
    """Which generations this process finds, on which GPU."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        for name in ("flash_attn", "flash_attn_interface", "flash_attn_config"):
            patch.setitem(sys.modules, name, None)
        self.gpu((9, 0))

    def gpu(self, capability: tuple[int, int]) -> None:
        self.patch.setattr(flash, "capability", lambda device: capability)
        flash._chosen.cache_clear()

    def module(self, name: str, **content: Any) -> None:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(content)
        self.patch.setitem(sys.modules, name, module)
        flash._chosen.cache_clear()

    def flash2(self, forward: Any = fa2_forward, backward: Any = fa2_backward) -> Kernel:
        self.module("flash_attn")
        content = {"_flash_attn_forward": forward, "_flash_attn_backward": backward}
        self.module("flash_attn.flash_attn_interface", **content)
        fa2.deterministic.clear()
        fa2.head_sizes.clear()
        return fa2

    def flash3(self, parameters: tuple[str, str], **flags: bool) -> Kernel:
        kernel = Kernel(-torch.inf, two_sizes=parameters is FA3_2_8_4)
        parts = {}
        for name, names, body in zip(
            ("forward", "backward"), parameters, (kernel.forward, kernel.backward), strict=True
        ):
            parts[f"_flash_attn_{name}"] = function(f"_flash_attn_{name}", names, body)
        self.module("flash_attn_interface", **parts)
        if flags:
            self.module("flash_attn_config", CONFIG={"build_flags": flags})
        return kernel


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    yield Machine(monkeypatch)
    flash._chosen.cache_clear()


def run(case: Case) -> Result:
    """A causal or full tile of every other row, with a log-sum-exp as a merge leaves it: ``[s, b, h]``, dense."""
    inputs = case.inputs()
    q, k, v, dout = (torch.stack((x, x.flip(0)), 1).flatten(0, 1)[::2] for x in inputs)
    diagonal, scale, kernel = 0 if case.causal else case.seq_length, case.head_dim**-0.5, Flash()
    out, lse = kernel.forward(q, k, v, diagonal, scale)
    assert out.dtype == case.dtype and lse.dtype == torch.float32
    term = kernel.row_term(dout, (dout.float() * out.float()).sum(-1))
    return Result(out, *kernel.backward(dout, q, k, v, lse.contiguous(), term, diagonal, scale))


GENERATIONS = {
    "2.7 to 2.8": lambda machine: machine.flash2(),
    "3 of 2.7": lambda machine: machine.flash3(FA3_2_7),
    "3 of 2.8": lambda machine: machine.flash3(FA3_2_8),
    "3 of 2.8.4": lambda machine: machine.flash3(FA3_2_8_4),
}


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("sizes", [(16, 16), (192, 128), (16, 8)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_out_and_gradients(machine: Machine, generation: str, sizes: tuple[int, int], causal: bool) -> None:
    kernel = GENERATIONS[generation](machine)
    dims = {"head_dim": sizes[0], "v_head_dim": sizes[1]}
    for kv_heads in (4, 2, 1):
        case = Case(seq_length=24, heads=4, kv_heads=kv_heads, causal=causal, dtype=torch.bfloat16, **dims)
        assert_close(run(case), case.reference(), 1e-2, case)
    native = generation == "3 of 2.8.4" and sizes == (192, 128)
    assert set(kernel.head_sizes) == {sizes if native else (max(sizes), max(sizes))}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_tile_of_a_longer_row_has_its_share_of_the_gradients(machine: Machine, generation: str) -> None:
    """Two tiles over the halves of the keys, with the log-sum-exp of both: their gradients add up to the whole's."""
    GENERATIONS[generation](machine)
    case = Case(seq_length=32, heads=4, kv_heads=2, causal=False, dtype=torch.bfloat16)
    (q, k, v, dout), want = case.inputs(), case.reference()
    halves = [(k[i::2], v[i::2]) for i in range(2)]  # every other row: strided views
    parts = [Flash().forward(q, *half, 32, 0.25) for half in halves]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(torch.exp(part[1] - lse).unsqueeze(-1) * part[0] for part in parts)
    term = Flash().row_term(dout, (dout.float() * out).sum(-1))
    grads = [Flash().backward(dout, q, *half, lse, term, 32, 0.25) for half in halves]
    dk, dv = (torch.stack((grads[0][i], grads[1][i]), 1).flatten(0, 1) for i in (1, 2))
    assert_close(Result(out, grads[0][0].float() + grads[1][0], dk, dv), want, 1e-2, generation)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_rows_without_a_finite_score(machine: Machine, generation: str) -> None:
    GENERATIONS[generation](machine)
    q, k, v, _ = Case(seq_length=8, heads=1, kv_heads=1, causal=True, dtype=torch.bfloat16, batch=1).inputs()
    q[:, :, :, 0], k[:3, :, :, 0] = 1, -torch.inf
    assert Flash().forward(q, k, v, 0, 1.0)[1].flatten().isneginf().tolist() == [True] * 3 + [False] * 5


def test_the_newer_generation_is_taken_where_it_runs(machine: Machine) -> None:
    two, three = machine.flash2(), machine.flash3(FA3_2_8)
    case = Case(seq_length=8, heads=2, kv_heads=2, causal=True, dtype=torch.bfloat16)
    run(case)
    assert three.head_sizes and not two.head_sizes
    machine.gpu((8, 0))
    run(case)
    assert len(two.head_sizes) == len(three.head_sizes) == 2


def test_torchs_deterministic_mode_reaches_the_backward(machine: Machine) -> None:
    kernel = machine.flash3(FA3_2_8)
    case = Case(seq_length=8, heads=2, kv_heads=2, causal=True, dtype=torch.bfloat16)
    run(case)
    torch.use_deterministic_algorithms(True)
    try:
        run(case)
        assert "no deterministic backward for head size 256" in refused(256, 256)
    finally:
        torch.use_deterministic_algorithms(False)
    assert kernel.deterministic == [False, True] and Flash().unsupported(CUDA, torch.bfloat16, 256, 256) is None


def refused(head_dim: int = 64, v_head_dim: int = 64) -> str:
    reason = Flash().unsupported(CUDA, torch.bfloat16, head_dim, v_head_dim)
    assert reason is not None
    return reason


def test_what_is_missing_is_named_with_how_to_get_it(machine: Machine) -> None:
    assert "CUDA" in str(Flash().unsupported(torch.device("cpu"), torch.bfloat16, 64, 64))
    assert "not torch.float32" in str(Flash().unsupported(CUDA, torch.float32, 64, 64))
    assert "flash-attn 2 is not installed: pip install" in refused() and "build the folder hopper" in refused()
    machine.flash2()
    assert Flash().unsupported(CUDA, torch.float16, 256, 8) is None
    assert "multiples of 8 up to 256, not 60" in refused(60, 64) and "not 264" in refused(128, 264)
    machine.gpu((7, 5))
    assert "needs Ampere or newer, not compute capability 7.5" in refused()


def test_what_flash_attention_3_was_built_without(machine: Machine) -> None:
    kernel = machine.flash3(FA3_2_8_4, FLASHATTENTION_DISABLE_HDIM256=True, FLASH_ATTENTION_DISABLE_HDIMDIFF192=True)
    assert "multiples of 8 up to 192, not 256" in refused(256, 256)
    run(Case(seq_length=8, heads=2, kv_heads=2, causal=True, dtype=torch.bfloat16, head_dim=192, v_head_dim=128))
    assert set(kernel.head_sizes) == {(192, 192)}
    machine.flash3(FA3_2_8_4, FLASHATTENTION_DISABLE_BACKWARD=True)
    assert "built without a backward" in refused()


def test_versions_that_are_not_known_are_refused_by_the_name_that_differs(machine: Machine) -> None:
    machine.flash3(FA3_BETA_1)
    assert "flash-attn-3 of unknown version is not a version" in refused() and "'cu_seqlens_q'" in refused()
    machine.flash3((FA3_2_8[0].replace("qv,", "qv, head_mask,"), FA3_2_8[1]))
    assert "_flash_attn_forward needs 'head_mask', which is unknown here" in refused()
    machine.flash3((FA3_2_8[0], FA3_2_8[1].replace("softmax_lse", "lse")))
    assert "_flash_attn_backward has no parameter 'softmax_lse'" in refused()
    body = fa2.forward
    machine.flash2(
        *(function(f"_flash_attn_{n}", p, body) for n, p in zip(("forward", "backward"), FA2_2_6, strict=True))
    )
    assert "'window_size_left'" in refused()
    machine.flash2(forward=None)
    assert "is not a version" in refused()


def test_results_in_another_order_are_not_taken(machine: Machine) -> None:
    kernel = machine.flash3(FA3_2_8)
    parts = sys.modules["flash_attn_interface"]
    parts._flash_attn_forward = function("f", FA3_2_8[0], lambda given: kernel.forward(given)[::-1])
    case = Case(seq_length=8, heads=2, kv_heads=2, causal=True, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"flash-attn-3 of unknown version answers .*use --cp-backend sdpa"):
        run(case)


def test_only_tiles_it_can_do() -> None:
    q, k, v, _ = Case(seq_length=8, heads=2, kv_heads=2, causal=True, dtype=torch.bfloat16).inputs()
    with pytest.raises(AssertionError, match="diagonal -1, must be cut"):
        Flash().forward(q, k, v, -1, 0.25)
