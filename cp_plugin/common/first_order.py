"""``@first_order``: gradients of an autograd.Function that cannot be differentiated again, and say so.

torch's ``once_differentiable`` marks gradients only where the incoming gradient requires one. Under
``loss + penalty(grad(loss, q, create_graph=True))`` it does not, and the penalty would be dropped without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

type Backward = Callable[..., tuple[Any, ...]]


def first_order(backward: Backward) -> Backward:
    """Run a backward without autograd; to differentiate its gradients (``create_graph=True``) raises RuntimeError."""

    @wraps(backward)
    def call(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            found = backward(ctx, *grads)
        return tuple(map(_final, found)) if torch.is_grad_enabled() else found

    return call


def _final(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else _Final.apply(grad.detach().requires_grad_())


class _Final(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        raise RuntimeError(
            "context-parallel attention supports first derivatives only, but a gradient penalty or a Hessian needs "
            "second ones. Leave out create_graph=True, or compute the second derivative by finite differences"
        )
