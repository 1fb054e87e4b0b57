"""The process state of the Megatron adapter, in one place.

Megatron calls the plugin from many sides (batch slicing, RoPE, attention modules), with nothing but a process group in
hand. All of them look up the same ``ContextParallel`` here, by the ranks of that group, so that they share one layout.
The key is the ranks, not the group object: Megatron and NeMo build several group objects over the same ranks.
"""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state

from cp_plugin.attention import ContextParallel
from cp_plugin.megatron.args import Settings
from cp_plugin.problem import Problem

_settings = Settings()
_problem: Problem | None = None
_by_ranks: dict[tuple[int, ...], ContextParallel] = {}
_batch_sliced = False


def configure(settings: Settings, problem: Problem | None = None) -> None:
    """Set what the flags said and the model asks for, and forget what is left of an earlier run."""
    global _settings, _problem
    _settings, _problem = settings, problem
    _by_ranks.clear()
    note_batch_sliced(False)


def settings() -> Settings:
    """What the flags said."""
    return _settings


def problem() -> Problem | None:
    """An attention call of the model, on one rank; None where no flags described a model."""
    return _problem


def register(group: dist.ProcessGroup, cp: ContextParallel) -> None:
    """Make ``cp`` the one to use for all groups with these ranks."""
    _by_ranks[_key(group)] = cp


def forget_groups() -> None:
    """Forget all process groups, when Megatron destroys its own."""
    _by_ranks.clear()


def context_parallel(group: dist.ProcessGroup | None = None) -> ContextParallel:
    """The ``ContextParallel`` of a context-parallel process group; None is Megatron's own.

    Raises:
        ValueError: if the plugin made none for these ranks.
    """
    if group is None:
        group = parallel_state.get_context_parallel_group()
    found = _by_ranks.get(_key(group))
    if found is not None:
        return found
    if group.size() == 1:
        return alone()
    raise ValueError(
        f"cp_plugin has no process groups for the context-parallel ranks {list(_key(group))}; it has them for "
        f"{[list(ranks) for ranks in _by_ranks]}. They are made in initialize_model_parallel of "
        "megatron.core.parallel_state: groups that are built without it are not supported; use --cp-provider upstream"
    )


def alone() -> ContextParallel:
    """For a model, or a part of one, that is not divided over context-parallel ranks: no grid, no rings, no heads."""
    options = _settings.options
    return ContextParallel(_settings.provider, layout=options.layout, backend=options.backend)


def note_batch_sliced(sliced: bool = True) -> None:
    """A batch was sliced in the layout (False: none was, so far)."""
    global _batch_sliced
    _batch_sliced = sliced


def require_sliced_batch() -> None:
    """ValueError on a pipeline stage that takes in tokens, if its script has sliced no batch in the layout by now."""
    if not _batch_sliced and parallel_state.is_pipeline_first_stage():
        raise ValueError(
            f"--cp-provider {_settings.provider}: the training script reached the attention layers without slicing "
            "its batch by megatron.core.utils.get_batch_on_this_cp_rank, so the tokens are not in the plugin's layout. "
            "Call that function in the script's get_batch, as Megatron's pretrain_gpt.py does"
        )


def _key(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
