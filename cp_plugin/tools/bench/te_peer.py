"""Transformer Engine's own context parallelism: p2p, all_gather, a2a and a2a+p2p around its fused attention.

Sources: transformer_engine 2.20, ``DotProductAttention`` and the asserts of ``attn_forward_func_with_cp``. Under every
mask it expects tokens in zigzag order, which it calls DualChunkSwap.

Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor

from cp_plugin.engine.attention.calls import Inputs
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.placement.documents import get_layout

COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
"""``cp_comm_type``."""


def missing(device: str) -> str | None:
    """Return why it is not available here, or None."""
    if find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed: pip install 'cp-plugin[te]'"
    return None if device == "cuda" else "Transformer Engine's attention runs on CUDA devices only"


def unsupported(comm_type: str, problem: Problem) -> str | None:
    """Return why it cannot do this problem, or None."""
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"Transformer Engine's attention takes bfloat16 and float16, not {problem.dtype}"
    if problem.documents:
        return "Transformer Engine wants every document padded to a multiple of twice the ranks, which changes the work"
    if problem.window is not None and comm_type not in ("a2a", "all_gather"):
        return f"Transformer Engine has no sliding window with {comm_type}"
    if comm_type == "a2a" and (problem.heads % problem.size or problem.kv_heads % problem.size):
        return (
            f"{problem.heads} query heads and {problem.kv_heads} key/value heads cannot be split across {problem.size}"
        )
    if comm_type == "a2a+p2p" and _inner(problem) == 1:
        return f"heads can be split across no part of the {problem.size} ranks that would leave p2p something to do"
    return None


class TransformerEngine:
    """A ``Contestant``. Tensors inside are ``[b, s, heads, d]``."""

    def __init__(self, comm_type: str, problem: Problem) -> None:
        """Collective over all ranks."""
        from transformer_engine.pytorch import DotProductAttention

        inner = _inner(problem) if comm_type == "a2a+p2p" else None
        self.settings = "zigzag" if inner is None else f"zigzag, a2a over {inner}, p2p over {problem.size // inner}"
        self._problem = problem
        self._attention = DotProductAttention(
            problem.heads,
            (problem.head_dim, problem.v_head_dim),
            num_gqa_groups=problem.kv_heads,
            attention_dropout=0.0,
            qkv_format="bshd",
            attn_mask_type="causal" if problem.causal else "no_mask",
            window_size=problem.window,
        )
        ranks, group = list(range(problem.size)), dist.group.WORLD
        if inner is not None:  # this rank's groups for all-to-all, of neighbours, and for point-to-point
            near, far = [ranks[i : i + inner] for i in ranks[::inner]], [ranks[i::inner] for i in range(inner)]
            group = [dist.new_subgroups_by_enumeration(lists)[0] for lists in (near, far)]
        self._attention.set_context_parallel_group(group, ranks, torch.cuda.Stream(), comm_type)

    def shard(self, x: Tensor) -> Tensor:
        return self.arranged(get_layout("zigzag").shard(x, 0, self._problem.size, dist.get_rank()))

    def arranged(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous()

    def step(self, x: Inputs, between: Callable[[], object] = lambda: None) -> tuple[Tensor, ...]:
        q, k, v = (y.detach().requires_grad_() for y in (x.q, x.k, x.v))
        out = self._attention(q, k, v).view(*q.shape[:3], v.size(3))
        between()
        return out.detach(), *torch.autograd.grad(out, (q, k, v), x.dout)

    def booked(self) -> None:
        return None


def _inner(problem: Problem) -> int:
    """Ranks of the all-to-all: as many of a host as heads divide over, but fewer than all ranks."""
    most = min(problem.transport.per_host if problem.transport.per_host > 1 else problem.size, problem.size - 1)
    sizes = (problem.size, problem.heads, problem.kv_heads)
    return max((n for n in range(1, most + 1) if not any(size % n for size in sizes)), default=1)
