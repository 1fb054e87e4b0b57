"""Self-check of attention: a core attention module, and gated delta net by a provider, against one rank.

The module is called twice, with different numbers of the same shapes, and differentiated in reverse order: a rank that
attends with what an earlier call left in a buffer is right in the first call and wrong in the second.

Tolerance (relative error of the norm): 1e-5 in float32 (2e-3 on CUDA, where TF32 may be allowed), 3e-2 in bfloat16 and
float16; a wrong layout gives an error of order 1. Linear attention divides by norms and sums that may be small: 1e-3 in
float32. The quadratic feature map squares the error of such sums and is checked in float32 only. The first token's sum
has a single, arbitrarily small term: its output gets no gradient.

With ``--cp-fp8`` everything is checked without and then with it. Rounding to e4m3 (2.6 % of an element on average)
causes errors of 3 % to 7 %, e5m2 in the kernel up to 12 %: the tolerance only separates right from wrong results.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import GlobalMemoryBuffer
from torch import Tensor

from cp_plugin.attention.api import ContextParallel
from cp_plugin.linear import recurrence, rules
from cp_plugin.linear.tokens import tokens_of
from cp_plugin.megatron import runtime
from cp_plugin.megatron.layers import fp8_scaling
from cp_plugin.megatron.layers.core_attention import AnyCoreAttention, CoreAttention
from cp_plugin.megatron.layers.linear_attention import LinearCoreAttention
from cp_plugin.megatron.layers.modelopt import unquantized
from cp_plugin.megatron.micro_batch import MicroBatch
from cp_plugin.megatron.patches import delta_net, patching
from cp_plugin.testing import oracle

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-2}
TOLERANCE_LINEAR, TOLERANCE_TF32 = 1e-3, 2e-3
TOLERANCE_FP8 = {"comm": 0.15, "compute": 0.25}
_CALLS = 2
_PACKED = 10  # seed of the first pack; unpacked calls have seeds below
_OWN_TOKENS = 256
_LOCAL = "megatron.core.models.backends:LocalSpecProvider.core_attention"
_TE = "megatron.core.extensions.transformer_engine_spec_provider:TESpecProvider.core_attention"

type Reference = Callable[..., Sequence[Tensor]]
"""q ``[s, b, h, d]``, k ``[s, b, g, d]``, v ``[s, b, g, e]`` and dout ``[s, b, h, e]`` of the whole sequence ->
out, dq, dk and dv of the requested tokens in float64."""


class Call(NamedTuple):
    """One call of a layer and its reference."""

    attend: Callable[..., Tensor]  # of this rank's inputs
    reference: Reference  # of the whole sequence's inputs and gradient
    whole: Sequence[Tensor]  # inputs, and the gradient of the output, of the whole sequence
    local: Sequence[Tensor]  # this rank's part
    names: Sequence[str] = ("out is", "dq is", "dk is", "dv is")  # of what the reference gives


def mismatches(calls: Sequence[Call], allowed: float, later: str = "") -> list[str]:
    """What is off in the first call with it, of calls that are differentiated in reverse order.

    later: is said of what is off in later calls only.
    """
    leaves = [[x.requires_grad_() for x in call.local[:-1]] for call in calls]
    with torch.enable_grad():
        outs = [call.attend(*x) for call, x in zip(calls, leaves, strict=True)]
        grads = [
            torch.autograd.grad(out, x, call.local[-1].view_as(out))
            for call, x, out in reversed(list(zip(calls, leaves, outs, strict=True)))
        ][::-1]
    found: dict[str, str] = {}
    for number, call in enumerate(calls):
        wanted = call.reference(*call.whole)
        for name, got, want in zip(call.names, (outs[number], *grads[number]), wanted, strict=True):
            error = _error(got, want)
            if name not in found and not error <= allowed:  # true for NaN, too
                when = later if number else ""
                found[name] = f"{name} off by {error:.1e}{when} (relative; allowed {allowed:.0e})"
    return list(found.values())


def tolerance(dtype: torch.dtype, device: torch.device, *, linear: bool) -> float:
    """Allowed relative error of a norm."""
    if dtype != torch.float32:
        return TOLERANCE[dtype]
    return TOLERANCE_TF32 if device.type == "cuda" else TOLERANCE_LINEAR if linear else TOLERANCE[dtype]


def attention_problems(
    module: AnyCoreAttention, cp: ContextParallel, tokens: int, device: torch.device, *, packed: bool = False
) -> list[str]:
    """Mismatches of a core attention module.

    Args:
        cp: the run's, by which the layer should have its tokens.
        tokens: length of the whole sequence.
        packed: on packs of three documents, another one in every call, to find bounds that are reused.
    """

    def call(number: int) -> Call:
        pack = pack_of(tokens, number, device) if packed else None
        batch = MicroBatch.find(cp, pack, tokens)
        mine, seed = batch.positions(device), number + (_PACKED if packed else 0)
        whole = _random_inputs(module, tokens, device, batch=1 if packed else 2, seed=seed)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.squeeze(1) if packed else x for x in (q, k, v))
            out = module(q, k, v, None, attn_mask_type=module.attn_mask_type, packed_seq_params=pack)
            return out.unsqueeze(1) if packed else out

        if isinstance(module, LinearCoreAttention):
            reference = linear_reference(module, mine)
        else:
            reference = softmax_reference(module, mine, None if pack is None else pack.cu_seqlens_q)
        return Call(attend, reference, whole, [x[mine] for x in whole])

    return _compare(module, call)


def packed_problems(module: CoreAttention, cp: ContextParallel, tokens: int, device: torch.device) -> list[str]:
    """Mismatches on packs; args as of ``attention_problems``."""
    return [f"packed {problem}" for problem in attention_problems(module, cp, tokens, device, packed=True)]


def own_attention_problems(module: CoreAttention, tokens: int, device: torch.device) -> list[str]:
    """Mismatches between the plugin's reading of a layer's configuration and Megatron's own attention, on one rank.

    Megatron's is Transformer Engine's on CUDA, or else the local one in float64, on no more than ``_OWN_TOKENS``; of
    latent attention, whose values have another size, there is none.
    """
    config = copy.copy(module.config)
    if not module.head_dim == module.v_head_dim == config.kv_channels:
        return []
    tokens = min(tokens, _OWN_TOKENS)
    if device.type == "cuda" and transformer_engine.HAVE_TE:
        target, provider, dtype, mask = _TE, TESpecProvider(), config.params_dtype, None
        allowed = max(TOLERANCE[dtype], TOLERANCE_TF32)
    else:
        target, provider, dtype, allowed = _LOCAL, LocalSpecProvider(), torch.float64, TOLERANCE[torch.float32]
        mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=device).triu(1)
        config.fp16 = config.bf16 = config.masked_softmax_fusion = False
    config.context_parallel_size, config.attention_dropout, config.params_dtype = 1, 0.0, dtype
    config.perform_initialization = False
    *whole, _ = (x.to(dtype) for x in _random_inputs(module, tokens, device, batch=1, seed=30))
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
            got = own(*whole, mask if module.attn_mask_type == AttnMaskType.causal else None)
    except Exception as error:  # of code that nobody has seen
        text = f"Megatron's own attention was not compared: {type(error).__name__}: {error}"
        runtime.print_notice(text)
        return [text] if runtime.settings().strict else []
    want = softmax_reference(module, torch.arange(tokens, device=device))(*whole, torch.zeros_like(whole[0]))[0]
    error = _error(got, want.flatten(2))
    found = f"the plugin reads the layer's configuration otherwise than Megatron's own attention: off by {error:.1e}"
    return [] if error <= allowed else [f"{found} on one rank (relative; allowed {allowed:.0e})"]


def with_own_sink(module: CoreAttention) -> CoreAttention:
    """A copy without hooks and with random sinks, for one whose parameters are there in the model's passes only."""
    twin, sink, config = copy.copy(module), module.softmax_offset, module.config
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    own = torch.randn(heads, generator=torch.Generator().manual_seed(19)).to(sink.device, sink.dtype)
    twin._parameters = {"softmax_offset": torch.nn.Parameter(own)}
    twin._forward_pre_hooks, twin._forward_hooks = OrderedDict(), OrderedDict()
    return twin


