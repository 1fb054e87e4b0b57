"""The token-by-token recurrence that defines linear attention. Slow; the reference for all other kernels.

S_t = a_t * S_(t-1) + k_t v_t^T          o_t = S_t^T q_t

and under the delta rule, with beta_t (v_t - (a_t * S_(t-1))^T k_t) in place of v_t.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cp_plugin.engine.core.dtypes import accumulation_dtype
from cp_plugin.engine.linear.tokens import Tokens, group_queries


def run(x: Tokens, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Outputs ``[t, b, h, e]`` and the final state ``[b, g, d, e]``, in the accumulation dtype; differentiable.

    initial: the state before the first token; None: zero.
    """
    dtype = accumulation_dtype(x.q.dtype)
    q, k, v = group_queries(x).to(dtype), x.k.to(dtype), x.v.to(dtype)
    state = k.new_zeros((*k.shape[1:], v.size(3))) if initial is None else initial.to(dtype)
    decay = None if x.log_decay is None else x.log_decay.to(dtype).exp()
    out = []
    for t in range(q.size(0)):
        if x.starts is not None:
            state = state.masked_fill(x.starts[t, :, None, None, None], 0)
        if decay is not None:
            state = state * decay[t].unsqueeze(-1)
        new = v[t]
        if x.beta is not None:
            new = x.beta[t].to(dtype).unsqueeze(-1) * (new - torch.einsum("bgd,bgde->bge", k[t], state))
        state = state + k[t].unsqueeze(-1) * new.unsqueeze(-2)
        out.append(torch.einsum("bgrd,bgde->bgre", q[t], state))
    return torch.stack(out).flatten(2, 3), state


def forward(x: Tokens) -> Tensor:
    """Causal linear attention of each segment from a zero state: ``[t, b, h, e]`` in the accumulation dtype."""
    return run(x)[0]
