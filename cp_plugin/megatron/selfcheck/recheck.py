"""Attention's calls compared with their own inputs: all calls of the start-up check's step, and one call in some steps.

By default, every 100 iterations: the ``identities`` of its gradients. With ``--cp-check-every N``, every N iterations,
these and a few rows:

    step 300: layer 7, third call, batch entry 1, head 5              drawn by step from a separate generator
    all-gather of that head's keys and values over the context-parallel group, recorded under the phase "check"
    8 rows of each rank, exactly (``exact_rows``)  -- compared -->    the layer's output; in the backward pass dq

One call of each kind of layer (softmax, linear, gated delta net by a provider) is drawn; with recomputation, its output
is compared in the first pass, and all of it in the second. Tensor-parallel ranks draw alike, so that none waits for
another; data-parallel replicas draw independently. Keys travel by torch.distributed's all-gather, independently of
provider and mesh. All ranks of the group share the verdict, and stop.

In the start-up check softmax attention is compared in all rows of the drawn head. A rank that attends with what an
earlier call left in a buffer is right in the first call and wrong in the second.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import GlobalMemoryBuffer
from torch import Tensor

from cp_plugin.engine.attention import convolution
from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.comm.group import pack, unpack
from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.linear.tokens import Tokens, tokens_of
from cp_plugin.megatron import runtime
from cp_plugin.megatron.mixers import gated_delta_net, modelopt, table
from cp_plugin.megatron.mixers.core_attention import AnyCoreAttention, CoreAttention
from cp_plugin.megatron.mixers.mixer import Mixer
from cp_plugin.megatron.patches import patching
from cp_plugin.megatron.selfcheck import rotation, slices
from cp_plugin.megatron.selfcheck.checked_call import CALL, Drawn, Every, Place
from cp_plugin.megatron.selfcheck.exact_rows import Exact, Linear, Rounding, Softmax, compare
from cp_plugin.megatron.selfcheck.identities import CONVOLUTION, DELTA_RULE, LINEAR, SOFTMAX, Identities
from cp_plugin.megatron.state import STATE
from cp_plugin.testing import oracle
from cp_plugin.testing.oracle import not_seen

TOLERANCE_FP8: Mapping[str | None, float] = {"comm": 0.15, "compute": 0.25}
"""Allowed relative error of a norm: e4m3 rounds by 2.6 % of an element on average, a call with it is off by 3 to 7 %,
and by up to 12 % with e5m2 in the kernel."""
_ROWS, _SCORES = 8, 1 << 22
_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


def watch(chunks: Sequence[torch.nn.Module], iterations: Callable[[], int]) -> None:
    """Attach the checks to the model, unless ``--cp-check-every 0`` forbids it.

    iterations: returns the number of finished iterations.
    """
    every = runtime.settings().check_every or runtime.settings().identities_every
    if not every:
        return

    def due() -> int:
        """The current step if it is checked: every N-th, and one that the start-up check could not run; or 0."""
        step = iterations() + 1
        if STATE.trial:
            return 0
        if STATE.owed < 0:
            STATE.owed = step
        return 0 if step % every and step != STATE.owed else step

    slices.watch(chunks, due)
    rotation.watch(chunks, due)
    _follow(chunks, lambda: Drawn(due))


@contextmanager
def every_call(chunks: Sequence[torch.nn.Module]) -> Iterator[Every]:
    """Compare each call of the attention layers in the block."""
    every = Every()
    with ExitStack() as back:
        for hook in _follow(chunks, lambda: every):
            back.callback(hook.remove)
        yield every


def _follow(chunks: Sequence[torch.nn.Module], drawn: Callable[[], Drawn]) -> list[Any]:
    """Attach the check to the attention layers, those of each kind together; return the hooks."""
    by_mixer: dict[Mixer, list[Any]] = {}
    for module in (module for chunk in chunks for module in chunk.modules()):
        if (mixer := table.computed_in(module)) is not None:
            by_mixer.setdefault(mixer, []).append(module)
    hooks = []
    for mixer, layers in by_mixer.items():
        one = _Watch(mixer.kind, drawn(), layers)
        hooks += [layer.register_forward_pre_hook(one.enter) for layer in layers]
        hooks += [layer.register_forward_hook(one.leave, with_kwargs=True) for layer in layers]
    return hooks


class _Watch:
    """Check the identities, and some rows, of the drawn calls among the layers of a kind."""

    def __init__(self, kind: str | None, drawn: Drawn, layers: Sequence[Any]) -> None:
        self._kind, self._drawn, self._layers = kind, drawn, layers
        self._inside: Inside | None = None  # of the drawn call of a layer, as long as it lasts

    def enter(self, module: Any, _: Any) -> None:
        able = (layer for layer in self._layers if not modelopt.quantizes(layer))
        if self._drawn.take(module.training, module, able):
            self._inside = Inside()

    def leave(self, module: Any, args: Any, named: dict[str, Any], out: Tensor) -> None:
        inside, self._inside = self._inside, None
        if inside is None:
            return
        inside.close()
        if self._kind == "softmax":
            self._softmax(module, CALL.bind(module, *args, **named).arguments, out)
        elif inside.call is not None:
            self._linear(module, inside, inside.call)

    def _softmax(self, module: CoreAttention, call: Mapping[str, Any], out: Tensor) -> None:
        q, k, v = (call[name] for name in ("query", "key", "value"))
        batch = module.micro_batch(call.get("packed_seq_params"), q.size(0))
        place = self._drawn.place(batch.cp, module.cp_group, module)
        wide = (q, k, v) if batch.documents is None else tuple(x.unsqueeze(1) for x in (q, k, v))  # [s, b, h, d]
        identities = Identities(place, q, wide[1].shape, batch.bounds)
        identities.watch({"q": q, "k": k, "v": v, "out": out}, SOFTMAX, wide[1].size(2))
        if not self._drawn.rows:
            return
        causal = (call.get("attn_mask_type") or module.attn_mask_type) in _CAUSAL
        scores = Scores.from_call(q, module.softmax_scale, module.softcap)
        count = _ROWS if place.problems is None else q.size(0)
        rows = Rows(place, count, *wide, out)
        sink = None if module.softmax_offset is None else module.softmax_offset[rows.head].detach().clone()

        def exact(keys: Tensor, values: Tensor) -> Softmax:
            hidden = not_seen(rows.at_rows, rows.at, causal, module.window)
            if batch.documents is not None:
                of_rows, of_keys = (batch.documents.number_of(at) for at in (rows.at_rows, rows.at))
                hidden = hidden | (of_rows[:, None] != of_keys)
            return Softmax(rows.q, keys, values, hidden, scores, sink=sink, rounding=rows.rounding)

        rows.check(q, out, exact)
        reading = (module.window, module.attn_mask_type, module.softmax_scale)
        if isinstance(self._drawn, Every) and reading not in self._drawn.readings:
            self._drawn.readings.add(reading)
            self._drawn.problems += read_otherwise(module, q.device)

    def _linear(self, module: Any, inside: Inside, call: Any) -> None:
        group = module.cp_group if isinstance(module, AnyCoreAttention) else module.pg_collection.cp
        place = self._drawn.place(call.cp, group, module)
        identities = Identities(place, call.q, call.k.shape, call.cu_seqlens, inside.exchanged)
        pairs = LINEAR if call.beta is None else DELTA_RULE
        identities.watch({"q": call.q, "k": call.k, "v": call.v, "out": call.out}, pairs, call.k.size(2))
        if inside.convolution:
            x, bias, out = inside.convolution
            identities.watch({"mixed": x, "convolved": out}, CONVOLUTION, 1, bias)
        if not self._drawn.rows:
            return
        _, _, _, decay, beta, _ = tokens_of(call.q, call.k, call.v, call.log_decay, call.beta)
        beside = {name: x for name, x in (("log_decay", decay), ("beta", beta)) if x is not None}
        rows = Rows(place, _ROWS, call.q, call.k, call.v, call.out, *beside.values())

        def exact(*of_keys: Tensor) -> Linear:
            k, v, *more = (x[rows.at.argsort()][:, None, None] for x in of_keys)
            starts = None
            if call.cu_seqlens is not None:
                starts = torch.isin(torch.arange(len(k)), call.cu_seqlens[:-1].cpu())[:, None].to(k.device)
            x = Tokens(k, k, v, starts=starts, **dict(zip(beside, more, strict=True)))
            return Linear(x, rows.q, rows.tokens, scale=call.scale, rounding=rows.rounding)

        rows.check(call.q, call.out, exact)


class Inside:
    """What a layer passes to linear attention and to a short convolution before it, until ``close``."""

    def __init__(self) -> None:
        self.call: Any = None  # arguments of ``ContextParallel.linear_attention`` by name, and ``out``
        self.convolution: tuple[Tensor, Tensor | None, Tensor] | None = None  # input, bias, output
        self.exchanged: list[tuple[convolution.Rows, convolution.Rows]] = []
        attend, convolve = ContextParallel.linear_attention, gated_delta_net.short_convolution
        arguments = inspect.signature(attend)

        def attending(*args: Any, **named: Any) -> Tensor:
            bound = arguments.bind(*args, **named)
            bound.apply_defaults()
            out = attend(*args, **named)
            self.call = SimpleNamespace(cp=bound.arguments.pop("self"), out=out, **bound.arguments)
            return out

        def convolving(cp: ContextParallel, x: Tensor, weight: Tensor, bias: Tensor | None, **named: Any) -> Tensor:
            out = convolve(cp, x, weight, bias, **named)
            self.convolution = x, bias, out
            return out

        back = ExitStack()
        back.enter_context(patching.lent(ContextParallel, linear_attention=attending))
        back.enter_context(patching.lent(gated_delta_net, short_convolution=convolving))
        back.enter_context(patching.lent(convolution, told=self.exchanged))
        self.close = back.close  # a backward pass still appends to ``exchanged``


class Rows:
    """A few rows of one head on each rank."""

    def __init__(self, place: Place, count: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *beside: Tensor) -> None:
        """
        Args:
            count: of rows, at most.
            q, k, v, out: this rank's ``[s, b, h, d]``, ``[s, b, g, d]``, ``[s, b, g, e]`` and ``[s, b, h, e]``.
            beside: what else is to be exchanged, ``[s, b, g, ...]``.
        """
        of_norm = TOLERANCE_FP8.get(place.cp.options.fp8)
        self.place = place
        self.rounding = Rounding.from_dtype(q.dtype, cuda=q.is_cuda, of_norm=of_norm, hops=place.hops)
        self.shape = s, b, h = q.shape[:3]
        self.batch, self.head = place.draw.randrange(b), place.draw.randrange(h)
        kv_head = self.head * k.size(2) // h
        cp, tokens = place.cp, s * place.cp.size
        count = min(s, max(1, min(count, _SCORES // tokens)))
        self.rows = random.Random(f"{place.draw.random()} {cp.index}").sample(range(s), count)
        everyone = [cp.layout.positions(tokens, cp.size, number) for number in cp.numbers]
        self.tokens = everyone[cp.index][self.rows].tolist()
        self.at_rows = everyone[cp.index][self.rows].to(q.device)
        self.at = torch.cat(everyone).to(q.device)
        self.q, self.got = self._head_rows(q), self._head_rows(out)
        self.local = [x[:, self.batch, kv_head].detach() for x in (k, v, *beside)]

    def check(self, q: Tensor, out: Tensor, exact: Callable[..., Softmax | Linear]) -> None:
        """Compare the output, and in the backward pass the gradient of q; collective over the group.

        Args:
            q, out: the tensors whose gradients autograd computes.
            exact: computes these rows from all ranks' keys, values and what is beside them.

        Raises:
            AttentionError: on every rank, naming the wrong rows of each rank.
        """
        with self.place.booked():
            self._judge("out", self.got, exact(*self._gathered()).output())
        if not (q.requires_grad and out.requires_grad):
            return
        douts: list[Tensor] = []  # that of the output comes first

        def check_gradient(dq: Tensor) -> None:
            with self.place.booked():
                self._judge("dq", self._head_rows(dq), exact(*self._gathered()).dq(douts[0]))

        out.register_hook(lambda dout: douts.append(self._head_rows(dout)))
        q.register_hook(check_gradient)

    def _head_rows(self, x: Tensor) -> Tensor:
        """The head's rows ``[r, d]`` of a tensor whose heads may be joined."""
        return x.detach().reshape(*self.shape, -1)[self.rows, self.batch, self.head]

    def _gathered(self) -> list[Tensor]:
        """All ranks' ``local``, concatenated: ``[n, ...]``."""
        shapes, dtypes = zip(*((x.shape, x.dtype) for x in self.local), strict=True)
        everyone = self.place.gather(pack([x.contiguous() for x in self.local]))
        return [torch.cat(x) for x in zip(*(unpack(one, shapes, dtypes, 1) for one in everyone), strict=True)]

    def _judge(self, name: str, got: Tensor, want: Exact) -> None:
        place, verdict = self.place, compare(got, want, self.rounding)
        rows = torch.where(verdict.wrong, self.at_rows, -1)
        own = torch.cat((torch.stack((verdict.error, verdict.allowed)), rows.double()))
        if place.problems is not None:
            wrong = list(filter(None, [_describe(name, *own.tolist())]))
        else:
            wrong = place.name_ranks([_describe(name, *one) for one in torch.stack(place.gather(own)).tolist()])
        place.stop_if_any(
            wrong,
            f"head {place.tp_rank * self.shape[2] + self.head}",
            f"of batch entry {self.batch} in {place.cp.provider.name} attention does not match its queries, keys and "
            "values",
            "A rank attended to data other than what was sent: a device, a link or a buffer is at fault. Watch whether "
            "the same rank fails again",
        )


