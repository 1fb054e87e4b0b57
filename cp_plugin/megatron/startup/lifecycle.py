"""What is done as a training starts and ends: groups when Megatron makes its own, checks when the model is built."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from cp_plugin.megatron import runtime
from cp_plugin.megatron.layers import groups
from cp_plugin.megatron.patches import rope
from cp_plugin.megatron.selfcheck import audit, first_batch, recheck, step_traffic
from cp_plugin.megatron.startup import agreement, checkpoint, failures


def replace_initialize_model_parallel(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement for ``initialize_model_parallel``: flags of all ranks compared, the plugin's groups made."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize_model_parallel(*positional: Any, **named: Any) -> None:
        call = signature.bind(*positional, **named)
        call.apply_defaults()
        failures.watch(60.0 * call.arguments["distributed_timeout_minutes"])
        agreement.require_from_megatron()
        checkpoint.look()
        original(*positional, **named)
        if runtime.settings().active:
            groups.create(runtime.settings(), groups.options_from(call.arguments), runtime.model())
            checkpoint.note()
            step_traffic.watch()

    return initialize_model_parallel


def replace_destroy_model_parallel(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement for ``destroy_model_parallel``, which forgets the plugin's groups, too."""

    @functools.wraps(original)
    def destroy_model_parallel() -> None:
        original()
        runtime.forget_groups()
        rope.forget_cached_embeddings()

    return destroy_model_parallel


def replace_setup_model_and_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement for ``setup_model_and_optimizer``: the model is audited and checks itself before it trains."""

    @functools.wraps(original)
    def setup_model_and_optimizer(*positional: Any, **named: Any) -> Any:
        result = original(*positional, **named)
        chunks = result[0]
        audit.run(chunks)
        if runtime.settings().selfcheck:
            first_batch.run(chunks)
        recheck.watch(chunks, _iterations)
        return result

    return setup_model_and_optimizer


def _iterations() -> int:
    """How many are done, in Megatron's loop."""
    from megatron.training import get_args

    return getattr(get_args(), "curr_iteration", 0)
