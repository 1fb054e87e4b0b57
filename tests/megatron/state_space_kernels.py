"""Plain torch replacements of the CUDA kernels of Mamba and gated delta net, token by token, so that Megatron's own
modules around them run on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

STATES = (
    "--mamba-state-dim 8 --mamba-head-dim 16 --mamba-num-heads 4 --mamba-num-groups 2 "
    "--linear-conv-kernel-dim 4 --linear-key-head-dim 8 --linear-value-head-dim 16 --linear-num-key-heads 4 "
    "--linear-num-value-heads 4"
)
"""Sizes of such layers, as flags."""


def install() -> None:
    """Install the kernels in Megatron's modules, for the rest of the process."""
    from cp_plugin.megatron.compat import find

    mamba_mixer, _ = find("megatron.core.ssm.mamba_mixer:MambaMixer")
    mamba_context_parallel, _ = find("megatron.core.ssm.mamba_context_parallel:_undo_attention_load_balancing")
    delta_net = [
        find(f"megatron.core.ssm.gated_delta_net.{name}")[0]
        for name in ("common:GatedDeltaNetSubmodules", "gdn:GatedDeltaNet")
    ]
    for module, names in {
        mamba_mixer: {
            "HAVE_MAMBA_SSM": True,
            "_check_mamba_sequence_packing_support": lambda **unused: (True, None),
            "HAVE_EINOPS": True,
            "rearrange": _rearrange,
            "ExtendedRMSNorm": _GatedNorm,
            "mamba_split_conv1d_scan_combined": _mamba,
        },
        mamba_context_parallel: {"HAVE_EINOPS": True, "repeat": _repeat_groups},
        **{
            module: {
                "HAVE_FLA": True,
                "causal_conv1d": _delta_conv,
                "l2norm": lambda x: F.normalize(x, dim=-1),
                "chunk_gated_delta_rule": _delta_rule,
            }
            for module in delta_net
        },
    }.items():
        for name, value in names.items():
            setattr(module, name, value)


class _GatedNorm(torch.nn.Module):
    """RMS norm without a gate: the scan has applied it."""

    def __init__(self, size: int, eps: float, group_size: int, dtype: torch.dtype, **unused: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, self.group_size))
        return F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight


def _rearrange(x: Tensor, pattern: str, **sizes: int) -> Tensor:
    if pattern == "d 1 w -> d w":
        return x.squeeze(1)
    assert pattern in ("l b d -> b l d", "b l d -> l b d"), pattern
    return x.transpose(0, 1)


def _repeat_groups(x: Tensor, pattern: str, g: int, n: int, r: int) -> Tensor:
    assert pattern == "l b (g n) -> l b (g r n)"
    return x.unflatten(-1, (g, 1, n)).expand(*x.shape[:2], g, r, n).flatten(2)


def _causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None = None) -> Tensor:
    """[b, l, d] and [d, w]; documents: that of each token [l], None: there is one."""
    out = torch.zeros_like(x) if bias is None else bias.expand_as(x)
    for back in range(weight.size(1)):
        before = F.pad(x, (0, 0, back, 0))[:, : x.size(1)]
        if documents is not None:
            before = before * (documents == F.pad(documents, (back, 0), value=-1)[: len(documents)])[:, None]
        out = out + before * weight[:, -1 - back]
    return F.silu(out)


def _mamba(
    z_x_b_c_dt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    dt_bias: Tensor,
    a: Tensor,
    *,
    D: Tensor,
    headdim: int,
    ngroups: int,
    seq_idx: Tensor | None = None,
    **unused: Any,
) -> Tensor:
    """The selective state-space model of Mamba 2: [b, l, z x B C dt] -> [b, l, heads * headdim]. seq_idx: [1, l]."""
    documents = None if seq_idx is None else seq_idx[0]
    heads = dt_bias.numel()
    inner = heads * headdim
    state = (conv_weight.size(0) - inner) // (2 * ngroups)
    z, conv_in, dt = z_x_b_c_dt.split([inner, conv_weight.size(0), heads], -1)
    x, b, c = _causal_conv(conv_in, conv_weight, conv_bias, documents).split(
        [inner, ngroups * state, ngroups * state], -1
    )
    x = x.unflatten(-1, (heads, headdim))
    b, c = (t.unflatten(-1, (ngroups, state)).repeat_interleave(heads // ngroups, 2) for t in (b, c))
    dt = F.softplus(dt + dt_bias)
    h, out = x.new_zeros(x.size(0), heads, state, headdim), []
    for t in range(x.size(1)):
        h = h * _goes_on(documents, t)
        step = dt[:, t, :, None, None]
        h = h * (step * a[:, None, None]).exp() + step * b[:, t, :, :, None] * x[:, t, :, None, :]
        out.append((h * c[:, t, :, :, None]).sum(2) + D[:, None] * x[:, t])
    return (torch.stack(out, 1).flatten(2) * F.silu(z)).to(z.dtype)  # decays are in float32


def _goes_on(documents: Tensor | None, token: int) -> bool:
    """Whether a token is of the same document as the one before."""
    return documents is None or (token > 0 and bool(documents[token] == documents[token - 1]))


def _number_tokens(cu_seqlens: Tensor | None, tokens: int) -> Tensor | None:
    return None if cu_seqlens is None else torch.bucketize(torch.arange(tokens), cu_seqlens, right=True)


def _delta_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None = None, **unused: Any
) -> tuple[Tensor, None]:
    return _causal_conv(x, weight, bias, _number_tokens(cu_seqlens, x.size(1))), None


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None, **unused: Any
) -> tuple[Tensor, None]:
    """[b, l, heads, size]; g and beta [b, l, heads]."""
    documents = _number_tokens(cu_seqlens, q.size(1))
    h, out = q.new_zeros(q.size(0), q.size(2), k.size(3), v.size(3)), []
    for t in range(q.size(1)):
        h = h * g[:, t, :, None, None].exp() * _goes_on(documents, t)
        error = v[:, t] - (h * k[:, t, :, :, None]).sum(2)
        h = h + k[:, t, :, :, None] * (beta[:, t, :, None] * error)[:, :, None, :]
        out.append((h * q[:, t, :, :, None]).sum(2) * q.size(3) ** -0.5)
    return torch.stack(out, 1).to(q.dtype), None