def _random_inputs(module: AnyCoreAttention, tokens: int, device: torch.device, batch: int, seed: int) -> list[Tensor]:
    """q, k, v and dout of the whole sequence in the dtype of the check, equal on all ranks."""
    config = module.config
    tp = config.tensor_model_parallel_size
    heads, groups = config.num_attention_heads // tp, config.num_query_groups // tp
    gated = isinstance(module, LinearCoreAttention) and module.gate is not None
    generator = torch.Generator().manual_seed(20 + seed)
    found = [
        torch.randn(tokens, batch, h, d, generator=generator).to(device, _dtype(module))
        for h, d in (
            (heads, module.head_dim),
            (groups, module.head_dim),
            (groups, module.v_head_dim * (1 + gated)),
            (heads, module.v_head_dim),
        )
    ]
    if module.kind == "linear":
        found[0] += 1
        found[1] += 1
        found[3][0] = 0
    return found


def _compare(module: AnyCoreAttention, call: Callable[[int], Call]) -> list[str]:
    """Mismatches of out, dq, dk and dv, without FP8 and with it; ``call`` draws new numbers for each index."""
    found, linear, fp8 = [], module.kind == "linear", module.context_parallel.options.fp8
    for first, limit in ((0, None), (_CALLS, fp8)) if fp8 else ((0, None),):
        calls = [call(first + i) for i in range(_CALLS)]
        allowed = tolerance(_dtype(module), calls[0].whole[0].device, linear=linear)
        with ExitStack() as back:
            back.enter_context(unquantized(module))
            back.enter_context(nullcontext() if limit else module.context_parallel.without_fp8())
            if isinstance(module, CoreAttention):
                back.enter_context(patching.lent(module, scaling=fp8_scaling.of_layer(module.config)))
            problems = mismatches(calls, TOLERANCE_FP8[limit] if limit else allowed, " in the second call only")
        before = f"with --cp-fp8 {limit} " if limit else ""
        found += [f"{before}{'linear ' if linear else ''}{problem}" for problem in problems]
    return found


