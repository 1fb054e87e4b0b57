"""Fakes of the flash-attn generations: recorded parameters, bodies from the reference kernel.

The bodies require what the real kernels require: ``[b, s, h, d]``, a dense last dimension, one head size unless there
are kernels for two, a dense float32 ``lse [b, h, s]``, and everything that the adapter does not use switched off.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from library_signatures import function, put, recorded
from torch import Tensor

from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.kernels.backends import flash
from cp_plugin.engine.kernels.backends.reference import Reference


def parameters(library: str, version: str) -> tuple[str, str]:
    """Recorded parameters of the forward and the backward."""
    end = ("fwd", "bwd") if library == "flash-attn 4" else ("forward", "backward")
    forward, backward = (recorded(library, version, f"_flash_attn_{n}") for n in end)
    return forward, backward


FA2 = parameters("flash-attn 2", "2.8.3")
FA3_2_8 = parameters("flash-attn 3", "2.8.3")
FA3_LATER = parameters("flash-attn 3", "of August 2026")
FA4 = parameters("flash-attn 4", "4.0.0b36")

"""What tests ask the adapter about by name; ``test_library_signatures.py`` has all that are recorded."""

OFF = {"softcap": 0.0, "dropout_p": 0.0, "rotary_interleaved": True, "num_splits": 1, "return_softmax": False}
OFF |= dict.fromkeys(("sm_margin", "attention_chunk", "sink_token_length"), 0)
OFF |= {"window_size": (-1, -1), "window_size_left": -1, "window_size_right": -1}
USED = {"dout", "q", "k", "v", "out", "softmax_lse", "lse", "dq", "dk", "dv", "return_lse"}
USED |= {"softmax_scale", "causal", "is_causal", "deterministic"}


def _scores(call: dict[str, Any]) -> Scores:
    return Scores(call["softmax_scale"], call.get("softcap") or None)


class Kernel:
    """The compiled library."""

    def __init__(self, blind: float, two_sizes: bool = False, off: dict[bool, dict[str, Any]] | None = None) -> None:
        self.blind = blind
        """The log-sum-exp of a row without a finite score: +inf in version 2, -inf in later ones."""
        self.two_sizes = two_sizes
        self.off = off or {False: OFF, True: OFF}
        """For the forward and, under True, the backward pass: values with which all is off but plain attention."""
        self.deterministic: list[bool] = []
        self.head_sizes: list[tuple[int, int]] = []

    def check(self, call: dict[str, Any], tensors: str) -> tuple[Tensor, ...]:
        """The named tensors as ``[s, b, h, d]``."""
        for name, value in call.items():
            if name == "softcap" and self.off[False] is OFF:  # version 4 is not given one
                continue
            if name not in USED or (name == "out" and "dout" not in call):
                assert value == self.off["dout" in call].get(name), f"{name} is {value}"
        named = [call[name] for name in tensors.split()]
        assert all(x.stride(-1) == 1 and x.dtype == torch.bfloat16 for x in named)
        q, v = call["q"], call["v"]
        self.head_sizes.append((q.size(3), v.size(3)))
        assert self.two_sizes or len({x.size(3) for x in named}) == 1
        return tuple(x.transpose(0, 1) for x in named)

    def forward(self, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
        q, k, v = self.check(call, "q k v")
        out, lse = Reference().forward(q, k, v, diagonal(q, k, call), _scores(call))
        lse = lse.masked_fill(lse == -torch.inf, self.blind)
        return out.transpose(0, 1).contiguous(), lse.permute(1, 2, 0).contiguous()

    def backward(self, call: dict[str, Any]) -> Tensor | tuple[Tensor, ...]:
        dout, q, k, v, out = self.check(call, "dout q k v out")
        lse = call["softmax_lse"] if "softmax_lse" in call else call["lse"]
        assert lse.dtype == torch.float32 and lse.is_contiguous() and lse.shape == (q.size(1), q.size(2), q.size(0))
        self.deterministic.append(call["deterministic"])
        delta = (dout.float() * out.float()).sum(-1)
        shape, scores = diagonal(q, k, call), _scores(call)
        grads = Reference().backward(dout, q, k, v, lse.permute(2, 0, 1), delta, shape, scores)
        if "lse" in call:  # version 4
            assert call["dq"] is call["dk"] is call["dv"] is None
            return tuple(grad.transpose(0, 1).contiguous() for grad in grads)
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            assert call[name].dtype == grad.dtype and call[name].shape == grad.transpose(0, 1).shape
            call[name].copy_(grad.transpose(0, 1))
        return delta.permute(1, 2, 0).contiguous()


def diagonal(q: Tensor, k: Tensor, call: dict[str, Any]) -> int:
    causal = call.get("is_causal", call.get("causal"))
    assert isinstance(causal, bool)
    return 0 if causal else k.size(0) - 1


class Machine:
    """The installed generations, and the GPU."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        for name in ("flash_attn", "flash_attn.cute", "flash_attn_interface", "flash_attn_config"):
            patch.setitem(sys.modules, name, None)
        self.gpu((9, 0))

    def gpu(self, capability: tuple[int, int]) -> None:
        self.patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        flash._chosen.cache_clear()

    def module(self, name: str, **content: Any) -> None:
        put(self.patch, name, **content)
        flash._chosen.cache_clear()

    def flash2(self, parameters: tuple[str, str] = FA2) -> Kernel:
        kernel = Kernel(torch.inf)
        self.module("flash_attn")
        self.module(
            "flash_attn.flash_attn_interface",
            **_functions(parameters, forward=kernel.forward, backward=kernel.backward),
        )
        return kernel

    def flash3(self, parameters: tuple[str, str], **flags: bool) -> Kernel:
        kernel = Kernel(-torch.inf, two_sizes="window_size_left" in parameters[0])
        self.module("flash_attn_interface", **_functions(parameters, forward=kernel.forward, backward=kernel.backward))
        if flags:
            self.module("flash_attn_config", CONFIG={"build_flags": flags})
        return kernel

    def flash4(self, parameters: tuple[str, str] = FA4) -> Kernel:
        defaults = {
            backward: {p.name: p.default for p in inspect.signature(function("f", names, dict)).parameters.values()}
            for backward, names in enumerate(parameters)
        }
        kernel = Kernel(-torch.inf, two_sizes=True, off=defaults)

        def forward(call: dict[str, Any]) -> tuple[Tensor | None, ...]:
            assert call["return_lse"] is True
            return *kernel.forward(call), None, None, None

        self.module("flash_attn.cute.interface", **_functions(parameters, fwd=forward, bwd=kernel.backward))
        return kernel


def _functions(parameters: tuple[str, str], **bodies: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Named ``_flash_attn_`` and as given, the forward pass first."""
    named = {f"_flash_attn_{end}": body for end, body in bodies.items()}
    return {name: function(name, names, named[name]) for name, names in zip(named, parameters, strict=True)}
