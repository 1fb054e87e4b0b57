"""Hooks at Megatron's start and end: process groups beside its own, checks of the built model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cp_plugin.megatron import runtime
from cp_plugin.megatron.layers import groups
from cp_plugin.megatron.patches import rope
from cp_plugin.megatron.patches.patching import Call, Run, wraps
from cp_plugin.megatron.selfcheck import audit, recheck, slices, step
from cp_plugin.megatron.startup import agreement, checkpoint, failures
from cp_plugin.megatron.state import STATE


@wraps(
    "megatron.core.parallel_state:initialize_model_parallel",
    "comparison of the ranks' flags, and process groups",
    "distributed_timeout_minutes",
    called_by="Megatron's initialization",
    otherwise="ranks with different flags would wait for each other forever",
)
def replace_initialize_model_parallel(call: Call) -> None:
    """Replacement for ``initialize_model_parallel``: compare the ranks' flags, create the plugin's groups."""
    STATE.by_ranks.clear()  # of groups that were destroyed meanwhile
    rope.forget_cached_embeddings()
    failures.watch(60.0 * call["distributed_timeout_minutes"])
    agreement.require()
    call.original()
    if runtime.settings().active:
        options = groups.options_from(call.arguments)
        groups.create(runtime.settings(), options, runtime.model())
        checkpoint.note()


@wraps(
    "megatron.training.training:setup_model_and_optimizer",
    "audit and self-check of the model",
    called_by="pretrain",
    otherwise="a model without the provider's attention would train",
    when=Run.is_compared,
)
def replace_setup_model_and_optimizer(call: Call) -> Any:
    """Replacement for ``setup_model_and_optimizer``: audit before training, and the self-check of its first step."""
    result = call.original()
    chunks, optimizer, rates = _parts(result)
    if not runtime.settings().active:
        step.expect(optimizer, rates)
        return result
    STATE.complete(chunks)
    audit.run(chunks)
    if runtime.settings().selfcheck:
        step.expect(optimizer, rates)
    STATE.first_batch = slices.require_one_batch
    recheck.watch(chunks, lambda: failures.finished_steps() or 0)
    STATE.cut.packed = runtime.packs()
    return result


def _parts(made: Any) -> Sequence[Any]:
    """Model, optimizer and learning rates, in this order, of a tuple or an object with these attributes."""
    return made if isinstance(made, tuple) else list(vars(made).values())