def pack_of(tokens: int, number: int, device: torch.device) -> PackedSeqParams:
    """A pack of three documents, different for each number.

    document         0 0 0 0 0 1 1 1 1 1 1 1 1 ... 2 2 2        bounds that match no layout and no chunk
    RoPE's position  0 1 2 3 4 0 1 2 3 4 5 6 7 ... 0 1 2
    """
    bounds = [0, 5 + 2 * number, tokens // 2 + 3 + number, tokens]
    where = torch.tensor(bounds, dtype=torch.int32, device=device)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=where, cu_seqlens_kv=where)
    found = [x.tolist() for x in (packed.cu_seqlens_q, packed.cu_seqlens_kv)]
    if found != [bounds, bounds]:
        raise ValueError(
            f"PackedSeqParams of this Megatron makes the bounds {found} of {bounds}: documents would begin at "
            "other tokens. Use a Megatron without this change, or --cp-provider upstream"
        )
    return packed


def _dtype(module: AnyCoreAttention) -> torch.dtype:
    quadratic = isinstance(module, LinearCoreAttention) and module.linear.variant.features.learned_norm
    return torch.float32 if quadratic else module.config.params_dtype


def _error(got: Tensor, want: Tensor) -> float:
    return ((got.flatten().double() - want.flatten()).norm() / want.norm()).item()


