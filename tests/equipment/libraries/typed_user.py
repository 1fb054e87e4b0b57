"""A user's file: not run, but checked by mypy --strict in ci/release.sh against the annotations of the package."""

from typing import Any, assert_type

import torch.distributed as dist
from torch import Tensor

from cp_plugin import ContextParallel, Options, Problem, Provider, Tree
from cp_plugin.engine.attention.shift import shift
from cp_plugin.huggingface import shard


def softmax(group: dist.ProcessGroup, tokens: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    typical = Problem(size=4, heads=8, kv_heads=2)
    cp = ContextParallel("attention2d", group=group, grid=(2, 2), problem=typical)
    assert_type(cp.options, Options)
    assert_type(cp.provider, Provider)
    assert_type(cp.shard(tokens, dim=0), Tensor)
    assert_type(cp.positions(tokens.size(0)), Tensor)
    assert_type(shift(cp, tokens), Tensor)
    assert_type(cp.mesh.ledger.bytes(phase="forward"), int)
    assert_type(shard(cp, tokens), dict[str, Any])
    exact = assert_type(cp.without_fp8(), ContextParallel)
    out = exact.attention(q, k, v, causal=True, window=(7, 0), cu_seqlens=None, sink=None)
    return assert_type(cp.unshard(out), Tensor)


def tree(cp: ContextParallel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rollouts = Tree(lengths=[4, 2, 2], parents=[-1, 0, 0])
    rows, targets = rollouts.predictions(cp.positions(rollouts.seq_length))
    assert_type(targets, Tensor)
    return assert_type(cp.attention(q, k, v, tree=rollouts), Tensor)[rows]


def linear(group: dist.ProcessGroup, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cp = ContextParallel("lasp2", group=group)
    return assert_type(cp.linear_attention(q, k, v, log_decay=None, causal=True), Tensor)
