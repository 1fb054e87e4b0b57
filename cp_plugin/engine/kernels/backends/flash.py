"""flash-attn, in the fastest installed generation for this GPU: see ``flash_libraries``.

FlashAttention-3 on Hopper and 4 on Blackwell if installed, otherwise 2 (2.7 or newer). ``auto`` tries one generation at
a time, in the order of ``devices``. torch 2.13 can route its own operators to 3 or 4
(``torch.nn.attention.activate_flash_attention_impl``), but for the whole process, so the library is called directly.

Not measured on a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.core.problem import CallInfo
from cp_plugin.engine.core.spelling import spelled
from cp_plugin.engine.kernels.backends import devices
from cp_plugin.engine.kernels.backends.flash_libraries import LOAD, Library
from cp_plugin.engine.kernels.backends.sdpa import TakesOut, is_causal, minus_infinity, no_half_on_cuda


@dataclass(frozen=True, slots=True)
class Flash(TakesOut):
    """flash-attn 2, 3 or 4."""

    name: str = "flash"
    packages: ClassVar = ("flash-attn", "flash_attn_3", "flash-attn-4")
    caps: ClassVar = True
    generation: int | None = None
    """None: the first in the order of ``devices`` that is installed and runs here."""

    def unsupported(self, call: CallInfo) -> str | None:
        if reason := no_half_on_cuda("flash-attn", call):
            return reason
        chosen = self._chosen(call)
        return chosen if isinstance(chosen, str) else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, diagonal: int, scores: Scores) -> tuple[Tensor, Tensor]:
        causal, size, library = is_causal(q, k, diagonal), v.size(3), self._library(q, v, scores)
        q, k, v = map(_batch_first, library.fit(q, k, v))
        out, lse, *_ = library.forward(q=q, k=k, v=v, causal=causal, **_keywords(scores))
        batch, rows, heads, _ = q.shape
        if out.shape != (batch, rows, heads, v.size(3)) or lse.shape != (batch, heads, rows):
            raise RuntimeError(
                f"{library.title} returned an out {tuple(out.shape)} and a log-sum-exp {tuple(lse.shape)} for a q "
                f"{tuple(q.shape)}: this version is not supported; use {spelled('backend', 'sdpa')}"
            )
        return _batch_first(out)[..., :size], minus_infinity(lse).permute(2, 0, 1)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, term: Tensor, diagonal: int, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        causal, library = is_causal(q, k, diagonal), self._library(q, v, scores)
        sizes = q.size(3), k.size(3), v.size(3)
        q, k, v, dout, out = library.fit(q, k, v, dout, term)
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v) if library.writes]
        written = dict(zip(("dq", "dk", "dv"), map(_batch_first, grads), strict=False))
        dout, q, k, v, out = map(_batch_first, (dout, q, k, v, out))
        returned = library.backward(
            dout=dout,
            q=q,
            k=k,
            v=v,
            out=out,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **{library.lse: lse.permute(1, 2, 0).contiguous(), library.causal: causal},
            **_keywords(scores),
            **written,
        )
        grads = grads or [_batch_first(grad) for grad in returned[:3]]
        dq, dk, dv = (grad[..., :size] for grad, size in zip(grads, sizes, strict=True))
        return dq, dk, dv

    def _library(self, q: Tensor, v: Tensor, scores: Scores) -> Library:
        """The library that runs such heads; ValueError if none can, with the reason."""
        chosen = self._chosen(CallInfo(q.device, q.dtype, q.size(3), v.size(3), scores.softcap is not None))
        if isinstance(chosen, str):
            raise ValueError(chosen)
        return chosen

    def _chosen(self, call: CallInfo) -> Library | str:
        return _chosen(self.generation, call, torch.are_deterministic_algorithms_enabled())


@lru_cache
def _chosen(generation: int | None, call: CallInfo, always_equal: bool) -> Library | str:
    """The generation that runs such heads, or why none does."""
    capability, reasons = torch.cuda.get_device_capability(call.device), []
    preferred = [c.generation for c in devices.family(capability).order if c.backend == "flash"]
    for number in sorted(LOAD, key=[*preferred, *LOAD].index) if generation is None else (generation,):
        try:
            library = LOAD[number]()
        except (ImportError, TypeError) as wrong:
            reasons.append(str(wrong))
            continue
        reason = library.unsupported(capability, call, always_equal)
        if reason is None:
            return library
        reasons.append(reason)
    return "; ".join(reasons)


def _keywords(scores: Scores) -> dict[str, float]:
    """Keywords of a library's functions; a cap only where there is one, since not all of them know it."""
    return {"softmax_scale": scores.scale} | ({} if scores.softcap is None else {"softcap": scores.softcap})


def _batch_first(x: Tensor) -> Tensor:
    """A view that swaps ``[s, b, h, d]`` and ``[b, s, h, d]``."""
    return x.transpose(0, 1)


BACKEND = Flash()
