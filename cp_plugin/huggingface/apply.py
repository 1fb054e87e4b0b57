"""``apply``: divide a model over ranks, after examining whether that can be right; ``undo``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cp_plugin.attention.agreement import Calls, problem_of_ranks
from cp_plugin.attention.api import ContextParallel
from cp_plugin.comm import ConnectError, MessageError
from cp_plugin.huggingface import layers
from cp_plugin.huggingface.additions import Additions
from cp_plugin.huggingface.attention import Division, refuse
from cp_plugin.huggingface.batch import shard
from cp_plugin.huggingface.comparison import require_next_token_loss, require_same_attention
from cp_plugin.huggingface.model import Forward, forwards, refuse_router_losses
from cp_plugin.huggingface.structure import (
    TOKENS,
    allowed,
    apart,
    coarsest,
    output,
    require_local,
    require_no_mixing,
    tokens,
    unchanged,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LAYERS = ("full_attention", "sliding_attention")
"""``layer_types`` of attention."""


def apply(
    model: PreTrainedModel, cp: ContextParallel, *, linear: ContextParallel | None = None, check: bool = True
) -> None:
    """Distribute the model's attention over the ranks of ``cp``; collective. Call it last; the model then takes shards.

    Applied again, it takes the new ``cp``. ``undo``, or ``model.set_attn_implementation("sdpa")``, undoes it.

    Args:
        model: or a wrapper around one, such as PEFT's.
        linear: for gated delta nets and short convolutions: a ``ContextParallel`` of linear attention in the layout of
            ``cp``. None: LASP-2.
        check: first examine the model with a few tokens: whether anything but attention mixes them or depends on
            a shard's length (``structure``), whether each layer's attention (``comparison``) and the loss (``loss``)
            are those of one rank. What these find would be wrong without an error.

    Raises:
        ImportError: without transformers.
        ValueError: for a model that is not text only, that cannot exchange its attention, or that fails the checks.
    """
    if find_spec("transformers") is None:
        raise ImportError("needs transformers 5 or newer: pip install 'cp-plugin[huggingface]'")
    model = _inside(model)
    undo(model)
    _refuse_by_name(model)
    whole = _whole(model, cp)
    with _named(model):
        want = _evaluated(model, input_ids=whole) if check else None
    division = Division(cp, model.config)
    forward = Forward(model, division, model)
    try:
        forward.handles = layers.divide(model, division)
        for inner in _models(model):
            if inner is not model:
                Forward(inner, division, model)
        model.set_attn_implementation(division.name)
        if not division.active:
            raise ValueError(f"{type(model).__name__} does not get its attention from transformers' AttentionInterface")
        if want is not None:
            _examine_structure(model, division)
        division.linear = layers.needed(model, cp, linear)
        if want is not None:
            _examine_results(model, division)
            _require_same_results(model, division, whole, want)
            if cp.size > 1:
                forward.additions = Additions(model, _examine)
            division.calls = Calls()  # the first ones of training are compared
    except BaseException:
        undo(model)
        raise
    if cp.size > 1 and cp.mesh.index == 0 and (not dist.is_initialized() or dist.get_rank() == 0):
        _say_what_sums(cp.size)


@cache
def _say_what_sums(size: int) -> None:
    """Once in a process: whoever averages gradients trains with a fraction of the loss, without an error."""
    print(
        f"cp_plugin: each rank's loss is its part of the sum, and gradients must be summed over the {size} ranks. "
        f"DistributedDataParallel and FSDP average them: there, call (loss * {size}).backward(). transformers' Trainer "
        "already does",
        flush=True,
    )


def undo(model: PreTrainedModel) -> None:
    """Give the model its own attention back; nothing if it has it. It then takes whole sequences again."""
    for forward in forwards(model):
        forward.remove()


def _models(model: nn.Module) -> list[PreTrainedModel]:
    from transformers import PreTrainedModel

    return [layer for layer in model.modules() if isinstance(layer, PreTrainedModel)]


def _inside(model: nn.Module) -> PreTrainedModel:
    """The transformers model in a wrapper."""
    models = _models(model)
    inner = {id(layer) for one in models for layer in one.modules() if layer is not one}
    outer = [one for one in models if id(one) not in inner]
    if len(outer) != 1:
        names = ", ".join(type(one).__name__ for one in outer)
        contains = f"contains {len(outer)} ({names}): apply to each of them" if outer else "contains none"
        raise ValueError(f"{type(model).__name__} is not a transformers model, and {contains}")
    return outer[0]


def _refuse_by_name(model: PreTrainedModel) -> None:
    config = model.config
    if config.is_encoder_decoder or config.sub_configs:
        raise ValueError(f"{type(model).__name__}: only text models without an encoder can be sharded")
    refuse_router_losses(config, {})
    kinds = dict.fromkeys(getattr(config, "layer_types", None) or ())
    mixed = any(True for _ in layers.mixers(model))
    known = (*_LAYERS, "linear_attention", "conv") if mixed else _LAYERS
    for kind in kinds:
        refuse(kind not in known, f"a layer of {kind}")


def _examine(model: PreTrainedModel, division: Division) -> None:
    _examine_structure(model, division)
    _examine_results(model, division)


def _examine_structure(model: PreTrainedModel, division: Division) -> None:
    """Collective: all ranks fail if one does."""
    reason = None
    try:
        with _named(model):
            require_no_mixing(model, division)
            require_local(model, division)
    except ValueError as error:
        reason = str(error)
    if lost := problem_of_ranks(division.cp.mesh, reason, torch.device("cpu")):
        raise lost


def _examine_results(model: PreTrainedModel, division: Division) -> None:
    with _named(model):
        require_same_attention(model, division)
        require_next_token_loss(model, division)


def _require_same_results(model: PreTrainedModel, division: Division, whole: Tensor, want: Tensor) -> None:
    cp, batch = division.cp, shard(division.cp, whole)
    with _named(model):
        mine = _evaluated(model, input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    got = division.on((0, whole.size(1))).unshard(mine, 1)
    dtype = coarsest(model, division.dtype)
    error = apart(want, got, 2, dtype)
    if not error <= (limit := allowed(dtype)):
        raise ValueError(
            f"{type(model).__name__} differs between {cp.size} ranks and one (relative error {error:.1e}, allowed "
            f"{limit:g}): something other than attention mixes tokens"
        )


@contextmanager
def _named(model: PreTrainedModel) -> Iterator[None]:
    """Errors of a model that cannot be run as it is examined name it; those of memory and of messages stay theirs."""
    try:
        yield
    except (torch.OutOfMemoryError, MessageError, ConnectError):
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"{type(model).__name__} cannot be examined, and therefore not sharded: on a few tokens, with other "
            f"attention, it fails with {type(error).__name__}: {error}"
        ) from error


def _whole(model: PreTrainedModel, cp: ContextParallel) -> Tensor:
    size = TOKENS * cp.size
    return tokens(model, cp.layout.padded(size, cp.size) if cp.size > 1 else size)[:1]


def _evaluated(model: PreTrainedModel, **batch: Tensor) -> Tensor:
    with unchanged(model):
        return output(model.eval(), **batch)
