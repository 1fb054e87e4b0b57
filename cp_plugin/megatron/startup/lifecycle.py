"""What is done as a training starts and ends: groups when Megatron makes its own, checks when the model is built."""

from __future__ import annotations

from typing import Any

from cp_plugin.megatron import runtime
from cp_plugin.megatron.layers import groups
from cp_plugin.megatron.patches import rope
from cp_plugin.megatron.patches.patching import Call, around
from cp_plugin.megatron.selfcheck import audit, first_batch, recheck, step_traffic
from cp_plugin.megatron.startup import agreement, checkpoint, failures


@around
def replace_initialize_model_parallel(call: Call) -> None:
    """The replacement for ``initialize_model_parallel``: flags of all ranks compared, the plugin's groups made."""
    failures.watch(60.0 * call["distributed_timeout_minutes"])
    agreement.require_from_megatron()
    checkpoint.look()
    call.original()
    if runtime.settings().active:
        groups.create(runtime.settings(), groups.options_from(call.arguments), runtime.model())
        checkpoint.note()
        step_traffic.watch()


@around
def replace_destroy_model_parallel(call: Call) -> None:
    """The replacement for ``destroy_model_parallel``, which forgets the plugin's groups, too."""
    call.original()
    runtime.forget_groups()
    rope.forget_cached_embeddings()


@around
def replace_setup_model_and_optimizer(call: Call) -> Any:
    """The replacement for ``setup_model_and_optimizer``: the model is audited and checks itself before it trains."""
    result = call.original()
    chunks = result[0]
    audit.run(chunks)
    if runtime.settings().selfcheck:
        first_batch.run(chunks)
    recheck.watch(chunks, _iterations)
    runtime.expect_documents()
    return result


def _iterations() -> int:
    """How many are done, in Megatron's loop."""
    from megatron.training import get_args

    return getattr(get_args(), "curr_iteration", 0)