def softmax_reference(module: AnyCoreAttention, mine: Tensor, bounds: Tensor | None = None) -> Reference:
    """The oracle's softmax attention for this module, in float64, without the plugin's kernels and methods.

    Args:
        mine: positions of the requested tokens.
        bounds: of documents; None: not packed.
    """

    def expected(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Sequence[Tensor]:
        place = torch.arange(q.size(0), device=q.device)
        document = None if bounds is None else torch.bucketize(place, bounds, right=True)

        def hidden(rows: slice) -> Tensor:
            causal = module.attn_mask_type == AttnMaskType.causal
            found = oracle.not_seen(place[rows], place, causal, module.window)
            return found if document is None else found | (document[rows, None] != document)

        scale, sink = module.softmax_scale, module.softmax_offset
        return oracle.softmax_reference(q, k, v, dout, hidden, scale=scale, sink=sink, wanted=mine)

    return expected


def linear_reference(module: LinearCoreAttention, mine: Tensor) -> Reference:
    """Linear attention with the module's own features and norm; args as in ``softmax_reference``.

    Token by token on the CPU, where the module's own kernel may be the chunked one.
    """
    layer, gated = copy.deepcopy(module.linear).double(), module.gate is not None

    def expected(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Sequence[Tensor]:
        forward = (recurrence if q.device.type == "cpu" else rules).forward
        with torch.enable_grad():
            leaves = [x.double().requires_grad_() for x in (q, k, v)]
            values, gate = leaves[2].chunk(2, 3) if gated else (leaves[2], None)
            x = layer.prepare(leaves[0], leaves[1], values, gate)
            out = layer.finish(x.scale * forward(tokens_of(x.q, x.k, x.v, x.log_decay)))
            grads = torch.autograd.grad(out, leaves, dout.double())
        return [x.detach()[mine] for x in (out, *grads)]

    return expected


_WEAKER = 6.0
"""Taken from alpha, so that decays are weak and states reach over several ranks."""


def delta_net_problems(layer: Any, tokens: int, packs: Sequence[PackedSeqParams], device: torch.device) -> list[str]:
    """Mismatches of one layer; tokens: of the whole sequence."""
    calls = [_call(layer, tokens, pack, number, device) for number, pack in enumerate((*[None] * _CALLS, *packs))]
    return mismatches(calls, tolerance(layer.config.params_dtype, device, linear=True))


def _call(layer: Any, tokens: int, pack: PackedSeqParams | None, number: int, device: torch.device) -> Call:
    """A call on projected hidden states ``[s, b, q + k + v + z + beta + alpha]``."""
    draw = torch.Generator().manual_seed(40 + number)
    dtype, heads = layer.config.params_dtype, layer.num_v_heads_local_tp
    rows, packed = (2, "") if pack is None else (1, "packed ")
    width = 2 * (layer.qk_dim_local_tp + layer.v_dim_local_tp + heads)
    projected = torch.randn(tokens, rows, width, generator=draw).to(dtype)
    projected[..., -heads:] -= _WEAKER
    dout = torch.randn(tokens, rows, heads, layer.value_head_dim, generator=draw)
    whole = [x.to(device, dtype) for x in (projected, dout)]
    cp = runtime.between_layers(runtime.context_parallel(layer.pg_collection.cp, "linear"))
    batch = MicroBatch.find(cp, pack, tokens)
    mine = batch.positions(device)

    def reference(x: Tensor, dout: Tensor) -> list[Tensor]:
        x, alone = x.detach().double().requires_grad_(), ContextParallel("lasp2", group=None, backend="reference")
        with torch.enable_grad():
            out, _ = delta_net.attend(_in_float64(layer), replace(batch, cp=alone), x, unit=delta_net.unit)
            (grad,) = torch.autograd.grad(out, x, dout.double())
        return [y.detach()[mine] for y in (out, grad)]

    return Call(
        attend=lambda x: delta_net.attend(layer, batch, x)[0],
        reference=reference,
        whole=whole,
        local=[x[mine] for x in whole],
        names=[f"{packed}gated delta net's {what} are" for what in ("outputs", "gradients")],
    )


def _in_float64(layer: Any) -> Any:
    """A layer with wide weights, of those that ``delta_net.attend`` reads."""
    twin = copy.copy(layer)
    twin._modules = {**layer._modules, "conv1d": copy.deepcopy(layer.conv1d).double()}
    twin._parameters = {name: weight.detach().double() for name, weight in layer._parameters.items()}
    return twin
