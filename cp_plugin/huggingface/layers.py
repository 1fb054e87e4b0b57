"""Layers other than attention that look at other tokens: gated delta nets, short convolutions, rotary positions.

transformers' delta nets and convolutions call functions of their modeling file, such as ``causal_conv1d_fn``. While a
layer of a divided model runs, these stand for the plugin's own over all ranks. Rotary embeddings whose angles depend on
the largest position (dynamic NTK, LongRoPE) are also given the largest position of all ranks.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.attention.convolution import short_convolution
from cp_plugin.engine.common.eager import eager
from cp_plugin.engine.core.mask import document_bounds
from cp_plugin.engine.methods import registry as providers
from cp_plugin.huggingface.attention import Division, refuse

_running = threading.local()
"""``division``: whose layer runs in this thread."""


def gated_delta_rule(
    division: Division,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """``chunk_gated_delta_rule`` of flash-linear-attention: query, key ``[b, s, g, d]``, value ``[b, s, h, e]``."""
    refuse(initial_state is not None or output_final_state, "a state cache: train with use_cache=False")
    if use_qk_l2norm_in_kernel:
        query, key = (_normal(x) for x in (query, key))
    if division.probe is not None:
        repeated = (x.sum(-1, keepdim=True).repeat_interleave(value.size(2) // x.size(2), 2) for x in (query, key))
        return value * (beta * g).unsqueeze(-1).to(value.dtype) + sum(repeated), None
    if key.size(2) != value.size(2):
        query, key = (x.repeat_interleave(value.size(2) // x.size(2), 2) for x in (query, key))
    linear, bounds = _linear_call(division, query.size(1), cu_seqlens)
    out = linear.linear_attention(
        *(x.transpose(0, 1) for x in (query, key, value, g)),
        beta=beta.transpose(0, 1),
        scale=query.size(-1) ** -0.5 if scale is None else scale,
        cu_seqlens=bounds,
    )
    return out.transpose(0, 1), None


def convolution(
    division: Division,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """``causal_conv1d_fn`` of causal-conv1d: x ``[b, c, s]``, weight ``[c, w]``."""
    if division.probe is not None:
        out = x * weight[:, -1:] + (0 if bias is None else bias[:, None])
    else:
        linear, bounds = _linear_call(division, x.size(2), cu_seq_lens_q)
        out = short_convolution(linear, x.permute(2, 0, 1), weight, bias, cu_seqlens=bounds).permute(1, 2, 0)
    if activation is None:
        return out
    from transformers.activations import ACT2FN

    return ACT2FN[activation](out)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolution,
    "chunk_gated_delta_rule": gated_delta_rule,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
}
"""Name in a modeling file -> what stands for it."""


class _Either:
    """A function of a modeling file, or the one over all ranks while a layer of a divided model runs."""

    def __init__(self, original: Callable[..., Any], divided: Callable[..., Any]) -> None:
        self.original, self.divided = original, eager(divided)

    def __call__(self, *args: Any, **named: Any) -> Any:
        division = getattr(_running, "division", None)
        if division is None:
            return self.original(*args, **named)
        if "hidden_states" in named:
            named["x"] = named.pop("hidden_states")
        return self.divided(division, *args, **named)


class _Convolution:
    """The same for a layer that calls its ``nn.Conv1d``, and cuts off what comes after the sequence."""

    def __init__(self, layer: nn.Conv1d) -> None:
        self.layer = layer
        vars(layer)["forward"] = self  # the instance's, which shadows the class's

    def __call__(self, x: Tensor) -> Tensor:
        division = getattr(_running, "division", None)
        if division is None:
            return type(self.layer).forward(self.layer, x)
        return eager(convolution)(division, x, self.layer.weight.squeeze(1), self.layer.bias)

    def remove(self) -> None:
        if vars(self.layer).get("forward") is self:
            del self.layer.forward


def _enter(division: Division, layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Before a layer that mixes tokens."""
    _running.division = division if division.divides_layers else None
    if division.probe is None and "cu_seq_lens_q" not in named:
        division.ignored.add("cu_seq_lens_q")


