"""Run-time lookup: settings of the run, and the ``ContextParallel`` of a process group.

Megatron calls the plugin in many places (batch slicing, RoPE, attention modules) with only a process group. All of them
look up the same ``ContextParallel`` here, by the group's ranks: Megatron and NeMo build several group objects over the
same ranks. A model with linear layers has a second one for these, with the same tokens and the same ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.methods.protocol import Kind
from cp_plugin.engine.placement.documents import get_layout
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.patches.patching import lent
from cp_plugin.megatron.state import STATE, Cut, Model


def configure(settings: Settings, model: Model | None = None) -> None:
    """Set the settings and the model, and reset the state of an earlier run."""
    STATE.settings, STATE.model, STATE.cut = settings, model, Cut()
    STATE.compared = STATE.slices = STATE.first_batch = None
    STATE.complete, STATE.owed = lambda _: None, 0
    STATE.by_ranks.clear()
    STATE.alone.clear()


def settings() -> Settings:
    """The settings of the run."""
    return STATE.settings


def model() -> Model | None:
    """The model's attention; None if no flags described a model."""
    return STATE.model


def packs() -> bool:
    """Return True if the flags pack documents."""
    return STATE.model is not None and bool(STATE.model.problem.documents)


def converted() -> bool:
    """Return True if Megatron's layout manager converts around attention, and tokens are contiguous elsewhere."""
    return STATE.model is not None and STATE.model.converted


def batch_layout(cp: ContextParallel) -> ContextParallel:
    """Return the ``ContextParallel`` with the layout of batches and of all layers but attention."""
    return cp.with_layout(get_layout("contiguous")) if converted() and cp.size > 1 else cp


def register(group: dist.ProcessGroup, by_kind: Mapping[Kind, ContextParallel]) -> None:
    """Use these for all groups with these ranks."""
    STATE.by_ranks[_key(group)] = by_kind


def has_groups(group: dist.ProcessGroup) -> bool:
    """Return True if there is a ``ContextParallel`` for the ranks of this group."""
    return group.size() == 1 or _key(group) in STATE.by_ranks


def context_parallel(group: dist.ProcessGroup | None = None, kind: Kind | None = None) -> ContextParallel:
    """The ``ContextParallel`` of a context-parallel process group; None: Megatron's own.

    kind: None: any, for what both kinds share (layout and ledger).

    Raises:
        ValueError: if there is none for these ranks.
    """
    if group is None:
        group = parallel_state.get_context_parallel_group()
    by_kind = STATE.by_ranks.get(_key(group))
    if by_kind is not None:
        return by_kind[kind or STATE.settings.kinds[0]]
    if group.size() == 1:
        return alone(kind)
    raise ValueError(
        f"cp_plugin has no process groups for the context-parallel ranks {list(_key(group))}; it has them for "
        f"{[list(ranks) for ranks in STATE.by_ranks]}. They are created in "
        "megatron.core.parallel_state.initialize_model_parallel; groups created without it are not supported: use "
        "--cp-provider upstream"
    )


def alone(kind: Kind | None = None) -> ContextParallel:
    """Return a ``ContextParallel`` for a model, or a part of one, on a single context-parallel rank."""
    kind = kind or STATE.settings.kinds[0]
    if kind not in STATE.alone:
        provider, options = STATE.settings.choice(kind)
        STATE.alone[kind] = ContextParallel(
            provider, layout=options.layout, backend=options.backend, fp8=options.fp8, group=None
        )
    return STATE.alone[kind]


def without_fp8() -> AbstractContextManager[None]:
    """Compute, and send, attention in the model's dtype in the block."""

    def exact(by_kind: Mapping[Kind, ContextParallel]) -> dict[Kind, ContextParallel]:
        return {kind: cp.without_fp8() for kind, cp in by_kind.items()}

    by_ranks = {ranks: exact(by_kind) for ranks, by_kind in STATE.by_ranks.items()}
    return lent(STATE, by_ranks=by_ranks, alone=exact(STATE.alone))


def padded(cp: ContextParallel, seq_length: int) -> int:
    """Sequence length including ``--cp-pad-sequence`` padding."""
    if not STATE.settings.pad_sequence or cp.size == 1:
        return seq_length
    return cp.layout.padded(seq_length, cp.size, 1 if STATE.model is None else STATE.model.parts)


def sum_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of all ranks' tensors, without a gradient. Collective over the group."""
    x = x.detach().clone()
    if group.size() > 1:  # NCCL would connect a group of one
        dist.all_reduce(x, group=group)
    return x


def print_notice(text: str) -> None:
    """Print on the first rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"cp_plugin: {text}", flush=True)


def _key(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
