"""Triton kernels of flash-linear-attention (``fla-core``, arXiv 2312.06635) for CUDA.

Layout ``[b, t, heads, size]``, as many key/value heads as query heads; autograd is fla's own, and the backward pass
recomputes the forward. Packed documents use the chunked kernel, since fla supports them only for batch size 1.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cp_plugin.engine.common.versions import version_tuple
from cp_plugin.engine.core.dtypes import accumulation_dtype
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.linear.rules import rule_of
from cp_plugin.engine.linear.tokens import Tokens

MINIMUM = "0.5.2"
"""Before it, gradients of keys and beta under the delta rule without decay are wrong on Hopper, where four warps of
``prepare_wy_repr_bwd_kernel`` are miscompiled (fla issue 984), and the check of ``_miscompiled`` has no upper bound."""
WRONG_TRITON = "3.4.0", "3.7.1"
"""First and first good version of Triton by which fla's gated backward is miscompiled on Hopper (fla issue 640)."""
LARGEST_KEY = 256
"""Key dimensions of a state that its kernels of the delta rule hold."""


@cache
def installed() -> bool:
    return importlib.util.find_spec("fla") is not None


@cache
def version() -> str:
    """Return fla-core's version; that of ``MINIMUM`` for a source tree without metadata."""
    try:
        return importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return MINIMUM


@cache
def triton_version() -> str:
    from triton import __version__

    return __version__


def unsupported(device: torch.device, problem: Problem) -> str | None:
    """Return why its kernels cannot compute the call, whatever is installed; None if they can."""
    if device.type != "cuda":
        return f"its Triton kernels need a CUDA device, not {device.type}"
    if problem.dtype == torch.float64:
        return "its Triton kernels do not support float64"
    if problem.delta and problem.dtype == torch.float32:
        return "its delta-rule kernels support only half precision"
    if problem.delta and problem.head_dim > LARGEST_KEY:
        return f"its delta-rule kernels support keys of at most {LARGEST_KEY} dimensions, not {problem.head_dim}"
    if problem.documents:
        return "its kernels support packed documents only with batch size 1"
    return None


def lacking(device: torch.device, problem: Problem) -> str | None:
    """Return what a CUDA device and its software lack for a supported call, and what to do; None if fla runs here.

    Rules of fla-core 0.6.0, which otherwise raises in the first backward, and of Triton.
    """
    if not installed():
        return "flash-linear-attention is not installed (pip install 'cp-plugin[fla]')"
    if version_tuple(version()) < version_tuple(MINIMUM):
        return f"fla-core {version()} is too old (pip install 'fla-core>={MINIMUM}')"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        shown = ".".join(map(str, capability))
        return f"its Triton kernels need a GPU of compute capability 8.0 (Ampere) or newer, but this one has {shown}"
    if capability[0] == 9 and _miscompiled(problem):
        bad, good = WRONG_TRITON
        return (
            f"Triton {triton_version()} miscompiles the backward pass of its kernels with a decay per head or token on "
            f"Hopper GPUs, and fla refuses to run it: Triton {good} or newer, or one before {bad}, is needed"
        )
    return None


def _miscompiled(problem: Problem) -> bool:
    """Return True if ``chunk_bwd_dqkwg`` with a gate would be compiled on Hopper by a Triton that does so wrongly.

    Only ``chunk_simple_gla`` and ``chunk_gated_delta_rule`` call it with one. For the latter fla takes TileLang's
    kernel instead where that can be compiled; for the former never, since it holds states in float32.
    """
    bad, good = map(version_tuple, WRONG_TRITON)
    gated = problem.decay in ("head", "token")
    return gated and bad <= version_tuple(triton_version()) < good and not (problem.delta and _tilelang())


def _tilelang() -> bool:
    """Return True if fla can compile TileLang's kernels; not seen is an nvcc in the wheel ``nvidia-cuda-nvcc``."""
    if os.environ.get("FLA_TILELANG") == "0" or importlib.util.find_spec("tilelang") is None:
        return False
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    return any(shutil.which("nvcc", path=f"{home}/bin") for home in homes if home) or shutil.which("nvcc") is not None


def forward(x: Tokens) -> Tensor:
    """Causal linear attention of each segment from a zero state: ``[t, b, h, e]`` in the accumulation dtype."""
    return _call(x)[0].to(accumulation_dtype(x.q.dtype))


def run(x: Tokens, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Outputs ``[t, b, h, e]`` in q's dtype, and the final state ``[b, g, d, e]``; differentiable.

    States are in the accumulation dtype. initial: the state before the first token; None: zero.
    """
    repeat = x.q.size(2) // x.k.size(2)
    state = None if initial is None else _repeat_heads(initial, repeat, 1).contiguous()
    out, final = _call(x, initial_state=state, output_final_state=True)
    return out, final[:, ::repeat]


def _call(x: Tokens, **of_states: Any) -> tuple[Tensor, Any]:
    repeat, wide = x.q.size(2) // x.k.size(2), accumulation_dtype(x.q.dtype)
    q, k, v = (_repeat_heads(y, n, 2).transpose(0, 1) for y, n in ((x.q, 1), (x.k, repeat), (x.v, repeat)))
    decay, beta = (
        None if y is None else _repeat_heads(y.to(wide), repeat, 2).transpose(0, 1) for y in (x.log_decay, x.beta)
    )
    if decay is not None:
        decay = _even(decay) if decay.size(3) > 1 else decay[..., 0]
    d, e = k.size(3), v.size(3)
    if of_states.get("initial_state") is not None:
        of_states["initial_state"] = _even(_even(of_states["initial_state"]).mT).mT.contiguous()
    beside = {name: y.contiguous() for name, y in (("g", decay), ("beta", beta)) if y is not None}
    out, final = _function(x)(*(_even(y).contiguous() for y in (q, k, v)), scale=1.0, **beside, **of_states)
    return out[..., :e].transpose(0, 1), None if final is None else final[..., :d, :e]


def _function(x: Tokens) -> Any:
    """The kernel of the tokens' rule and decay."""
    decay = 0 if x.log_decay is None else 1 if x.log_decay.size(3) == 1 else 2
    name = rule_of(x).fla[decay]
    return getattr(importlib.import_module(f"fla.ops.{name}"), f"chunk_{name}")


def _repeat_heads(y: Tensor, repeat: int, dim: int) -> Tensor:
    """Repeat key/value heads, once for each of their query heads."""
    return y if repeat == 1 else y.repeat_interleave(repeat, dim)


def _even(y: Tensor) -> Tensor:
    """Append a column of zeros if the number of columns is odd.

    Triton miscompiles loads of an odd row in half precision: fla-core 0.6.0 refuses them, earlier versions read beyond.
    Normalised kinds have odd values, as they append a one.
    """
    return pad(y, (0, 1)) if y.size(-1) % 2 else y
