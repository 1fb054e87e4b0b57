"""The library flash-attn: FlashAttention-3 on Hopper where it is installed, else FlashAttention-2 (2.7 or newer).

Both are called below their autograd functions, where the backward takes the log-sum-exp of each row over all its keys
(arXiv 2307.08691, 2407.08608; github.com/Dao-AILab/flash-attention: flash_attn/flash_attn_interface.py and
hopper/flash_attn_interface.py). They take ``[b, s, h, d]`` with any strides but the last, ``lse [b, h, s]`` in natural
logarithms, and grouped key/value heads as they are. Versions are told apart by the parameters of their functions.

Not measured on a GPU yet; ``auto`` prefers ``sdpa``, so it runs only when asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from cp_plugin.backends.sdpa import is_causal, minus_infinity, one_head_size
from cp_plugin.backends.signatures import Bound, bind, parameters
from cp_plugin.backends.stand_in import out_from_delta

_OFF: Mapping[str, Any] = {
    "dropout_p": 0.0,
    "softcap": 0.0,
    "window_size": (-1, -1),
    "window_size_left": -1,
    "window_size_right": -1,
    "alibi_slopes": None,
    "return_softmax": False,
    "rng_state": None,
    **dict.fromkeys(("k_new", "v_new", "qv", "out", "out_", "page_table", "kv_batch_idx", "leftpad_k")),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "max_seqlen_q", "max_seqlen_k")),
    **dict.fromkeys(("seqused_q", "seqused_k", "sequed_q", "sequed_k")),
    **dict.fromkeys(("rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale")),
}
"""Values with which everything but plain attention is off."""


@dataclass(frozen=True, slots=True)
class Library:
    """One installed generation of the library, bound to its functions."""

    title: str
    forward: Bound
    backward: Bound
    causal: str
    """What the backward calls the parameter that the forward calls ``causal``."""
    largest: int
    """The largest head size it was built for; sizes are multiples of 8."""
    two_sizes: bool
    """Whether it has kernels for query/key heads of 136 to 192 with value heads of 104 to 128."""

    def unsupported(self, head_dim: int, v_head_dim: int, deterministic: bool) -> str | None:
        size = max(head_dim, v_head_dim)
        if head_dim % 8 or v_head_dim % 8 or size > self.largest:
            wrong = head_dim if head_dim % 8 else v_head_dim if v_head_dim % 8 else size
            return f"{self.title} takes head sizes that are multiples of 8 up to {self.largest}, not {wrong}"
        if deterministic and size > 192 and self.title.startswith("flash-attn-3"):
            return f"{self.title} has no deterministic backward for head size {size}"
        return None

    def fit(self, head_dim: int, v_head_dim: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors as it takes them: without kernels for two head sizes, the smaller heads get zeros behind them."""
        as_they_are = self.two_sizes and 128 < head_dim <= 192 and 96 < v_head_dim <= 128
        return tensors if as_they_are else one_head_size(*tensors)


@dataclass(frozen=True, slots=True)
class Flash:
    """flash-attn 2 or 3."""

    name: str = "flash"
    any_diagonal: bool = False

    def unsupported(self, device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> str | None:
        if device.type != "cuda":
            return "flash-attn runs on CUDA devices only"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"flash-attn takes bfloat16 and float16, not {dtype}"
        chosen = _chosen(device, head_dim, v_head_dim, torch.are_deterministic_algorithms_enabled())
        return chosen if isinstance(chosen, str) else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, diagonal: int, scale: float) -> tuple[Tensor, Tensor]:
        sizes, causal = (q.size(3), v.size(3)), is_causal(q, k, diagonal)
        library = _library(q.device, *sizes)
        q, k, v = map(_batch_first, library.fit(*sizes, q, k, v))
        out, lse, *_ = library.forward(q=q, k=k, v=v, softmax_scale=scale, causal=causal)
        batch, rows, heads, _ = q.shape
        if out.shape != (batch, rows, heads, v.size(3)) or lse.shape != (batch, heads, rows):
            raise RuntimeError(
                f"{library.title} answers a q {tuple(q.shape)} with an out {tuple(out.shape)} and a log-sum-exp "
                f"{tuple(lse.shape)}: not a version this plugin knows; use --cp-backend sdpa"
            )
        return _batch_first(out)[..., : sizes[1]], minus_infinity(lse).permute(2, 0, 1)

    def row_term(self, dout: Tensor, delta: Tensor) -> Tensor:
        return out_from_delta(dout, delta)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, row_term: Tensor, diagonal: int, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        sizes, causal = (q.size(3), k.size(3), v.size(3)), is_causal(q, k, diagonal)
        library = _library(q.device, q.size(3), v.size(3))
        dout, q, k, v, out = library.fit(q.size(3), v.size(3), dout, q, k, v, row_term)
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
        dout, q, k, v, out, dq, dk, dv = map(_batch_first, (dout, q, k, v, out, *grads))
        library.backward(
            dout=dout,
            q=q,
            k=k,
            v=v,
            out=out,
            softmax_lse=lse.permute(1, 2, 0).contiguous(),
            dq=dq,
            dk=dk,
            dv=dv,
            softmax_scale=scale,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **{library.causal: causal},
        )
        dq, dk, dv = (grad[..., :size] for grad, size in zip(grads, sizes, strict=True))
        return dq, dk, dv


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


