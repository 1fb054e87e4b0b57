"""What probes of contracts share: small numbers, Megatron's own layout of them, and the words for a difference."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from cp_plugin.megatron.patches import stock

TOKENS = 16


def accepted(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """The arguments that this version of a function has."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


def config(**settings: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
    plain = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "masked_softmax_fusion": False}
    with warnings.catch_warnings(action="ignore"):  # about defaults of Megatron's own
        return TransformerConfig(**sizes, **plain, **settings)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def zigzag(x: Tensor, group: stock.Group, dim: int = 1) -> Tensor:
    """A rank's chunks of a whole sequence."""
    chunks = x.chunk(2 * group.size(), dim)
    return torch.cat((chunks[group.rank()], chunks[2 * group.size() - 1 - group.rank()]), dim)


def whole(parts: list[Tensor]) -> Tensor:
    """The inverse of ``zigzag``, along dimension 1."""
    halves = [part.chunk(2, 1) for part in parts]
    return torch.cat([half for half, _ in halves] + [half for _, half in reversed(halves)], 1)


def first_difference(want: Mapping[str, Any], got: Mapping[str, Any]) -> str | None:
    if want.keys() != got.keys():
        return f"the entries are {sorted(want)}, and {sorted(got)} by cp_plugin"
    named = ((name, want[name], got[name]) for name in want if isinstance(want[name], Tensor))
    return next((found for each in named if (found := difference(*each))), None)


def difference(name: str, want: Tensor, got: Any, limit: float = 1e-6) -> str | None:
    """What differs, with the first values of both; None: nothing beyond rounding."""
    want, got = want.detach().cpu(), torch.as_tensor(got).detach().cpu()
    if want.shape == got.shape and torch.allclose(want.double(), got.double(), rtol=limit, atol=limit):
        return None
    here, there = (x.flatten()[:8].tolist() for x in (want, got))
    return f"{name}: {here} of {list(want.shape)} by this Megatron, {there} of {list(got.shape)} by cp_plugin"
