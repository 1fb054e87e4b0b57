"""FP8 scaling for ``--cp-fp8 compute``: follows Megatron's recipe and reduction groups, and is saved in checkpoints.

    --fp8-recipe delayed              delayed scaling, with --fp8-amax-history-len, -compute-algo and --fp8-margin
    --fp8-recipe tensorwise, or none  current scaling
    mxfp8, --fp4-format               current scaling: the formats of these linear layers have no attention kernel here
    blockwise, custom                 refused: no FP8 attention; any number format

Current scaling too scales tensors that exist only inside the kernel by the amax it reported in the iteration before.
Each layer has its own history. When Megatron finalizes an iteration's gradients, the amaxes of all layers of this stage
are reduced in one message, over the group in which Transformer Engine would reduce them.

``config.fp8_dot_product_attention`` stays unset: only Transformer Engine's attention reads it, which is replaced.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from cp_plugin.engine.core import scaling
from cp_plugin.engine.core.scaling import IN_BACKWARD, ROLES, Delayed
from cp_plugin.megatron import runtime
from cp_plugin.megatron.patches.patching import Call, wraps

HISTORY = "fp8_amax_history"
"""State-dict key of a core attention's history: float32 ``[iterations, roles]``."""
_RECIPE, _LENGTH = "--fp8-recipe", "--fp8-amax-history-len"


def make_scaling(config: TransformerConfig) -> Delayed | None:
    """The scaling of a layer; None: its kernel does not compute in FP8."""
    if runtime.settings().options.fp8 != "compute":
        return None
    if config.fp8 is None or config.fp8_recipe != "delayed":
        return Delayed(margin=2, roles=IN_BACKWARD)
    return Delayed(
        config.fp8_amax_history_len, algorithm=config.fp8_amax_compute_algo, margin=config.fp8_margin, roles=ROLES
    )


@wraps(
    "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
    "scales of FP8 attention",
    "model",
    otherwise="ranks would scale the same keys differently",
    when=lambda run: run.settings.active and run.settings.options.fp8 == "compute",
)
def replace_finalize_model_grads(call: Call) -> Any:
    """Update the scales when Megatron finalizes an iteration's gradients; collective."""
    result = call.original()
    update(call["model"])
    return result


def update(chunks: Sequence[torch.nn.Module]) -> None:
    """Take this iteration's amaxes into the scales of the next; collective over Megatron's amax reduction group."""
    layers = [module for chunk in chunks for module in chunk.modules() if isinstance(_get_scaling(module), Delayed)]
    if layers:
        group = parallel_state.get_amax_reduction_group(
            with_context_parallel=True, tp_only_amax_red=layers[0].config.tp_only_amax_red
        )
        device = next(p.device for chunk in chunks for p in chunk.parameters())
        scaling.update([_get_scaling(layer) for layer in layers], group, device)


def to_save(module: torch.nn.Module) -> dict[str, Tensor]:
    """A layer's history for checkpoints; empty under current scaling."""
    delayed = _get_scaling(module)
    return {HISTORY: delayed.history} if delayed is not None and delayed.roles == ROLES else {}


def load(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """A torch hook that takes a layer's history out of a state dict while it is loaded."""
    history, delayed = state_dict.pop(f"{prefix}{HISTORY}", None), _get_scaling(module)
    if history is not None and delayed is not None:
        delayed.load(history)


def settings_of(args: argparse.Namespace) -> dict[str, str]:
    """Settings that checkpoints record: whether they have histories, and of what length."""
    compute = runtime.settings().options.fp8 == "compute"
    if not (compute and getattr(args, "fp8", None) and args.fp8_recipe == "delayed"):
        return {}
    return {_RECIPE: "delayed", _LENGTH: str(args.fp8_amax_history_len)}


def same_histories(now: Mapping[str, str], then: Mapping[str, str]) -> bool:
    """Return True if a checkpoint with these settings has histories of the layers' shape."""
    return all(now.get(name) == then.get(name) for name in (_RECIPE, _LENGTH))


def drop_histories(state: Any) -> None:
    """Remove all histories from a state dict requested of a checkpoint."""
    for part in _dicts(state):
        for name in [name for name in part if str(name).endswith(HISTORY)]:
            del part[name]


def started_anew(now: Mapping[str, str], state: Any) -> list[str]:
    """A notice if this run has histories and loads none of them."""
    if _LENGTH not in now or any(str(name).endswith(HISTORY) for part in _dicts(state) for name in part):
        return []
    return ["the history of attention's FP8 scales restarts: the checkpoint has none of this length"]


def _dicts(state: Any) -> Iterator[dict[Any, Any]]:
    """All dicts in nested dicts and lists."""
    if isinstance(state, dict):
        yield state
    for part in state.values() if isinstance(state, dict) else state if isinstance(state, list) else ():
        yield from _dicts(part)


def _get_scaling(module: torch.nn.Module) -> Delayed | None:
    return getattr(module, "scaling", None)
