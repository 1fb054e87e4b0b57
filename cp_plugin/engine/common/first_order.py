"""``@first_order``: gradients of an autograd.Function that cannot be differentiated again, and say so.

torch's ``once_differentiable`` marks gradients only where the incoming gradient requires one, and hangs the mark on a
leaf of its own, which ``autograd.grad(penalty, weights)`` does not reach: a penalty on gradients would be dropped
without an error.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor


def first_order[F: type[torch.autograd.Function]](function: F) -> F:
    """Run the function's backward without autograd; to differentiate its gradients again raises RuntimeError.

    Where a graph is made of the gradients (``create_graph=True``), they depend on the function's inputs and on the
    gradient that came in, so that whatever is differentiated behind those meets the error.
    """
    forward, backward = function.forward, function.backward

    @wraps(forward)
    def forward_tied(ctx: Any, *inputs: Any) -> Any:
        result = forward(ctx, *inputs)
        tied = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad and not x.is_meta]
        with torch.enable_grad():  # empty tensors, which keep no memory
            ctx.ties = [torch.slice_copy(x, 0, 0, 0) for x in tied]
        return result

    @wraps(backward)
    def backward_once(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            computed = backward(ctx, *grads)
        return _Final.apply(len(computed), *computed, *ctx.ties, *grads) if torch.is_grad_enabled() else computed

    function.forward, function.backward = staticmethod(forward_tied), staticmethod(backward_once)
    return function


class _Final(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if grad is None else grad.view_as(grad) for grad in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        raise RuntimeError(
            "context-parallel attention supports first derivatives only, but a gradient penalty or a Hessian needs "
            "second ones. Leave out create_graph=True, or compute the second derivative by finite differences"
        )
