"""How much of the attention a rank computes, known without measuring: the visible pairs that its method brings to it.

The method itself is run once on a mesh without peers and tensors without data; where the kernel would be, the tiles
that arrive are counted. Linear layers are not counted: a token costs the same wherever it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cp_plugin.attention.api import ContextParallel
from cp_plugin.attention.calls import shapes, without_peers
from cp_plugin.core.layout import sort_positions
from cp_plugin.core.problem import Problem
from cp_plugin.core.tiles import tiles
from cp_plugin.core.values import KeyValues, Queries
from cp_plugin.kernels.blocks import Block
from cp_plugin.testing.recording import RecordingKernel

_NO_DATA = torch.device("meta")


def visible_pairs(cp: ContextParallel, problem: Problem) -> int:
    """(query, key) pairs times heads that this rank computes in the forward of one call."""
    counted: list[int] = []

    def count(q: Tensor, k: Tensor, v: Tensor, block: Block) -> None:
        rows, keys = (sort_positions(side, _NO_DATA)[0] for side in (block.rows, block.keys))
        counted.append(sum(tile.pairs for tile in tiles(rows, keys, block.mask)) * q.size(2))

    q, k, v, *_ = shapes(problem, problem.seq_length // problem.size)
    without_peers(cp.provider, problem, cp.options, cp.index, RecordingKernel(count)).forward(
        Queries(q), KeyValues(k, v)
    )
    return sum(counted)
