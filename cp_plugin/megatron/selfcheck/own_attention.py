"""A layer's configuration as the plugin reads it, compared with Megatron's own attention on one rank.

Megatron's is Transformer Engine's on CUDA, or else the local one in float64; of latent attention, whose values have
another size, there is none. It attends to random tokens, as the oracle does in float64 with the layer's mask, window,
scale and sinks.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import torch
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import GlobalMemoryBuffer
from torch import Tensor

from cp_plugin.megatron import runtime
from cp_plugin.megatron.layers.core_attention import CoreAttention
from cp_plugin.megatron.patches import patching
from cp_plugin.testing import oracle

_LIMIT = {torch.float64: 1e-5, torch.float32: 2e-3, torch.bfloat16: 3e-2, torch.float16: 3e-2}
"""Relative error of a norm: Transformer Engine may multiply in TF32."""
_TOKENS = 256
_LOCAL = "megatron.core.models.backends:LocalSpecProvider.core_attention"
_TE = "megatron.core.extensions.transformer_engine_spec_provider:TESpecProvider.core_attention"


def problems(module: CoreAttention, device: torch.device) -> list[str]:
    """Return what differs; of a layer that cannot be compared, say so."""
    config = copy.copy(module.config)
    if not module.head_dim == module.v_head_dim == config.kv_channels:
        return []
    if device.type == "cuda" and transformer_engine.HAVE_TE:
        target, provider, dtype, mask = _TE, TESpecProvider(), config.params_dtype, None
    else:
        target, provider, dtype = _LOCAL, LocalSpecProvider(), torch.float64
        mask = torch.ones(1, 1, _TOKENS, _TOKENS, dtype=torch.bool, device=device).triu(1)
        config.fp16 = config.bf16 = config.masked_softmax_fusion = False
    config.context_parallel_size, config.attention_dropout, config.params_dtype = 1, 0.0, dtype
    config.perform_initialization = False
    generator = torch.Generator().manual_seed(50)
    tp = config.tensor_model_parallel_size
    heads, groups = config.num_attention_heads // tp, config.num_query_groups // tp
    q, k, v = (
        torch.randn(_TOKENS, 1, n, module.head_dim, generator=generator).to(device, dtype)
        for n in (heads, groups, groups)
    )
    try:
        own = patching.original(target)(provider)(
            config,
            layer_number=module.layer_number,
            attn_mask_type=module.attn_mask_type,
            attention_type="self",
            softmax_scale=module.softmax_scale,
            pg_collection=SimpleNamespace(tp=module.tp_group, cp=None, hcp=None),
        ).to(device)
        memory = patching.lent(parallel_state, _GLOBAL_MEMORY_BUFFER=GlobalMemoryBuffer())  # of scores
        with torch.no_grad(), memory:
            for sinks in own.parameters():
                sinks.copy_(module.softmax_offset)
            got = own(q, k, v, mask if module.attn_mask_type == AttnMaskType.causal else None)
    except Exception as error:  # of code that nobody has seen
        text = f"Megatron's own attention was not compared: {type(error).__name__}: {error}"
        runtime.print_notice(text)
        return [text] if runtime.settings().strict else []
    want = _expected(module, q, k, v).flatten(2)
    error = ((got.double() - want).norm() / want.norm()).item()
    found = f"the plugin reads the layer's configuration otherwise than Megatron's own attention: off by {error:.1e}"
    return [] if error <= _LIMIT[dtype] else [f"{found} on one rank (relative; allowed {_LIMIT[dtype]:.0e})"]


def _expected(module: CoreAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The oracle's output for this layer, in float64."""
    at, causal = torch.arange(len(q), device=q.device), module.attn_mask_type == AttnMaskType.causal

    def hidden(rows: slice) -> Tensor:
        return oracle.not_seen(at[rows], at, causal, module.window)

    x = q, k, v, torch.zeros_like(q)
    return oracle.softmax_reference(*x, hidden, scale=module.softmax_scale, sink=module.softmax_offset)[0]
