"""The blocks that a method asks its kernel for, recorded in a dry run without data and peers.

A kernel that supports only some tiles can thus be checked for all of them before training starts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cp_plugin.attention.calls import shapes, without_peers
from cp_plugin.core.block import Block
from cp_plugin.core.layout import sort_positions
from cp_plugin.core.options import Options
from cp_plugin.core.problem import CallInfo, Problem
from cp_plugin.core.spelling import spelled
from cp_plugin.core.tiles import tiles
from cp_plugin.core.values import KeyValues, Queries
from cp_plugin.kernels.backends import fp8_kernels, te_fp8
from cp_plugin.kernels.cost import Sizes
from cp_plugin.kernels.recording import RecordingKernel
from cp_plugin.methods.protocol import Provider


class Asked(NamedTuple):
    """One forward call of a kernel."""

    block: Block
    sizes: Sizes
    batch: int


def asked_of(provider: str | Provider, problem: Problem, options: Options, index: int) -> list[Asked]:
    """Kernel calls of rank ``index`` in one forward; ValueError for options that do not fit, or a problem that the
    provider does not support."""
    found: list[Asked] = []
    kernel = RecordingKernel(lambda q, kv, block: found.append(Asked(block, Sizes.of(q.q, *kv.tensors), q.q.size(1))))
    q, k, v, *_ = shapes(problem, problem.seq_length // problem.size)
    without_peers(provider, problem, options, index, kernel).forward(Queries(q), KeyValues(k, v))
    return found


def refuse_tiles(provider: str | Provider, problem: Problem, options: Options, device: torch.device) -> None:
    """ValueError for a kernel that cannot do some tiles of this combination, before they come up in training.

    Only Transformer Engine's FP8 kernels depend on tile sizes: before cuDNN 9.7 they take multiples of 128. Tiles of
    packed documents are known in training only.
    """
    backend = fp8_kernels()[0] if options.backend == "auto" else options.backend
    if options.fp8 != "compute" or backend != te_fp8.BACKEND.name or problem.documents:
        return
    last = problem.size - 1
    for index in sorted({0, min(1, last), problem.size // 2, last}):
        for block, sizes, batch in asked_of(provider, problem, options, index):
            rows, keys = (sort_positions(side, torch.device("cpu"))[0] for side in (block.rows, block.keys))
            for tile in (part for whole in tiles(rows, keys, block.mask) for part in whole.cut()):
                heads = (batch, sizes.heads // batch, sizes.kv_heads // batch)
                tokens = (len(tile.q), len(tile.k))
                call = CallInfo(device, problem.dtype, sizes.head_dim, sizes.v_head_dim)
                reason = te_fp8.unsupported_tile(call, not tile.full, (*heads, *tokens))
                if reason is not None:
                    name = getattr(provider, "name", provider)
                    raise ValueError(
                        f"{spelled('fp8', 'compute')} cannot compute a tile that rank {index} of "
                        f"{spelled('provider', name)} has in every step, {tokens[0]} rows and {tokens[1]} keys: "
                        f"{reason}; use {spelled('layout', 'zigzag')} with a multiple of {256 * problem.size} tokens "
                        "and a provider that supports it, such as ring (some striped tiles are one token shorter), "
                        f"cuDNN 9.7 or newer, or {spelled('fp8', 'comm')}"
                    )
