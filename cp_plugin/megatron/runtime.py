"""What the adapter's parts look up: the settings of the run, and the ``ContextParallel`` of a process group.

Megatron calls the plugin from many sides (batch slicing, RoPE, attention modules), with nothing but a process group in
hand. All of them look up the same ``ContextParallel`` here, by the ranks of that group, so that they share one layout.
The key is the ranks, not the group object: Megatron and NeMo build several group objects over the same ranks.

A model with linear layers has a second one, for these. Both have the same tokens on every rank, and one ledger.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from megatron.core import parallel_state

from cp_plugin.attention.api import ContextParallel
from cp_plugin.core.problem import Problem
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.state import STATE, Model
from cp_plugin.methods.protocol import Kind
from cp_plugin.placement.documents import DOCUMENTS
from cp_plugin.placement.layouts import get_layout


def configure(settings: Settings, model: Model | None = None) -> None:
    """Set what the flags said and the model asks for, and forget what is left of an earlier run."""
    STATE.settings, STATE.model, STATE.batch_sliced = settings, model, False
    STATE.documents_expected = STATE.loss_checked = False
    STATE.last_pack = None
    STATE.by_ranks.clear()
    STATE.alone.clear()


def settings() -> Settings:
    """What the flags said."""
    return STATE.settings


def model() -> Model | None:
    """The attention of the model; None where no flags described one."""
    return STATE.model


def problem() -> Problem | None:
    """A softmax attention call of the model, on one rank; None where no flags described a model."""
    return None if STATE.model is None else STATE.model.problem


def converted() -> bool:
    """Whether Megatron's layout manager converts around attention, and tokens are contiguous elsewhere."""
    return STATE.model is not None and STATE.model.converted


def between_layers(cp: ContextParallel) -> ContextParallel:
    """On the tokens that batches are sliced into, and that all layers but attention compute on."""
    return cp.with_layout(get_layout("contiguous")) if converted() and cp.size > 1 else cp


def kinds() -> list[Kind]:
    """The kinds of attention that the plugin computes in this model."""
    return STATE.settings.kinds


def register(group: dist.ProcessGroup, found: Mapping[Kind, ContextParallel]) -> None:
    """Make these the ones to use for all groups with these ranks."""
    STATE.by_ranks[_key(group)] = found


def has_groups(group: dist.ProcessGroup) -> bool:
    """Whether there is a ``ContextParallel`` for the ranks of this group."""
    return group.size() == 1 or _key(group) in STATE.by_ranks


def forget_groups() -> None:
    """Forget all process groups, when Megatron destroys its own."""
    STATE.by_ranks.clear()


def context_parallel(group: dist.ProcessGroup | None = None, kind: Kind | None = None) -> ContextParallel:
    """The ``ContextParallel`` of a context-parallel process group; None is Megatron's own.

    kind: of attention; None: whichever the model has, for what both share: layout and ledger.

    Raises:
        ValueError: if the plugin made none for these ranks.
    """
    if group is None:
        group = parallel_state.get_context_parallel_group()
    found = STATE.by_ranks.get(_key(group))
    if found is not None:
        return found[kind or kinds()[0]]
    if group.size() == 1:
        return alone(kind)
    raise ValueError(
        f"cp_plugin has no process groups for the context-parallel ranks {list(_key(group))}; it has them for "
        f"{[list(ranks) for ranks in STATE.by_ranks]}. They are made in initialize_model_parallel of "
        "megatron.core.parallel_state: groups that are built without it are not supported; use --cp-provider upstream"
    )


def alone(kind: Kind | None = None) -> ContextParallel:
    """For a model, or a part of one, that is not divided over context-parallel ranks: no grid, no rings, no heads."""
    kind = kind or kinds()[0]
    if kind not in STATE.alone:
        provider, options = STATE.settings.of(kind)
        STATE.alone[kind] = ContextParallel(provider, layout=options.layout, backend=options.backend, fp8=options.fp8)
    return STATE.alone[kind]


def padded(cp: ContextParallel, seq_length: int) -> int:
    """That length with what ``--cp-pad-sequence`` adds to it; without the flag, as it is."""
    if not STATE.settings.pad_sequence or cp.size == 1:
        return seq_length
    return cp.layout.padded(seq_length, cp.size, 1 if STATE.model is None else STATE.model.parts)


def note_batch_sliced(sliced: bool = True) -> None:
    """A batch was sliced in the layout (False: none was, so far)."""
    STATE.batch_sliced = sliced


def require_sliced_batch() -> None:
    """ValueError on a pipeline stage that takes in tokens, if its script has sliced no batch in the layout by now."""
    if not STATE.batch_sliced and parallel_state.is_pipeline_first_stage():
        raise ValueError(
            f"{STATE.settings.asked}: the training script reached the attention layers without slicing "
            "its batch by megatron.core.utils.get_batch_on_this_cp_rank, so the tokens are not in the plugin's layout. "
            "Call that function in the script's get_batch, as Megatron's pretrain_gpt.py does"
        )


def expect_documents() -> None:
    """From now on the training calls attention: with packed documents, if the flags ask for them."""
    STATE.documents_expected = STATE.model is not None and bool(STATE.model.problem.documents)


def require_documents(layer: int) -> None:
    """ValueError where a layer is called without the documents that the flags pack."""
    if STATE.documents_expected:
        raise ValueError(
            f"{STATE.settings.asked}: layer {layer} was called without packed_seq_params, though the flags pack "
            "documents: tokens would attend to other documents than their own. Hand PackedSeqParams to the model on "
            "every pipeline stage, as Megatron's pretrain_gpt.py does"
        )


def require_places(cp: ContextParallel) -> None:
    """ValueError for a batch without the documents that the flags pack, in a layout that is made for them."""
    if STATE.documents_expected and cp.size > 1 and cp.layout.name == DOCUMENTS.name:
        raise ValueError(
            f"{STATE.settings.asked}, --cp-layout {DOCUMENTS.name}: a batch was sliced without cu_seqlens, though the "
            "flags pack documents, so its tokens cannot be placed. Slice the batch together with its cu_seqlens by "
            "megatron.core.utils.get_batch_on_this_cp_rank, as Megatron's pretrain_gpt.py does"
        )


def _key(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
