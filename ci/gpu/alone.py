"""One rank of many by itself: its peers send zeros, its kernels are real."""

from __future__ import annotations

from typing import NamedTuple

import torch
from attend import Inputs
from cases import Shape, Sort, problem_of
from torch import Tensor

from cp_plugin import ContextParallel, Options, Problem
from cp_plugin.comm import TraceMesh
from cp_plugin.core.dtypes import accumulation_dtype
from cp_plugin.core.values import Gradients, KeyValues, Partial, Queries
from cp_plugin.methods import registry as providers
from cp_plugin.methods.moves import no_gradients, nothing_seen
from cp_plugin.methods.protocol import Attend


class Alone(NamedTuple):
    """A method of one rank, and its shards."""

    method: Attend
    problem: Problem
    options: Options
    x: Inputs

    def forward(self) -> Partial:
        queries, kv = Queries(self.x.q), KeyValues(self.x.k, self.x.v)
        return self.method.forward(queries, kv) or nothing_seen(queries, kv)

    def backward(self, lse: Tensor, delta: Tensor) -> Gradients:
        q, k, v, dout = self.x
        queries, kv = Queries(q, dout, lse, delta), KeyValues(k, v)
        return self.method.backward(queries, kv) or no_gradients(queries, kv)

    def __call__(self) -> Gradients:
        """Both."""
        out, lse = self.forward()
        wide = accumulation_dtype(out.dtype)
        return self.backward(lse, (self.x.dout.to(wide) * out.to(wide)).sum(-1))


def rank_of(provider: str, shape: Shape, sort: Sort, backend: str, device: torch.device, index: int = 1) -> Alone:
    """One rank of a provider, on its default layout."""
    problem = problem_of(shape, sort)
    options = Options(backend=backend)
    settled = providers.settle(provider, problem, options)
    cp = ContextParallel(settled, mesh=TraceMesh(settled.axes, index))
    method = cp.method(problem, device, shape.head_dim**-0.5, sort.mask)
    s, d, e = shape.tokens // shape.size, shape.head_dim, shape.v_head_dim
    sizes = (shape.heads, d), (shape.kv_heads, d), (shape.kv_heads, e), (shape.heads, e)
    x = Inputs(*(torch.randn((s, 1, *size), device=device).to(shape.dtype) for size in sizes))
    return Alone(method, problem, options, x)
