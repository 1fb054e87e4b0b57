"""Self-check of Mamba and gated delta net by Megatron's own all-to-all: a layer's outputs and gradients as on one rank.

    hidden states of this rank's tokens  --> layer              --> outputs, gradient   --compared-->
    the whole sequence                   --> layer, as one rank --> outputs, gradient of these tokens

Which heads a rank has, with which parts of the layer's parameters and in which order of tokens, is in many functions of
Megatron's; all of them are called here. Not checked: sequence parallelism, where each rank has fewer tokens; FP8, whose
histories a forward pass would begin; and weights that are gathered for each pass (FSDP).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from cp_plugin.megatron.patches import delta_net, hybrid, stock
from cp_plugin.megatron.patches.probing import accepted
from cp_plugin.megatron.selfcheck.attention_pass import TOLERANCE_LINEAR, TOLERANCE_TF32

_INNER = ("MambaMixer", "GatedDeltaNet")
_HALF = 0.1
"""Tolerance in bfloat16 and float16, where layers of other sizes round otherwise; with other heads' parameters: 1."""


def states_problems(chunks: Sequence[torch.nn.Module], tokens: int, mine: Tensor) -> list[str]:
    """Mismatches of one layer of each kind; collective over the context-parallel ranks.

    Args:
        chunks: of the model.
        tokens: length of the whole sequence.
        mine: positions of this rank's tokens.
    """
    kinds: dict[str, Any] = {}
    for module in (module for chunk in chunks if type(chunk) is DistributedDataParallel for module in chunk.modules()):
        name = type(module).__name__
        if name in _INNER and hybrid.keeps_layout(module) and not delta_net.replaced(module):
            kinds.setdefault(name, module)
    return [found for layer in kinds.values() if (found := _of_layer(layer, tokens, mine))]


def _of_layer(layer: Any, tokens: int, mine: Tensor) -> str:
    config = layer.config
    if config.sequence_parallel or getattr(config, "fp8", None) or getattr(config, "fp4", None):
        return ""
    generator = torch.Generator().manual_seed(60)
    hidden, dout = (torch.randn(tokens, 1, config.hidden_size, generator=generator) for _ in range(2))
    hidden, dout = (x.to(mine.device, config.params_dtype) for x in (hidden, dout))
    allowed = _HALF
    if config.params_dtype == torch.float32:
        allowed = TOLERANCE_TF32 if mine.device.type == "cuda" else TOLERANCE_LINEAR
    group = parallel_state.get_context_parallel_group()
    found = _computed(_twin(layer, group), hidden[mine], dout[mine])
    wanted = _computed(_twin(layer, stock.Group()), hidden, dout)
    for name, got, want in zip(("outputs", "gradients"), found, wanted, strict=True):
        error = ((got - want[mine]).norm() / want[mine].norm()).item()
        if not error <= allowed:  # true for NaN, too
            kind = "Mamba" if type(layer).__name__ == "MambaMixer" else "gated delta net"
            return f"the {name} of {kind} are off by {error:.1e} (relative; allowed {allowed:.0e})"
    return ""


def _computed(layer: Any, hidden: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs, and the gradient of the hidden states."""
    leaf = hidden.clone().requires_grad_()
    with torch.enable_grad():
        out, _bias = layer.forward(leaf, **accepted(layer.forward, attention_mask=None))
        (gradient,) = torch.autograd.grad(out, leaf, dout)
    return out.detach().float(), gradient.float()


def _twin(layer: Any, group: Any) -> Any:
    """The layer, as one of the ranks of a group.

    Its biases and decays are changed by head, since those of a new layer differ little: with another head's it computes
    something else.
    """
    twin, generator = copy.copy(layer), torch.Generator().manual_seed(61)
    changed = {
        id(x): x.detach() + torch.randn(x.shape, generator=generator).to(x)
        for x in layer._parameters.values()
        if x is not None and x.dim() == 1
    }
    own = {name: changed.get(id(x), x) for name, x in layer._parameters.items()}
    twin._parameters = {name: None if x is None else torch.nn.Parameter(x) for name, x in own.items()}
    if hasattr(layer, "cp"):
        kind = type(layer.cp)
        given = {name: getattr(layer.cp, name) for name in inspect.signature(kind).parameters if name != "cp_group"}
        twin.cp = kind(cp_group=group, **{name: changed.get(id(x), x) for name, x in given.items()})
    else:
        twin.pg_collection, twin.cp_size = copy.copy(layer.pg_collection), group.size()
        twin.pg_collection.cp = group
        getattr(twin, "_setup_variant_attrs", lambda: None)()  # sizes by ranks, since 0.19
    return twin
