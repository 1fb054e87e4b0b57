"""One rank of many by itself: its peers send zeros, its kernels are real."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cp_plugin import ContextParallel
from cp_plugin.attention.calls import Inputs, of_method, shapes
from cp_plugin.attention.setups import Setup
from cp_plugin.comm import TraceMesh
from cp_plugin.core.values import Gradients, KeyValues, Partial, Queries
from cp_plugin.methods.moves import no_gradients, nothing_seen
from cp_plugin.methods.protocol import Attend


class Alone(NamedTuple):
    """A method of one rank, and its shards."""

    method: Attend
    x: Inputs

    def forward(self) -> Partial:
        queries, kv = Queries(self.x.q), KeyValues(self.x.k, self.x.v)
        return self.method.forward(queries, kv) or nothing_seen(queries, kv)

    def backward(self, lse: Tensor, delta: Tensor) -> Gradients:
        q, k, v, dout, _ = self.x
        queries, kv = Queries(q, dout, lse, delta), KeyValues(k, v)
        return self.method.backward(queries, kv) or no_gradients(queries, kv)

    def __call__(self) -> tuple[Tensor, ...]:
        """Both."""
        return of_method(self.method, *self.x[:4])


def rank_of(setup: Setup, device: torch.device, documents: tuple[int, ...] = (), index: int = 1) -> Alone:
    """One rank of a provider, on random shards."""
    problem = setup.problem
    cp = ContextParallel(setup, mesh=TraceMesh(setup.axes, index))
    method = cp.method(problem, device, problem.head_dim**-0.5, problem.mask(documents))
    empty = shapes(problem, problem.seq_length // problem.size)[:4]
    return Alone(method, Inputs(*(torch.randn(y.shape, device=device).to(y.dtype) for y in empty)))
