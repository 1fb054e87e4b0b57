"""Installed generations of flash-attn, bound below their autograd functions.

    2    flash_attn/flash_attn_interface.py          arXiv 2307.08691   writes to given dq, dk, dv
    3    hopper/flash_attn_interface.py              arXiv 2407.08608   the same
    4    flash_attn/cute/interface.py                arXiv 2603.05451   returns them; a separate package, in beta

(github.com/Dao-AILab/flash-attention.) All take ``[b, s, h, d]`` with a dense last dimension, ``lse [b, h, s]`` in
natural logarithms, grouped key/value heads, and in the backward each row's log-sum-exp over all its keys. Versions are
identified by their parameters; unknown ones are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from cp_plugin.engine.core.problem import CallInfo
from cp_plugin.engine.kernels.backends.sdpa import one_head_size
from cp_plugin.engine.kernels.backends.signatures import bind, parameters

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
"""Values that disable everything but plain attention, in versions 2 and 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """An installed generation, bound to its functions."""

    generation: int
    title: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    causal: str = "causal"
    """The backward's name of ``causal``."""
    lse: str = "softmax_lse"
    """The backward's name of the log-sum-exp."""
    writes: bool = True
    """Whether the backward pass writes to given dq, dk, dv instead of returning them."""
    largest: int = 256
    """The largest head size it was built for; sizes are multiples of 8."""
    caps: bool = False
    """Whether it can cap scores, forward and backward."""
    two_sizes: bool = False
    """Whether query/key heads of 136 to 192 with value heads of 104 to 128 are supported."""

    def unsupported(self, capability: tuple[int, int], call: CallInfo, always_equal: bool) -> str | None:
        """always_equal: whether results must be deterministic."""
        (major, minor), sizes = capability, (call.head_dim, call.v_head_dim)
        majors, which = _RUNS_ON[self.generation]
        if major not in majors:
            return f"{self.title} needs {which}, not compute capability {major}.{minor}"
        if call.softcap and not self.caps:
            return f"{self.title} does not cap scores (softcap)"
        if self.generation == 4:
            return self._unsupported_by_4(major, *sizes, always_equal)
        wrong = next((n for n in sizes if n % 8), max(sizes))
        if wrong % 8 or wrong > self.largest:
            return f"{self.title} takes head sizes that are multiples of 8 up to {self.largest}, not {wrong}"
        if always_equal and max(sizes) > 192 and self.generation == 3:
            return f"{self.title} has no deterministic backward for head size {max(sizes)}"
        return None

    def _unsupported_by_4(self, major: int, head_dim: int, v_head_dim: int, always_equal: bool) -> str | None:
        """Transformer Engine's limits (dot_product_attention/utils.py).

        The backward on Hopper takes one head size up to 128, and the kernel for 256 on Blackwell is wrong for different
        numbers of queries and keys.
        """
        if head_dim % 8 == v_head_dim % 8 == 0 and max(head_dim, v_head_dim) <= 128:
            equal = always_equal and major == 9
            return f"{self.title} is not known to have a deterministic backward on Hopper" if equal else None
        if (head_dim, v_head_dim) == (192, 128) and major != 9:
            return None
        more = "" if major == 9 else ", or 192 with 128"
        return (
            f"{self.title} takes head sizes that are multiples of 8 up to 128{more} on compute capability {major}.x, "
            f"not {head_dim} with {v_head_dim}"
        )

    def fit(self, q: Tensor, k: Tensor, v: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        """Zero-pad the smaller heads, unless there are kernels for two head sizes."""
        as_they_are = self.two_sizes and 128 < q.size(3) <= 192 and 96 < v.size(3) <= 128
        return (q, k, v, *rows) if as_they_are else one_head_size(q, k, v, *rows)


_RUNS_ON = {2: (range(8, 99), "Ampere or newer"), 3: ((9,), "Hopper"), 4: ((9, 10, 11), "Hopper or Blackwell's 10.x")}
"""Generation -> major compute capabilities, and in words. The fourth has no backward on 8.x."""


def _flash2() -> Library:
    if not _there("flash_attn.flash_attn_interface"):
        raise ImportError("flash-attn 2 is not installed: pip install --no-build-isolation 'flash-attn>=2.7' (hours)")
    module = import_module("flash_attn.flash_attn_interface")
    return _bound(2, f"flash-attn {_version('flash-attn')}", module, ("dropout_p", "window_size_left"))


def _flash3() -> Library:
    if not _there("flash_attn_interface"):
        raise ImportError(
            "flash-attn 3 is not installed: build the folder hopper of github.com/Dao-AILab/flash-attention"
        )
    module = import_module("flash_attn_interface")
    library = _bound(3, f"flash-attn-3 {_version('flash_attn_3', 'flashattn-hopper')}", module, ("cu_seqlens_q",))
    flags = import_module("flash_attn_config").CONFIG["build_flags"] if _there("flash_attn_config") else {}
    if flags.get("FLASHATTENTION_DISABLE_BACKWARD"):
        raise ImportError(f"{library.title} was built without a backward pass")
    built = [size for size in (64, 96, 128, 192, 256) if not flags.get(f"FLASHATTENTION_DISABLE_HDIM{size}")]
    # all releases with this parameter have a backward pass for two head sizes
    two_sizes = "window_size_left" in parameters(module._flash_attn_forward)
    without = flags.get("FLASHATTENTION_DISABLE_HDIM192") or flags.get("FLASH_ATTENTION_DISABLE_HDIMDIFF192")
    caps = library.caps and not flags.get("FLASHATTENTION_DISABLE_SOFTCAP")
    return replace(library, largest=max(built, default=0), two_sizes=two_sizes and not without, caps=caps)


def _flash4() -> Library:
    if not _there("flash_attn.cute.interface"):
        raise ImportError("flash-attn 4 is not installed: pip install --pre flash-attn-4")
    title = f"flash-attn-4 {_version('flash-attn-4')}"
    module = import_module("flash_attn.cute.interface")
    shared = ("q", "k", "v", "softmax_scale", "causal")
    try:
        return Library(
            generation=4,
            title=title,
            # all else is off by default; the marks are missing in the first betas, where a parameter differs in meaning
            forward=bind(module._flash_attn_fwd, shared, {"return_lse": True}, ("return_lse", "min_seqlen_k")),
            backward=bind(module._flash_attn_bwd, (*shared, "out", "dout", "lse", "deterministic"), {}, ("dlse",)),
            lse="lse",
            writes=False,
            two_sizes=True,
        )
    except (AttributeError, TypeError) as wrong:
        raise TypeError(f"{title} is not a version that this plugin can call (4.0.0b36 is): {wrong}") from None


LOAD: Mapping[int, Callable[[], Library]] = {4: _flash4, 3: _flash3, 2: _flash2}
"""Generation -> loader, newest first; ImportError if it is missing or does not import, TypeError if its functions are
not as expected."""


def _bound(generation: int, title: str, module: Any, marks: tuple[str, ...]) -> Library:
    """Version 2 or 3. ``marks``: parameters that the forward pass of older, unsupported versions lacks."""
    shared = ("q", "k", "v", "softmax_scale")
    try:
        forward, backward = module._flash_attn_forward, module._flash_attn_backward
        causal = "is_causal" if "is_causal" in parameters(backward) else "causal"
        rest = ("dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic", causal)
        return Library(
            generation=generation,
            title=title,
            forward=bind(forward, (*shared, "causal"), _OFF, marks),
            backward=bind(backward, (*shared, *rest), _OFF),
            causal=causal,
            caps=all("softcap" in parameters(function) for function in (forward, backward)),
        )
    except (AttributeError, TypeError) as wrong:
        raise TypeError(f"{title} is not a version that this plugin can call: {wrong}") from None


def _there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # a parent package is missing
        return False


def _version(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of unknown version"
