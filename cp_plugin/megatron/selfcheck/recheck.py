"""``--cp-check-every N``: check one call of one layer's attention in every N-th iteration.

By default, every 100 iterations: the ``identities`` of its gradients. With N, every N iterations, these and a few rows:

    step 300: layer 7, third call, batch entry 1, head 5              drawn by step from a separate generator
    all-gather of that head's keys and values over the context-parallel group, recorded under the phase "check"
    8 rows of each rank, exactly (``exact_rows``)  -- compared -->    the layer's output
    in the backward: the same for dq

The start-up self-check sees the first calls only; this one sees later calls with the training's data and weights. It is
attached to the layers by torch's hooks, which count calls in training; of each kind (softmax and linear attention,
gated delta net by a provider) one call is drawn. With recomputation a layer is called twice per micro-batch: if the
first call is drawn, its output is compared, and the next call with gradients, too. Other iterations cost one comparison
and no synchronization. Tensor-parallel ranks draw alike, so that none waits for another, and check their own heads;
data-parallel replicas draw independently.

The check is independent of providers and mesh: keys travel by torch.distributed's all-gather, with positions from the
layout. All ranks of the group share the verdict, and stop.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from cp_plugin.attention import convolution
from cp_plugin.attention.api import ContextParallel
from cp_plugin.attention.linear import of_tokens
from cp_plugin.comm.packing import pack, unpack
from cp_plugin.linear.tokens import Tokens
from cp_plugin.megatron import runtime
from cp_plugin.megatron.layers import modelopt
from cp_plugin.megatron.layers.core_attention import AnyCoreAttention, CoreAttention
from cp_plugin.megatron.patches import delta_net, packing, patching
from cp_plugin.megatron.selfcheck import rotation, slices
from cp_plugin.megatron.selfcheck.attention_pass import TOLERANCE_FP8
from cp_plugin.megatron.selfcheck.checked_call import CALL, AttentionError, Place, Steps
from cp_plugin.megatron.selfcheck.exact_rows import Exact, Linear, Rounding, Softmax, compare
from cp_plugin.megatron.selfcheck.identities import CONVOLUTION, DELTA_RULE, LINEAR, SOFTMAX, Identities
from cp_plugin.testing.oracle import not_seen

_ROWS, _SCORES = 8, 1 << 22
_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
_DELTA_NET = "delta net"


def watch(chunks: Sequence[torch.nn.Module], iterations: Callable[[], int]) -> None:
    """Attach the check to the attention layers, unless ``--cp-check-every 0`` forbids it.

    iterations: returns the number of finished iterations.
    """
    settings = runtime.settings()
    every = settings.check_every or settings.identities_every
    if not every:
        return
    steps = Steps(every, iterations)
    slices.watch(chunks, steps)
    rotation.watch(chunks, steps)
    kinds: dict[str, list[Any]] = {}
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, AnyCoreAttention):
            kinds.setdefault(module.kind, []).append(module)
        elif delta_net.replaced(module):
            kinds.setdefault(_DELTA_NET, []).append(module)
    for kind, layers in kinds.items():
        watching = _Watch(layers, steps, kind, rows=settings.check_every > 0)
        for layer in layers:
            layer.register_forward_pre_hook(watching.before)
            layer.register_forward_hook(watching.after, with_kwargs=True)


class _Watch:
    """Draw one call of a step among the layers of a kind, and check its identities and some of its rows."""

    def __init__(self, layers: Sequence[Any], steps: Steps, kind: str, *, rows: bool) -> None:
        self._layers, self._steps, self._kind, self._rows = layers, steps, kind, rows
        self._step = 0
        self._draw = random.Random()
        self._layer: Any = None  # the layer of the drawn call, until it is checked
        self._earlier = 0  # calls of that layer before the drawn one
        self._repeats = False  # whether a call without gradients was checked, and the one with them is awaited
        self._inside: Inside | None = None

    def before(self, module: Any, _: Any) -> None:
        """Forward pre-hook."""
        step = self._steps.due()
        if not step or not module.training:
            return
        if step != self._step:
            self._step = step
            self._draw = random.Random(f"{step} {parallel_state.get_data_parallel_rank()}")
            layers = [layer for layer in self._layers if not modelopt.quantizes(layer)]
            self._layer = self._draw.choice(layers) if layers else None
            self._earlier = self._draw.randrange(get_num_microbatches())
            self._repeats = False
        if module is self._layer and self._earlier == 0 and self._kind != "softmax":
            self._inside = Inside()

    def after(self, module: Any, args: Any, named: dict[str, Any], out: Tensor) -> None:
        """Forward hook."""
        if module is not self._layer or not module.training:
            return
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.close()
        if self._earlier > 0:
            self._earlier -= 1
            return
        if torch.is_grad_enabled():
            self._layer = None
        elif self._repeats:
            return
        self._repeats = True
        if inside is None:
            self._softmax(module, CALL.bind(module, *args, **named).arguments, out)
        elif inside.call is not None:
            self._linear(module, inside, inside.call)

    def _place(self, module: Any, cp: ContextParallel) -> Place:
        group = module.cp_group if isinstance(module, AnyCoreAttention) else module.pg_collection.cp
        rank = 0 if module.tp_group is None else module.tp_group.rank()
        return Place(step=self._step, layer=module.layer_number, cp=cp, group=group, draw=self._draw, tp_rank=rank)

    def _softmax(self, module: CoreAttention, call: Mapping[str, Any], out: Tensor) -> None:
        q, k, v = (call[name] for name in ("query", "key", "value"))
        packed = call.get("packed_seq_params")
        place = self._place(module, module.on_pack(packed, q.size(0)))
        documents = None if packed is None else packing.bounds(packed, q.size(0) * module.context_parallel.size)
        shape = (k.size(0), 1, k.size(1)) if packed is not None and k.dim() == 3 else k.shape
        identities = Identities(place, q, shape, documents)
        identities.watch({"q": q, "k": k, "v": v, "out": out}, SOFTMAX, shape[2])
        if self._rows:
            causal = (call.get("attn_mask_type") or module.attn_mask_type) in _CAUSAL
            SoftmaxRows(place, documents, module, q, k, v, out, causal=causal).check(q, out)

    def _linear(self, module: Any, inside: Inside, call: LinearCall) -> None:
        place = self._place(module, call.cp)
        identities = Identities(place, call.q, call.k.shape, call.documents, inside.exchanged)
        pairs = LINEAR if call.beta is None else DELTA_RULE
        identities.watch({"q": call.q, "k": call.k, "v": call.v, "out": call.out}, pairs, call.k.size(2))
        if inside.convolution:
            x, bias, out = inside.convolution
            identities.watch({"mixed": x, "convolved": out}, CONVOLUTION, 1, bias)
        if self._rows:
            LinearRows(place, call).check(call.q, call.out)


class LinearCall(NamedTuple):
    """Arguments of ``ContextParallel.linear_attention``, and its result."""

    cp: ContextParallel
    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor | None
    scale: float
    documents: Tensor | None
    out: Tensor


class Inside:
    """What a layer passes to linear attention and to a short convolution before it, until ``close``."""

    def __init__(self) -> None:
        self.call: LinearCall | None = None
        self.convolution: tuple[Tensor, Tensor | None, Tensor] | None = None  # input, bias, output
        self.exchanged: list[tuple[convolution.Rows, convolution.Rows]] = []
        attend, convolve = ContextParallel.linear_attention, delta_net.short_convolution

        def attending(
            cp: ContextParallel, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, **named: Any
        ) -> Tensor:
            out = attend(cp, q, k, v, log_decay, **named)
            more = named.get("beta"), named.get("scale", 1.0), named.get("cu_seqlens")
            self.call = LinearCall(cp, q, k, v, log_decay, *more, out)
            return out

        def convolving(cp: ContextParallel, x: Tensor, weight: Tensor, bias: Tensor | None, **named: Any) -> Tensor:
            out = convolve(cp, x, weight, bias, **named)
            self.convolution = x, bias, out
            return out

        self._undo = [
            patching.lend(ContextParallel, "linear_attention", attending),
            patching.lend(delta_net, "short_convolution", convolving),
            patching.lend(convolution, "told", self.exchanged),
        ]

    def close(self) -> None:
        """Watch no further calls; a backward still appends to ``exchanged``."""
        for undo in self._undo:
            undo()


class Rows(ABC):
    """A few rows of one head on each rank."""

    def __init__(self, place: Place, documents: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """
        Args:
            documents: bounds of a pack's documents; None: not packed.
            q, k, v, out: this rank's ``[s, b, h, d]``, ``[s, b, g, d]``, ``[s, b, g, e]`` and ``[s, b, h, e]``.
        """
        self.place = place
        self.shape = s, b, h = q.shape[:3]
        self.batch, self.head = place.draw.randrange(b), place.draw.randrange(h)
        self.kv_head = self.head * k.size(2) // h
        cp, tokens = place.cp, s * place.cp.size
        count = min(s, max(1, min(_ROWS, _SCORES // tokens)))
        self.rows = random.Random(f"{place.draw.random()} {cp.index}").sample(range(s), count)
        everyone = [cp.layout.positions(tokens, cp.size, number) for number in cp.numbers]
        self.tokens = everyone[cp.index][self.rows].tolist()
        self.at_rows = everyone[cp.index][self.rows].to(q.device)
        self.at = torch.cat(everyone).to(q.device)
        self.documents = documents
        self.q, self.got = self._of(q), self._of(out)
        self.local = [x[:, self.batch, self.kv_head].detach() for x in (k, v)]
        self.dout: Tensor | None = None

    @abstractmethod
    def exact(self, keys: Sequence[Tensor]) -> Softmax | Linear:
        """These rows, computed from all ranks' ``local``."""

    @property
    @abstractmethod
    def rounding(self) -> Rounding:
        """The kernel's rounding."""

    def check(self, q: Tensor, out: Tensor) -> None:
        """Compare the output, and in the backward the gradient of q; collective over the group.

        Args:
            q, out: the tensors whose gradients autograd computes.

        Raises:
            AttentionError: on every rank, naming the wrong rows of each rank.
        """
        with self.place.booked():
            self._judge("out", self.got, self.exact(self._gathered()).out())
        if q.requires_grad and out.requires_grad:
            out.register_hook(self._keep_gradient)
            q.register_hook(self._check_gradient)

    def _keep_gradient(self, dout: Tensor) -> None:
        self.dout = self._of(dout)

    def _check_gradient(self, dq: Tensor) -> None:
        assert self.dout is not None, "the gradient of queries before that of the output"
        with self.place.booked():
            self._judge("dq", self._of(dq), self.exact(self._gathered()).dq(self.dout))
        self.local = []

    def _of(self, x: Tensor) -> Tensor:
        """The head's rows ``[r, d]`` of a tensor whose heads may be joined."""
        return x.detach().reshape(*self.shape, -1)[self.rows, self.batch, self.head]

    def _gathered(self) -> list[Tensor]:
        """All ranks' ``local``, concatenated: ``[n, ...]``."""
        shapes, dtypes = zip(*((x.shape, x.dtype) for x in self.local), strict=True)
        everyone = self.place.of_all_ranks(pack([x.contiguous() for x in self.local]))
        return [torch.cat(x) for x in zip(*(unpack(one, shapes, dtypes, 1) for one in everyone), strict=True)]

    def _judge(self, name: str, got: Tensor, want: Exact) -> None:
        verdict = compare(got, want, self.rounding)
        rows = torch.where(verdict.wrong, self.at_rows, -1)
        mine = torch.cat((torch.stack((verdict.error, verdict.allowed)), rows.double()))
        group, found = self.place.group, []
        for index, (error, allowed, *at) in enumerate(torch.stack(self.place.of_all_ranks(mine)).tolist()):
            wrong = sorted(int(token) for token in at if token >= 0)
            if wrong:
                rank = index if group is None else dist.get_global_rank(group, index)
                tokens = f"{len(wrong)} of {len(at)} rows (tokens {', '.join(map(str, wrong))})"
                found.append(f"rank {rank}: {name} of {tokens} off by {error:.1e}, where rounding allows {allowed:.1e}")
        if found:
            raise AttentionError(self._message(found))

    def _message(self, found: Sequence[str]) -> str:
        place, settings = self.place, runtime.settings()
        head = place.tp_rank * self.shape[2] + self.head
        more = f" (and {len(found) - 4} more ranks)" if len(found) > 4 else ""
        return (
            f"--cp-check-every {settings.check_every}: in step {place.step}, layer {place.layer}, head {head} of batch "
            f"entry {self.batch}, the {place.cp.provider.name} attention on the {place.cp.layout.name} layout does not "
            f"match its queries, keys and values. {'; '.join(found[:4])}{more}. A rank attended to data other than "
            "what was sent: a device, a link or a buffer is at fault. Resume from an earlier checkpoint, and watch "
            "whether the same rank fails again"
        )


