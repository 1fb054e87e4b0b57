"""``--cp-check-every N``: check one call of one layer's attention in every N-th iteration.

By default, every 100 iterations: the ``identities`` of its gradients. With N, every N iterations, these and a few rows:

    step 300: layer 7, third call, batch entry 1, head 5              drawn by step from a separate generator
    all-gather of that head's keys and values over the context-parallel group, recorded under the phase "check"
    8 rows of each rank, exactly (``exact_rows``)  -- compared -->    the layer's output
    in the backward: the same for dq

The start-up self-check sees the first calls only; this one sees later calls with the training's data and weights. It is
attached to the layers by torch's hooks, which count calls in training. With recomputation a layer is called twice per
micro-batch, and either call may be drawn; without gradients dq is not compared. Other iterations cost one comparison
and no synchronization. Tensor-parallel ranks draw alike, so that none waits for another, and check their own heads;
data-parallel replicas draw independently.

The check is independent of providers and mesh: keys travel by torch.distributed's all-gather, with positions from the
layout. All ranks of the group share the verdict, and stop.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from cp_plugin.comm.packing import pack, unpack
from cp_plugin.linear.variants import Prepared
from cp_plugin.megatron import runtime
from cp_plugin.megatron.layers import modelopt
from cp_plugin.megatron.layers.core_attention import AnyCoreAttention, CoreAttention
from cp_plugin.megatron.layers.linear_attention import LinearCoreAttention
from cp_plugin.megatron.patches import packing
from cp_plugin.megatron.selfcheck import rotation, slices
from cp_plugin.megatron.selfcheck.attention_pass import TOLERANCE_FP8
from cp_plugin.megatron.selfcheck.checked_call import CALL, AttentionError, Place, Steps
from cp_plugin.megatron.selfcheck.exact_rows import Exact, Linear, Rounding, Softmax, compare
from cp_plugin.megatron.selfcheck.identities import watch_identities
from cp_plugin.testing.oracle import not_seen

_ROWS, _SCORES = 8, 1 << 22
_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


def watch(chunks: Sequence[torch.nn.Module], iterations: Callable[[], int]) -> None:
    """Attach the check to the attention layers, unless ``--cp-check-every 0`` forbids it.

    iterations: returns the number of finished iterations.
    """
    settings = runtime.settings()
    every = settings.check_every or settings.identities_every
    layers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, AnyCoreAttention)]
    if every:
        steps = Steps(every, iterations)
        slices.watch(chunks, steps)
        rotation.watch(chunks, steps)
        watching = _Watch(layers, steps, rows=settings.check_every > 0)
        for layer in layers:
            layer.register_forward_pre_hook(watching.before)
            layer.register_forward_hook(watching.after, with_kwargs=True)


class _Watch:
    """Draw one call of a step, and check its identities and some of its rows."""

    def __init__(self, layers: Sequence[AnyCoreAttention], steps: Steps, *, rows: bool) -> None:
        self._layers, self._steps, self._rows = layers, steps, rows
        self._step = 0
        self._draw = random.Random()
        self._layer: AnyCoreAttention | None = None  # the layer of the drawn call, until it is checked
        self._earlier = 0  # calls of that layer before the drawn one
        self._linear: _Inside | None = None

    def before(self, module: AnyCoreAttention, _: Any) -> None:
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
        if module is self._layer and self._earlier == 0 and isinstance(module, LinearCoreAttention):
            self._linear = _Inside(module)

    def after(self, module: AnyCoreAttention, args: Any, named: dict[str, Any], out: Tensor) -> None:
        """Forward hook."""
        if module is not self._layer or not module.training:
            return
        if self._earlier > 0:
            self._earlier -= 1
            return
        self._layer = None
        call = CALL.bind(module, *args, **named).arguments
        q, k, v = (call[name] for name in ("query", "key", "value"))
        packed = call.get("packed_seq_params")
        place = Place(
            step=self._step,
            layer=module.layer_number,
            cp=module.on_pack(packed, q.size(0)),
            group=module.cp_group,
            draw=self._draw,
            tp_rank=0 if module.tp_group is None else module.tp_group.rank(),
        )
        inside, self._linear = self._linear, None
        if inside is not None:
            q, k, v, out = inside.prepared.q, inside.prepared.k, inside.prepared.v, inside.out
        watch_identities(place, q, k, v, out, packed=packed is not None, linear=inside is not None)
        if not self._rows:
            return
        documents = None if packed is None else packing.bounds(packed, q.size(0) * module.context_parallel.size)
        rows: Rows
        if inside is not None:
            rows = LinearRows(place, documents, inside.prepared, out)
        else:
            assert isinstance(module, CoreAttention)
            causal = (call.get("attn_mask_type") or module.attn_mask_type) in _CAUSAL
            rows = SoftmaxRows(place, documents, module, q, k, v, out, causal=causal)
        rows.check()
        if q.requires_grad and out.requires_grad:
            out.register_hook(rows.keep_gradient)
            q.register_hook(rows.check_gradient)


class _Inside:
    """Capture what a linear layer passes to its provider and gets back in its next forward."""

    def __init__(self, module: LinearCoreAttention) -> None:
        layer = module.linear
        prepare, finish = layer.prepare, layer.finish

        def preparing(*args: Any) -> Any:
            self.prepared = prepare(*args)
            return self.prepared

        def finishing(out: Tensor) -> Tensor:
            self.out = out
            del layer.prepare, layer.finish  # the instance's, which shadow the class's
            return finish(out)

        layer.prepare, layer.finish = preparing, finishing  # type: ignore[method-assign]


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

    def check(self) -> None:
        """Compare the output; collective over the group.

        Raises:
            AttentionError: on every rank, naming the wrong rows of each rank.
        """
        with self.place.booked():
            self._judge("out", self.got, self.exact(self._gathered()).out())

    def keep_gradient(self, dout: Tensor) -> None:
        """Tensor hook of the output."""
        self.dout = self._of(dout)

    def check_gradient(self, dq: Tensor) -> None:
        """Tensor hook of the queries; like ``check``."""
        assert self.dout is not None, "the gradient of queries before that of the output"
        with self.place.booked():
            self._judge("dq", self._of(dq), self.exact(self._gathered()).dq(self.dout))
        self.local = []

    def hidden(self, causal: bool, window: tuple[int, int] | None) -> Tensor:
        """Keys masked for each row: bool ``[r, n]``."""
        found = not_seen(self.at_rows, self.at, causal, window)
        if self.documents is None:
            return found
        bounds = self.documents.to(self.at.device)
        of_rows, of_keys = (torch.bucketize(at, bounds, right=True) for at in (self.at_rows, self.at))
        return found | (of_rows[:, None] != of_keys)

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
        hidden = self.hidden(self.causal, self.window)
        return Softmax(self.q, k, v, hidden, scale=self.scale, sink=self.sink, rounding=self.rounding)


class LinearRows(Rows):
    """Rows of linear attention, between a layer's features and its norm."""

    def __init__(self, place: Place, documents: Tensor | None, x: Prepared, out: Tensor) -> None:
        """out: the provider's result for ``x``."""
        super().__init__(place, documents, x.q, x.k, x.v, out)
        self.scale = x.scale
        self.each: float | None = None
        if x.log_decay is None or x.log_decay.dim() == 1:
            self.each = 0.0 if x.log_decay is None else x.log_decay[self.kv_head].item()
        else:
            self.local.append(x.log_decay[:, self.batch, self.kv_head].detach())

    @property
    def rounding(self) -> Rounding:
        return Rounding.of(self.q.dtype, cuda=self.q.is_cuda)

    def exact(self, keys: Sequence[Tensor]) -> Linear:
        if self.each is not None:
            total, of_rows = (self.each * at.double()[:, None] for at in (self.at, self.at_rows))
        else:
            order = self.at.argsort()
            sums = keys[2].double()[order].cumsum(0)
            total, of_rows = sums[self.at], sums[self.at_rows]
        return Linear(
            q=self.q,
            k=keys[0],
            v=keys[1],
            seen=~self.hidden(True, None),
            decay_of_rows=of_rows,
            decay=total,
            scale=self.scale,
            rounding=self.rounding,
        )
