"""CUDA graphs without CUDA: what Megatron would capture runs eagerly, and no function of the plugin may run in it.

Megatron's own code decides which modules and methods are captured, and what happens around them. Only the capturing
itself is replaced (``install``): Transformer Engine's ``make_graphed_callables``, and Megatron's ``CudaGraphManager``
and ``FullCudaGraphWrapper``. A captured part runs in every step, forward and backward, as its replay would. A profiler
sees every function called; of the plugin's, only the stand-ins for CUDA are allowed.

It cannot show whether CUDA can capture a part at all (host synchronisation, changing addresses), and with what result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

import cp_plugin

_OURS = str(Path(cp_plugin.__file__).parent)
_STAND_INS = str(Path(_OURS, "megatron/cpu"))


class CapturedError(Exception):
    """A function of the plugin ran where a CUDA graph would have captured it."""


def install() -> None:
    """Put the stand-ins in place; for a process that ends after its training."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import cuda_graphs, module, transformer_layer
    from megatron.training import training

    tracker = random.initialize_rng_tracker
    # With graphs, Megatron asks for Transformer Engine's random numbers, which need CUDA; no dropout draws any here.
    random.initialize_rng_tracker = lambda *_, **__: tracker(use_te_rng_tracker=False)
    cuda_graphs.CudaGraphManager = Manager
    training.TECudaGraphHelper = Helper
    training.FullCudaGraphWrapper = Whole
    # Of a layer it asks for the library once more, to make a mask for an attention that is captured.
    plain = module.GraphableMegatronModule._get_te_cuda_graph_replay_args
    transformer_layer.TransformerLayer._get_te_cuda_graph_replay_args = plain


class Manager(torch.nn.Module):
    """Replaces ``CudaGraphManager``: of a module, or of one of its methods."""

    def __init__(self, config: Any, base_module: Any = None, function_name: str | None = None, **unused: Any) -> None:
        super().__init__()
        if function_name is not None:
            method = getattr(base_module, function_name)
            setattr(base_module, function_name, lambda *args, **kwargs: replayed(method, args, kwargs))

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return replayed(module.forward, args, kwargs)


class Helper:
    """Replaces ``TECudaGraphHelper``: graphs of the layers that Megatron calls graphable."""

    def __init__(self, model: list[torch.nn.Module], config: Any, *unused: Any, **named: Any) -> None:
        self._model, self._config, self._finished = model, config, False

    def create_cudagraphs(self) -> None:
        from megatron.core.ssm.mamba_layer import MambaLayer
        from megatron.core.transformer.cuda_graphs import _layer_is_graphable
        from megatron.core.transformer.transformer_layer import TransformerLayer

        for chunk in self._model:
            for layer in chunk.modules():
                if isinstance(layer, TransformerLayer | MambaLayer) and _layer_is_graphable(layer, self._config):
                    layer.cuda_graphs = [_Graph(layer)]
        self._finished = True

    def capture_finished(self) -> bool:
        return self._finished

    graphs_created = capture_finished

    def cuda_graph_set_manual_hooks(self) -> None: ...

    def delete_cuda_graphs(self) -> None: ...


class _Graph:
    """Replaces what ``make_graphed_callables`` makes of a layer."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer = layer

    def __call__(self, *args: Any, is_first_microbatch: bool = False, **kwargs: Any) -> Any:
        return replayed(self._captured, args, kwargs)

    def _captured(self, *args: Any, **kwargs: Any) -> Any:
        from megatron.core.transformer import cuda_graphs

        cuda_graphs._set_capture_start()
        try:
            return self._layer._te_cuda_graph_capture(*args, **kwargs)
        finally:
            cuda_graphs._set_capture_end()


class Whole:
    """Replaces ``FullCudaGraphWrapper``: of a whole step."""

    def __init__(self, step: Callable[..., Any], **unused: Any) -> None:
        self._step = step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _nothing_of_ours():
            return self._step(*args, **kwargs)


def replayed(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function in whose forward and backward nothing of the plugin may run.

    Raises:
        CapturedError: if something does; names every function.
    """
    leaves, given_as = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    returned_as: list[TreeSpec] = []

    def run(*tensors: Tensor) -> list[Any]:
        by_place = dict(enumerate(leaves)) | dict(zip(places, tensors, strict=True))
        positional, named = tree_unflatten(list(by_place.values()), given_as)
        with _nothing_of_ours():
            results, structure = tree_flatten(function(*positional, **named))
        returned_as.append(structure)
        return results

    out = _Replay.apply(run, *(leaves[i] for i in places))
    return tree_unflatten(out, returned_as[0])


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., list[Any]], *tensors: Tensor) -> tuple[Any, ...]:
        ctx.inputs = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        with torch.enable_grad():
            ctx.outputs = run(*ctx.inputs)
        return tuple(x.detach() if isinstance(x, Tensor) else x for x in ctx.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pairs = [(x, g) for x, g in zip(ctx.outputs, grads, strict=True) if isinstance(x, Tensor) and x.requires_grad]
        with _nothing_of_ours():
            torch.autograd.backward(*zip(*pairs, strict=True))
        return None, *(x.grad for x in ctx.inputs)


@contextmanager
def _nothing_of_ours() -> Iterator[None]:
    ours: dict[str, None] = {}

    def called(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(_OURS) and not file.startswith(_STAND_INS):
            ours[f"{file.removeprefix(_OURS)}:{frame.f_code.co_name}"] = None

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(before)
    if ours:
        raise CapturedError(f"a CUDA graph would capture {', '.join(ours)}")
