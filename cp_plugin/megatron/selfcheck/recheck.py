"""``--cp-check-every N``: recompute a few rows of one head of one layer's attention in every N-th iteration.

    step 300: layer 7, third call, batch entry 1, head 5              drawn by step from a separate generator
    all-gather of that head's keys and values over the context-parallel group, recorded under the phase "check"
    8 rows of each rank, exactly (``exact_rows``)  -- compared -->    the layer's output
    in the backward: the same for dq

The start-up self-check sees the first calls only; this one sees later calls with the training's data and weights. It is
attached to the layers by torch's hooks, which count calls in training. With recomputation a layer is called twice per
micro-batch, and either call may be drawn; without gradients dq is not compared. Other iterations cost one comparison
and no synchronization. Tensor-parallel ranks draw alike, so that none waits for another, and check their own heads;
data-parallel replicas draw independently.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from cp_plugin.megatron import runtime
from cp_plugin.megatron.layers import modelopt
from cp_plugin.megatron.layers.core_attention import AnyCoreAttention, CoreAttention
from cp_plugin.megatron.layers.linear_attention import LinearCoreAttention
from cp_plugin.megatron.patches import packing
from cp_plugin.megatron.selfcheck.recheck_rows import LinearRows, Place, Rows, SoftmaxRows

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
_CALL = inspect.signature(AnyCoreAttention.forward)


def watch(chunks: Sequence[torch.nn.Module], iterations: Callable[[], int]) -> None:
    """Attach the check to the attention layers, if ``--cp-check-every`` asks for it.

    iterations: returns the number of finished iterations.
    """
    every = runtime.settings().check_every
    layers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, AnyCoreAttention)]
    if every:
        watching = _Watch(layers, every, iterations)
        for layer in layers:
            layer.register_forward_pre_hook(watching.before)
            layer.register_forward_hook(watching.after, with_kwargs=True)


class _Watch:
    """Draw one call of a step and check some of its rows."""

    def __init__(self, layers: Sequence[AnyCoreAttention], every: int, iterations: Callable[[], int]) -> None:
        self._layers, self._every, self._iterations = layers, every, iterations
        self._step = 0
        self._draw = random.Random()
        self._layer: AnyCoreAttention | None = None
        """The layer of the drawn call, until it is checked."""
        self._earlier = 0
        """Calls of that layer before the drawn one."""
        self._linear: _Inside | None = None

    def before(self, module: AnyCoreAttention, _: Any) -> None:
        """Forward pre-hook."""
        step = self._iterations() + 1
        if step % self._every or not module.training:
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
        call = _CALL.bind(module, *args, **named).arguments
        q, k, v = (call[name] for name in ("query", "key", "value"))
        packed = call.get("packed_seq_params")
        documents = None if packed is None else packing.bounds(packed, q.size(0) * module.context_parallel.size)
        place = Place(
            step=self._step,
            layer=module.layer_number,
            cp=module.on_pack(packed, q.size(0)),
            group=module.cp_group,
            draw=self._draw,
            tp_rank=0 if module.tp_group is None else module.tp_group.rank(),
        )
        rows: Rows
        if self._linear is not None:
            inside, self._linear = self._linear, None
            rows = LinearRows(place, documents, inside.prepared, inside.out)
            source, result = inside.prepared.q, inside.out
        else:
            assert isinstance(module, CoreAttention)
            causal = (call.get("attn_mask_type") or module.attn_mask_type) in _CAUSAL
            rows = SoftmaxRows(place, documents, module, q, k, v, out, causal=causal)
            source, result = q, out
        rows.check()
        if source.requires_grad and result.requires_grad:
            result.register_hook(rows.keep_gradient)
            source.register_hook(rows.check_gradient)


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
