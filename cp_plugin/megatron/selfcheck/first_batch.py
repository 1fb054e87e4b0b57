"""Comparisons before training: attention of strong random numbers, on all context-parallel ranks and on one.

    q, k, v       --> a core attention of each kind, forward, backward --> out, dq, dk, dv: ``attention_pass``
    q, k, v       --> Megatron's own, on one rank                      --> out: ``attention_pass``
    projections   --> gated delta net by a provider of ours            --> out, gradient: the same

Each must equal this rank's rows of the same for the whole sequence. In a step of the run (``step``) new weights and
bfloat16 hide what differs here: a scale that is one per cent off, a block of keys from the call before.

On CUDA a rank of up to 16 has at least 256 tokens, in multiples of 128, as libraries' kernels like them; of more ranks
each has fewer, down to 32, since every rank computes all tokens once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel

from cp_plugin.attention.api import ContextParallel
from cp_plugin.comm.every_rank import gather_findings
from cp_plugin.core.layout import Layout
from cp_plugin.megatron import runtime
from cp_plugin.megatron.layers.core_attention import CoreAttention
from cp_plugin.megatron.layers.linear_attention import LinearCoreAttention
from cp_plugin.megatron.patches import delta_net, patching
from cp_plugin.megatron.selfcheck.attention_pass import (
    attention_problems,
    delta_net_problems,
    own_attention_problems,
    pack_of,
    packed_problems,
    with_own_sink,
)
from cp_plugin.megatron.state import STATE

_TOKENS = 32
_TOKENS_PER_RANK = 2  # under a causal mask the gradient of the first query alone is zero
_TILES = (16, 128, 2048)  # tokens of a tile: least, most, and of all ranks' together
_PACKS = 2


def run(chunks: Sequence[torch.nn.Module]) -> None:
    """Check this process's model chunks; collective over all ranks.

    Raises:
        ValueError: on every rank, naming the wrong quantities and their ranks.
    """
    cp = runtime.context_parallel()
    device = next((p.device for chunk in chunks for p in chunk.parameters()), torch.device("cpu"))
    tokens = tokens_for(cp.layout, cp.size, cuda=device.type == "cuda")
    try:
        with patching.lent(STATE.cut, any=True):  # no script has sliced a batch yet
            _refuse(_problems(chunks, cp, tokens, device), cp)
    finally:
        cp.mesh.ledger.reset()
    runtime.print_notice("self-check passed: attention matches a single rank, forward and backward")


def _refuse(problems: list[str], cp: ContextParallel) -> None:
    """ValueError on every rank, if there are problems on any; collective over all ranks."""
    failed = [f"rank {rank}: {text}" for rank, text in gather_findings(problems).items()]
    if failed:
        more = f" (and {len(failed) - 4} more ranks)" if len(failed) > 4 else ""
        raise ValueError(
            f"the self-check of {runtime.settings().asked} on the {cp.layout.name} layout failed. "
            f"{' | '.join(failed[:4])}{more}. Attention must give the results and gradients of a single rank; training "
            "would have gone wrong silently. --cp-selfcheck off skips this check"
        )


def _problems(chunks: Sequence[torch.nn.Module], cp: ContextParallel, tokens: int, device: torch.device) -> list[str]:
    modules, problems = _without_gathered(chunks), []
    if (layer := next(filter(delta_net.replaced, modules), None)) is not None:
        packs = [pack_of(tokens, number, device) for number in range(_PACKS)] if runtime.packs() else []
        problems += delta_net_problems(layer, tokens, packs, device)
    for kind in (CoreAttention, LinearCoreAttention):
        if (attention := _first(modules, kind)) is not None:
            problems += attention_problems(attention, cp, tokens, device)
    if (attention := _first(modules, CoreAttention)) is not None:
        problems += own_attention_problems(attention, tokens, device)
        if runtime.packs():
            problems += packed_problems(attention, cp, tokens, device)
    return problems


def _without_gathered(chunks: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the modules that can be called alone: not those whose weights a wrapper gathers for its own passes (FSDP).

    Of such an attention, one with a sink of its own is among them; the others are checked by the step of the run.
    """
    found: list[torch.nn.Module] = []
    for chunk in chunks:
        gathers = isinstance(chunk, _BaseDataParallel) and type(chunk) is not DistributedDataParallel
        for module in chunk.modules():
            if not gathers or next(module.parameters(), None) is None:
                found.append(module)
            elif isinstance(module, CoreAttention):
                found.append(with_own_sink(module))
    return found


def tokens_for(layout: Layout, size: int, *, cuda: bool) -> int:
    """Length of the self-check's whole sequence."""
    least, most, together = _TILES
    tile = max(least, min(most, together // size // least * least))
    unit = layout.divisor(size) * (tile if cuda else 1)
    least = 2 * tile * size if cuda else max(_TOKENS, _TOKENS_PER_RANK * size)
    return unit * ceil(least / unit)


def _first(modules: Iterable[torch.nn.Module], kind: Any) -> Any:
    return next((module for module in modules if isinstance(module, kind)), None)