def _describe(name: str, error: float, allowed: float, *at: float) -> str:
    """Say what is off, or nothing; at: wrong tokens, and -1 for each right one."""
    wrong = sorted(int(token) for token in at if token >= 0)
    tokens = ", ".join(map(str, wrong[:_ROWS])) + (", ..." if len(wrong) > _ROWS else "")
    rows = f"{name} of {len(wrong)} of {len(at)} rows (tokens {tokens})"
    return f"{rows} off by {error:.1e}, where rounding allows {allowed:.1e}" if wrong else ""


_LIMIT = {torch.float64: 1e-5, torch.float32: 2e-3, torch.bfloat16: 3e-2, torch.float16: 3e-2}
"""Relative error of a norm: Transformer Engine may multiply in TF32."""
_TOKENS = 256
_LOCAL = "megatron.core.models.backends:LocalSpecProvider.core_attention"
_TE = "megatron.core.extensions.transformer_engine_spec_provider:TESpecProvider.core_attention"


def read_otherwise(module: CoreAttention, device: torch.device) -> list[str]:
    """Return what differs on one rank between Megatron's own attention and a layer as the plugin reads it; of a
    layer that cannot be compared, say so.

    Megatron's is Transformer Engine's on CUDA, or else the local one in float64; of latent attention, whose values have
    another size, there is none. It attends to random tokens, as the oracle does in float64 with the layer's mask,
    window, scale and sinks.
    """
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
    at, causal = torch.arange(_TOKENS, device=device), module.attn_mask_type == AttnMaskType.causal
    want, *_ = oracle.softmax_reference(
        *(q, k, v, torch.zeros_like(q)),
        lambda rows: not_seen(at[rows], at, causal, module.window),
        scale=module.softmax_scale,
        softcap=module.softcap,
        sink=module.softmax_offset,
    )
    error = ((got.double() - want.flatten(2)).norm() / want.norm()).item()
    problem = f"the plugin reads the layer's configuration otherwise than Megatron's own attention: off by {error:.1e}"
    return [] if error <= _LIMIT[dtype] else [f"{problem} on one rank (relative; allowed {_LIMIT[dtype]:.0e})"]