def _leave(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    _running.division = None


def _lengthen(
    division: Division, layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before a rotary embedding: one more position, the largest of all ranks, whose angles are then dropped."""
    if not division.divides_layers:
        return None
    last = division.call.last_position

    def longer(positions: Tensor) -> Tensor:
        one = positions.new_empty((*positions.shape[:-1], 1))
        return torch.cat((positions, one.copy_(last) if isinstance(last, Tensor) else one.fill_(last)), -1)

    bound = inspect.signature(type(layer).forward).bind(layer, *args, **named)
    bound.arguments["position_ids"] = longer(bound.arguments["position_ids"])
    return bound.args[1:], bound.kwargs


def _shorten(division: Division, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return tree_map(lambda x: x[..., :-1, :], output) if division.divides_layers else None


def divide(model: nn.Module, division: Division) -> list[Any]:
    """Divide these layers of a model, too, while the division is in force; ``remove`` of what is returned undoes it.

    The hooks are methods of the division, so that those of a copied model are its own division's.
    """
    handles: list[Any] = []
    for layer in mixers(model):
        _stand_in(vars(sys.modules[type(layer).__module__]))
        _stand_in(vars(layer))
        for child in layer.children():
            if isinstance(child, nn.Conv1d) and _is_causal(child) and "forward" not in vars(child):
                handles.append(_Convolution(child))
        handles.append(layer.register_forward_pre_hook(MethodType(_enter, division), with_kwargs=True))
        handles.append(layer.register_forward_hook(_leave, always_call=True))
    for layer in rotary(model):
        handles.append(layer.register_forward_pre_hook(MethodType(_lengthen, division), with_kwargs=True))
        handles.append(layer.register_forward_hook(MethodType(_shorten, division)))
    return handles


def mixers(model: nn.Module) -> Iterator[nn.Module]:
    """Layers that call functions which can be divided."""
    return (layer for layer in model.modules() if not isinstance(layer, nn.ModuleList) and _calls(type(layer)))


def rotary(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that make angles of positions: they have no parameters."""
    return (
        layer
        for layer in model.modules()
        if "position_ids" in inspect.signature(type(layer).forward).parameters and not [*layer.parameters()]
    )


def lasp2(model: nn.Module, cp: ContextParallel) -> ContextParallel | None:
    """LASP-2 on the tokens of ``cp`` for a model's linear layers; None where it has none. Collective. ValueError for
    tokens on which linear attention cannot run."""
    names = sorted({type(layer).__name__ for layer in mixers(model)})
    if not names:
        return None
    if cp.size == 1:
        return ContextParallel("lasp2", group=None)
    if cp.layout.name not in providers.get("lasp2").layouts:
        raise ValueError(
            f"{', '.join(names)}: linear attention and convolutions need neighbouring tokens on the same rank, but the "
            f"layout is {cp.layout.name}: use zigzag or contiguous, such as "
            'ContextParallel("ring", layout="zigzag", group=group)'
        )
    where: dict[str, Any] = {"mesh": cp.mesh} if cp.group is None else {"group": cp.group}
    linear = ContextParallel("lasp2", layout=cp.layout.name, **where)
    linear._number(cp.numbers)
    return linear


def _linear_call(division: Division, tokens: int, cu_seqlens: Tensor | None) -> tuple[ContextParallel, Tensor | None]:
    """The linear layers' ``ContextParallel``, and the bounds of this call's documents.

    Old versions of transformers do not pass the bounds on; ``Forward.check_output`` then allows one document only.
    """
    assert division.linear is not None
    bounds = division.call.documents
    if cu_seqlens is not None:
        bounds = document_bounds(cu_seqlens, tokens * division.cp.size)
    return division.linear, torch.tensor(bounds) if bounds else None


def _normal(x: Tensor) -> Tensor:
    """Scale to length 1, computed in float32 at least."""
    wide = x.float() if x.dtype.itemsize < 4 else x
    return (wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _stand_in(names: dict[str, Any]) -> None:
    for name, divided in _FUNCTIONS.items():
        if callable(original := names.get(name)) and not isinstance(original, _Either):
            names[name] = _Either(original, divided)


def _calls(kind: type) -> bool:
    """Return True if a method of the class names one of the functions, or its convolution is a causal one."""
    module = sys.modules.get(kind.__module__)
    if module is None or not any(name in vars(module) for name in _FUNCTIONS):
        return False
    methods = (inspect.unwrap(method) for method in vars(kind).values() if inspect.isfunction(method))
    return any(name in method.__code__.co_names for method in methods for name in _FUNCTIONS)


def _is_causal(layer: nn.Module) -> bool:
    return (
        isinstance(layer, nn.Conv1d)
        and layer.groups == layer.in_channels == layer.out_channels
        and layer.padding == (layer.kernel_size[0] - 1,)
        and (layer.stride, layer.dilation) == ((1,), (1,))
    )