class SoftmaxRows(Rows):
    """Rows of softmax attention."""

    def __init__(
        self,
        place: Place,
        documents: Tensor | None,
        module: CoreAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        *,
        causal: bool,
    ) -> None:
        """q, k, v, out: as the module has them; without b if packed."""
        if documents is not None:
            q, k, v = (x.unsqueeze(1) for x in (q, k, v))
        super().__init__(place, documents, q, k, v, out)
        self.causal, self.window = causal, module.window
        self.scale = q.size(3) ** -0.5 if module.softmax_scale is None else module.softmax_scale
        self.sink = None if module.softmax_offset is None else module.softmax_offset[self.head].detach().clone()

    @property
    def rounding(self) -> Rounding:
        fp8 = self.place.cp.options.fp8
        limit = None if fp8 is None else TOLERANCE_FP8[fp8]
        return Rounding.of(self.q.dtype, cuda=self.q.is_cuda, of_norm=limit, hops=self.place.hops)

    def exact(self, keys: Sequence[Tensor]) -> Softmax:
        k, v = keys
        hidden = not_seen(self.at_rows, self.at, self.causal, self.window)
        if self.documents is not None:
            bounds = self.documents.to(self.at.device)
            of_rows, of_keys = (torch.bucketize(at, bounds, right=True) for at in (self.at_rows, self.at))
            hidden = hidden | (of_rows[:, None] != of_keys)
        return Softmax(self.q, k, v, hidden, scale=self.scale, sink=self.sink, rounding=self.rounding)


class LinearRows(Rows):
    """Rows of linear attention, between a layer's features and its norm."""

    def __init__(self, place: Place, call: LinearCall) -> None:
        super().__init__(place, call.documents, call.q, call.k, call.v, call.out)
        self.scale = call.scale
        decay = None if call.log_decay is None else of_tokens(call.k, call.log_decay)
        given = [None if x is None else x[:, self.batch, self.kv_head].detach() for x in (decay, call.beta)]
        self._given = [x is not None for x in given]
        self.local += [x for x in given if x is not None]

    @property
    def rounding(self) -> Rounding:
        return Rounding.of(self.q.dtype, cuda=self.q.is_cuda)

    def exact(self, keys: Sequence[Tensor]) -> Linear:
        k, v, *more = (x[self.at.argsort()][:, None, None] for x in keys)
        decay, beta = (more.pop(0) if given else None for given in self._given)
        starts = None
        if self.documents is not None:
            starts = torch.isin(torch.arange(len(k)), self.documents[:-1].cpu())[:, None].to(k.device)
        decay = decay[..., None] if decay is not None and decay.dim() == 3 else decay
        x = Tokens(k, k, v, decay, beta, starts)
        return Linear(x, self.q, self.tokens, scale=self.scale, rounding=self.rounding)
