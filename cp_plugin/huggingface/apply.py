"""``apply``: divide a model over ranks, after examining whether that can be right; ``undo``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from cp_plugin.engine.attention.agreement import Calls, gathered, problem_of_ranks
from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.comm import ConnectError, MessageError
from cp_plugin.engine.placement.documents import DOCUMENTS
from cp_plugin.huggingface import layers
from cp_plugin.huggingface.additions import Additions
from cp_plugin.huggingface.attention import Call, Division, placed, refuse
from cp_plugin.huggingface.batch import IGNORED, shard
from cp_plugin.huggingface.masks import Reader
from cp_plugin.huggingface.model import Forward, forwards, refuse_router_losses
from cp_plugin.huggingface.structure import (
    TOKENS,
    WINDOWS,
    Alone,
    Plain,
    allowed,
    apart,
    body,
    coarsest,
    longest,
    not_next_token,
    output,
    probing,
    require_local,
    require_no_mixing,
    tokens,
    unchanged,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def apply(model: PreTrainedModel, cp: ContextParallel, *, check: bool = True) -> None:
    """Distribute the model's attention over the ranks of ``cp``; collective. Call it last; the model then takes shards.
    Gated delta nets and short convolutions use LASP-2 on the same tokens.

    Applied again, it takes the new ``cp``. ``undo``, or ``model.set_attn_implementation("sdpa")``, undoes it.

    Args:
        model: or a wrapper around one, such as PEFT's.
        check: first examine the model with a few tokens: whether anything but attention mixes them or depends on
            a shard's length, whether each layer's attention, the hidden states and the loss are those of one rank.
            What this finds would be wrong without an error.

    Raises:
        ImportError: without transformers.
        ValueError: for a model that is not text only, that cannot exchange its attention, or that fails the checks.
    """
    if find_spec("transformers") is None:
        raise ImportError("needs transformers 5 or newer: pip install 'cp-plugin[huggingface]'")
    model = _inside(model)
    undo(model)
    _refuse_by_name(model)
    whole = tokens(model, TOKENS * cp.size)[:1]
    with _named(model):
        want = _evaluated(model, output, input_ids=whole) if check else None
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
        division.linear = layers.lasp2(model, cp)
        if want is not None:
            _examine(model, division)
            with _named(model):  # as it was called before: a forward of its instance may make other positions
                _compare_results(model, division, whole, want, output)
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
    known = ["full_attention", "sliding_attention"]
    if any(True for _ in layers.mixers(model)):
        known += ["linear_attention", "conv"]
    for kind in getattr(config, "layer_types", None) or ():
        refuse(kind not in known, f"a layer of {kind}")


def _examine(model: PreTrainedModel, division: Division) -> None:
    """Collective: what one rank finds by itself, all ranks raise."""
    reason = None
    try:
        with _named(model):
            require_no_mixing(model, division)
            require_local(model, division)
    except ValueError as error:
        reason = str(error)
    if lost := problem_of_ranks(division.cp.mesh, reason, torch.device("cpu")):
        raise lost
    with _named(model):
        require_same_attention(model, division)
        require_next_token_loss(model, division)


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


def _evaluated(model: PreTrainedModel, compute: Callable[..., Tensor], **batch: Tensor) -> Tensor:
    with unchanged(model):
        return compute(model.eval(), **batch)


class Both:
    """Compares the two, and answers with the model's own numbers, also in linear layers."""

    own = True

    def __init__(self, division: Division, model: PreTrainedModel) -> None:
        self.division, self.model, self.reader, self.layers = division, model, Reader(), 0
        self.masks: dict[int, tuple[Tensor, Tensor]] = {}
        """By its id, a mask of the model's own attention, and what the division reads of it."""

    def mask(self, **arguments: Any) -> Tensor | None:
        """The mask of the model's own attention."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        read = self.reader.stand_in(arguments, arguments["kv_length"], self.division.call.documents)
        expanded = ALL_MASK_ATTENTION_FUNCTIONS[self.division.before](
            **arguments | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        )
        if isinstance(expanded, Tensor):
            self.masks[id(expanded)] = expanded, read
        return expanded

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Tensor:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        division, self.layers = self.division, self.layers + 1
        # transformers' function of that name for a layer
        default = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        own = ALL_ATTENTION_FUNCTIONS.get(division.before, default)
        generator = torch.Generator().manual_seed(self.layers)
        dtype = query.dtype if "flash" in division.before or query.dtype == torch.float64 else torch.float32
        q, k, v = (
            (torch.randn(x.shape, generator=generator) * std).to(x.device, dtype)
            for x, std in ((query, 3), (key, 1), (value, 1))
        )
        cp, read = placed(division.cp, division.call.documents), self.masks.get(id(mask), (mask, mask))[1]
        shards = cp.shard(q, 2), cp.shard(k, 2), cp.shard(v, 2)
        got = cp.unshard(division.attend_over_ranks(module, *shards, read, **options), 1)
        cast = mask
        if mask is not None and mask.is_floating_point():
            cast = mask.to(dtype).clamp_min(torch.finfo(dtype).min)
        want = own(module, q, k, v, cast, **options)[0]
        error = ((got - want).double().norm(dim=-1) / want.double().norm(dim=-1).clamp_min(1e-3)).max().item()
        if not error <= (limit := allowed(dtype)):
            raise ValueError(
                f"{type(self.model).__name__}: attention differs between {cp.size} ranks and one in "
                f"{type(module).__name__} {self.layers} of {q.size(2)} tokens (relative error {error:.1e}, "
                f"allowed {limit:g}): it does something unknown to the plugin"
            )
        return own(module, query, key, value, mask, **options)[0]


def require_same_attention(model: PreTrainedModel, division: Division) -> None:
    """Compare on whole sequences as long as the largest window in the config; collective. ValueError naming the layer.

    Each layer's own call is kept (its mask, scale, window, sinks), but queries, keys and values are drawn anew, in
    float32 and large enough that caps and sinks are felt: so no error is hidden by the rest of the model, by its
    initialisation or by its dtype. In the end the hidden states are compared, too, for layers other than attention.
    """
    cp, both = division.cp, Both(division, model)
    size = cp.layout.padded(max(TOKENS * cp.size, longest(model.config, WINDOWS) * 3 // 2), cp.size)
    ids, call = tokens(model, size)[:1], Call(size, size - 1, (0, size) if cp.layout == DOCUMENTS else ())
    with probing(model, division, both, call):
        want = body(model, input_ids=ids)
    _compare_results(model, division, ids, want, body)


def _compare_results(
    model: PreTrainedModel, division: Division, whole: Tensor, want: Tensor, compute: Callable[..., Tensor]
) -> None:
    """Compare what the divided model computes of a whole sequence with what one rank did; collective."""
    cp, dtype, batch = division.cp, coarsest(model, division.dtype), shard(division.cp, whole)
    part = _evaluated(model, compute, input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    error = apart(want, placed(cp, (0, want.size(1))).unshard(part, 1), 2, dtype)
    if not error <= (limit := allowed(dtype)):
        raise ValueError(
            f"{type(model).__name__} differs between {cp.size} ranks and one (relative error {error:.1e}, allowed "
            f"{limit:g}): something other than attention mixes tokens"
        )


_LIMIT = 1e-4
"""Relative difference of two losses of the same logits, in float32."""


def require_next_token_loss(model: PreTrainedModel, division: Division) -> None:
    """Compare losses with cross entropies of the logits from the same call: on one rank, and over all; collective.
    ValueError for a head with another loss, or one that ignores ``shift_labels`` or ``num_items_in_batch``."""
    if "labels" not in forwards(model)[0].parameters():
        return
    cp, size = division.cp, TOKENS * division.cp.size
    ids = tokens(model, size)[:2]
    labels = ids.flip(0).roll(3, 1).clone()
    labels[:, : size // 3] = IGNORED  # ranks then have different numbers of labels
    batch = shard(cp, ids, labels)
    twice, inputs = 2 * int(batch["num_items_in_batch"]), {key: batch[key] for key in ("input_ids", "position_ids")}
    following = {key: batch[key] for key in ("labels", "shift_labels")}

    def compare_over_ranks(loss: Tensor, logits: Tensor, items: int | None) -> None:
        loss = gathered(cp.mesh, loss.detach().double().view(1)).sum()
        whose = f"the losses of {cp.size} ranks, with num_items_in_batch={items}, add up to"
        _compare(model, loss, placed(cp, (0, size)).unshard(logits, 1), labels, items, whose)

    for training in (False, True):
        with probing(model, division, Alone(), Call(size, size - 1), training), Plain(False):
            _compare_alone(model, ids, labels)
            result = model(**inputs, **following, num_items_in_batch=twice, use_cache=False)
            logits = _logits(model, result, **inputs)
        compare_over_ranks(result.loss, logits, twice)
    with unchanged(model):
        result = model.eval()(**batch | {"num_items_in_batch": None}, use_cache=False)
    compare_over_ranks(result.loss, result.logits, None)


def _compare_alone(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> None:
    try:
        result = model(input_ids=ids, labels=labels, use_cache=False)
        loss, logits = result.loss, _logits(model, result, input_ids=ids)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise not_next_token(model, f"calling it with labels fails: {error}") from error
    if not isinstance(logits, Tensor) or logits.shape[:2] != ids.shape or loss is None or loss.dim():
        shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise not_next_token(model, f"for input_ids {list(ids.shape)} its logits are {shape}")
    _compare(model, loss, logits, labels, None, "its loss on one rank is")


def _logits(model: PreTrainedModel, result: Any, **inputs: Tensor) -> Any:
    """Return the call's logits, or another call's, where training fuses the head with the loss and makes none."""
    if result.logits is not None or not model.training:
        return result.logits
    model.eval()
    try:
        return model(**inputs, use_cache=False).logits
    finally:
        model.train()


def _compare(
    model: PreTrainedModel, loss: Tensor, logits: Tensor, labels: Tensor, items: int | None, whose: str
) -> None:
    following = pad(labels[:, 1:], (0, 1), value=IGNORED)
    total = cross_entropy(logits.float().flatten(0, 1), following.flatten(), ignore_index=IGNORED, reduction="sum")
    got, want = loss.item(), (total / ((following != IGNORED).sum() if items is None else items)).item()
    if not abs(got - want) <= _LIMIT * abs(want):
        raise not_next_token(model, f"{whose} {got:.6g}, and the cross entropy of its logits is {want:.6g}")