def _library(device: torch.device, head_dim: int, v_head_dim: int) -> Library:
    chosen = _chosen(device, head_dim, v_head_dim, torch.are_deterministic_algorithms_enabled())
    if isinstance(chosen, str):
        raise ValueError(chosen)
    return chosen


@lru_cache
def _chosen(device: torch.device, head_dim: int, v_head_dim: int, deterministic: bool) -> Library | str:
    """The generation to run such heads with, or why there is none."""
    reasons = []
    for load, runs_on, which in ((_flash3, (9,), "Hopper"), (_flash2, range(8, 99), "Ampere or newer")):
        try:
            library = load()
        except (ImportError, TypeError) as wrong:
            reasons.append(str(wrong))
            continue
        major, minor = capability(device)
        if major not in runs_on:
            reasons.append(f"{library.title} needs {which}, not compute capability {major}.{minor}")
        elif (reason := library.unsupported(head_dim, v_head_dim, deterministic)) is not None:
            reasons.append(reason)
        else:
            return library
    return "; ".join(reasons)


def _flash2() -> Library:
    if find_spec("flash_attn") is None:
        raise ImportError("flash-attn 2 is not installed: pip install --no-build-isolation 'flash-attn>=2.7' (hours)")
    module = import_module("flash_attn.flash_attn_interface")
    return _bound(f"flash-attn {_version('flash-attn')}", module, ("dropout_p", "window_size_left"))


def _flash3() -> Library:
    if find_spec("flash_attn_interface") is None:
        raise ImportError(
            "flash-attn 3 is not installed: build the folder hopper of github.com/Dao-AILab/flash-attention"
        )
    module = import_module("flash_attn_interface")
    library = _bound(f"flash-attn-3 {_version('flash_attn_3', 'flashattn-hopper')}", module, ("cu_seqlens_q",))
    flags = import_module("flash_attn_config").CONFIG["build_flags"] if find_spec("flash_attn_config") else {}
    if flags.get("FLASHATTENTION_DISABLE_BACKWARD"):
        raise ImportError(f"{library.title} was built without a backward")
    built = [size for size in (64, 96, 128, 192, 256) if not flags.get(f"FLASHATTENTION_DISABLE_HDIM{size}")]
    # the releases with this parameter have a backward for two head sizes, the ones before not all
    two_sizes = "window_size_left" in parameters(module._flash_attn_forward)
    without = flags.get("FLASHATTENTION_DISABLE_HDIM192") or flags.get("FLASH_ATTENTION_DISABLE_HDIMDIFF192")
    return replace(library, largest=max(built, default=0), two_sizes=two_sizes and not without)


def _bound(title: str, module: Any, marks: tuple[str, ...]) -> Library:
    """A generation with one head size up to 256. ``marks``: what the forward of versions that are too old lacks.

    Raises:
        TypeError: if its functions are not as expected.
    """
    shared = ("q", "k", "v", "softmax_scale")
    try:
        forward, backward = module._flash_attn_forward, module._flash_attn_backward
        causal = "is_causal" if "is_causal" in parameters(backward) else "causal"
        rest = ("dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic", causal)
        return Library(
            title=title,
            forward=bind(forward, (*shared, "causal"), _OFF, marks),
            backward=bind(backward, (*shared, *rest), _OFF),
            causal=causal,
            largest=256,
            two_sizes=False,
        )
    except (AttributeError, TypeError) as wrong:
        raise TypeError(f"{title} is not a version this plugin can call: {wrong}") from None


def _version(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of unknown version"


def _batch_first(x: Tensor) -> Tensor:
    """A view ``[b, s, h, d]`` of ``[s, b, h, d]``, and the other way round."""
    return x.transpose(0, 1)
