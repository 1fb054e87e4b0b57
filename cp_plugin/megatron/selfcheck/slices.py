"""A checked step compares one micro-batch's slices, as the model and the loss receive them, with the whole batch.

    whole batch, before slicing     digest of all tokens, and of those at this rank's positions    ``sliced``
    embedding, model, cross entropy digest of what they are given                                   hooks
    loss                            digest of each token's weight in it (its gradient)              ``lost``
    one exchange                    every rank's digests: each slice is right, they add up to the whole batch, and
                                    all ranks have the same batch

A digest is exact, does not depend on order or rank, and any single changed value changes it. A script may change a
tensor after it was sliced: what does not agree in the first checked micro-batch is named once, and not compared later.
Batches that differ between ranks stop the training even then.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor

from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.comm.every_rank import gather_objects, gather_ranks
from cp_plugin.megatron.patches import patching
from cp_plugin.megatron.selfcheck.checked_call import Drawn, Steps
from cp_plugin.megatron.state import STATE

_KEYS = {"tokens": "input_ids", "labels": "labels", "loss_mask": "loss_mask", "position_ids": "position_ids"}
"""Entry of a batch -> parameter of the model."""
_WEIGHTS = "weights in the loss"
_ALL = (*_KEYS, _WEIGHTS)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD, _OTHER, _ROW = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 1 << 40


class BatchError(RuntimeError):
    """A rank computes with other tokens, labels, positions or loss weights than those of its slice."""


def watch(chunks: Sequence[torch.nn.Module], steps: Steps) -> None:
    """Follow the batches of checked steps through this process's model."""
    models = [module for chunk in chunks for module in chunk.modules() if isinstance(module, LanguageModule)]
    if models:
        STATE.slices = Slices(models, steps)


def digest(x: Tensor, positions: Tensor) -> Tensor:
    """Checksum of the tokens at these positions, int64 ``[]``: sums over ranks are that of the whole batch.

    Args:
        x: ``[b, n]`` of any dtype.
        positions: int64 ``[n]``, in the whole sequence.
    """
    rows = torch.arange(x.size(0), device=x.device)[:, None] * _ROW
    weights = (rows + positions.to(x.device) + 1) * _ODD
    weights = ((weights ^ (weights >> 32)) * _OTHER) | 1
    return (x.detach().contiguous().view(_BITS[x.element_size()]).long() * weights).sum()


def require_one_batch(batch: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Compare a whole batch, before it is sliced, between the ranks that slice it; collective over the group.

    Args:
        group: context-parallel ranks; None: Megatron's.

    Raises:
        BatchError: on every rank, naming the entries and ranks that differ.
    """
    group = group or parallel_state.get_context_parallel_group()
    whole = _entries(batch)
    if group.size() == 1 or not whole:
        return
    mine = [int(digest(x, torch.arange(x.size(1), device=x.device))) for x in whole.values()]
    found, ranks = gather_objects(mine, group), dist.get_process_group_ranks(group)
    common = max(found, key=found.count)
    others = [rank for rank, digests in zip(ranks, found, strict=True) if digests != common]
    if others:
        wrong = [key for place, key in enumerate(whole) if len({digests[place] for digests in found}) > 1]
        raise BatchError(
            f"{', '.join(wrong)} of the first batch differ before slicing: rank {', '.join(map(str, others))} has "
            f"other batches than the rest of the context-parallel ranks {ranks}. All must read the same samples: build "
            "data loaders per data-parallel rank, without context-parallel ranks"
        )


def _entries(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: x for key in _KEYS if isinstance(x := batch.get(key), Tensor) and x.dim() == 2}


class Slices:
    """The digests of one micro-batch of each checked step."""

    def __init__(self, models: Sequence[LanguageModule], steps: Steps) -> None:
        self._models, self._drawn = models, Drawn(steps, " slices")
        self._whole: dict[str, tuple[Tensor, Tensor]] | None = None  # digests of the batch, and of this rank's slice
        self._got: dict[str, Tensor] = {}
        self._armed: dict[str, bool] = {}
        for model in models:
            model.register_forward_pre_hook(self._enter, with_kwargs=True)
            model.register_forward_hook(self._leave)
            if getattr(model, "pre_process", False) and hasattr(model, "embedding"):
                model.embedding.register_forward_pre_hook(self._embeds, with_kwargs=True)

    def sliced(self, batch: Mapping[str, Any], cp: ContextParallel, group: dist.ProcessGroup | None) -> None:
        """Take in a whole batch that is about to be sliced.

        Args:
            cp: in the layout of the slices.
            group: its ranks; None: Megatron's.
        """
        group = group or parallel_state.get_context_parallel_group()
        self._whole = None
        training = cp.size > 1 and any(model.training for model in self._models)
        if not self._drawn.begin(training) or not self._drawn.is_due():
            return
        whole = _entries(batch)
        if not whole:
            return
        first = next(iter(whole.values()))
        place = self._drawn.place(cp, group)
        with place.booked():
            everywhere = torch.arange(first.size(1), device=first.device)
            self._mine = cp.positions(first.size(1), first.device)
            self._whole = {
                key: (digest(x, everywhere), digest(x[:, self._mine], self._mine)) for key, x in whole.items()
            }
        self._place, self._got = place, {}
        self._mask_dtype = whole["loss_mask"].dtype if "loss_mask" in whole else torch.float32
        if "loss_mask" in self._whole:
            self._whole[_WEIGHTS] = self._whole["loss_mask"]

    def lost(self, loss: Tensor, output: Any) -> None:
        """Take in a micro-batch's loss, the sum over this rank's tokens, with the model's output; collective.

        Raises:
            BatchError: on every rank, naming ranks and entries.
        """
        if self._whole is None:
            return
        if isinstance(output, Tensor) and output.requires_grad and loss.requires_grad:
            (weights,) = torch.autograd.grad(loss.sum(), output, retain_graph=True, allow_unused=True)
            if weights is not None:
                self._take(_WEIGHTS, weights.to(self._mask_dtype))
        self._judge()

    def _take(self, key: str, x: Any) -> None:
        if self._whole is None or key not in self._whole or not isinstance(x, Tensor) or x.dim() != 2:
            return
        if x.size(1) == self._mine.numel():
            with self._place.booked():
                self._got[key] = digest(x, self._mine)

    def _enter(self, model: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._whole is None:
            return
        given = inspect.signature(model.forward).bind_partial(*args, **named).arguments
        for key, name in _KEYS.items():
            self._take(key, given.get(name))
        self._embedded = False
        compute = model.compute_language_model_loss

        def computing(*args: Any, **named: Any) -> Tensor:
            labels = args[0] if args else named.get("labels")
            self._take("labels", labels)  # the last call is that of the loss; those of prediction come before
            return compute(*args, **named)

        self._undo = patching.lend(model, "compute_language_model_loss", computing)

    def _embeds(self, embedding: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._whole is None or self._embedded:
            return
        self._embedded = True  # multi-token prediction embeds the next tokens, too
        given = inspect.signature(embedding.forward).bind_partial(*args, **named).arguments
        self._take("tokens", given.get("input_ids"))
        self._take("position_ids", given.get("position_ids"))

    def _leave(self, model: Any, _: Any, output: Any) -> None:
        if self._whole is None:
            return
        self._undo()
        if not getattr(model, "post_process", True):
            self._whole.pop(_WEIGHTS, None)
            self._judge()

    def _judge(self) -> None:
        assert self._whole is not None
        place, whole = self._place, self._whole
        self._whole = None
        device = next(iter(whole.values()))[0].device
        with place.booked():
            zero = torch.zeros((), dtype=torch.int64, device=device)
            mine = [x for key in _ALL for x in (*whole.get(key, (zero, zero)), self._got.get(key, zero))]
            seen = torch.tensor([key in self._got for key in _ALL], device=device).long()
            numbers = gather_ranks(place.cp.mesh, torch.cat((torch.stack(mine), seen))).tolist()
        problems, left_out = [], []
        for i, key in enumerate(_ALL):
            everyone = [(*found[3 * i : 3 * i + 3], found[3 * len(_ALL) + i]) for found in numbers]
            if key not in whole:
                continue
            if not all(seen for *_, seen in everyone):
                if key not in self._armed:
                    left_out.append(f"{key}, which the model is not given")
                self._armed[key] = False
                continue
            what, of_batch = self._problem(everyone)
            if what and (of_batch or self._armed.get(key)):
                problems.append(f"{key} {what}")
            elif what and key not in self._armed:
                left_out.append(f"{key}, which in the first one {what}: the script may change them after slicing")
            self._armed.setdefault(key, not what)
        if left_out and dist.get_rank() == place.ranks[0]:
            print(f"cp_plugin: --cp-check-every does not compare slices of {'; '.join(left_out)}", flush=True)
        if problems:
            raise BatchError(
                f"--cp-check-every: in step {place.step}, on the {place.cp.layout.name} layout, {'; '.join(problems)}. "
                "A device, a buffer or the data loader is at fault, or the script changes a batch after slicing it, in "
                "some steps only. Resume from an earlier checkpoint; --cp-check-every 0 checks nothing"
            )

    def _problem(self, everyone: Sequence[tuple[int, int, int, int]]) -> tuple[str, bool]:
        """What is wrong with an entry, and whether before slicing.

        everyone: each rank's digest of the batch, of its slice, and of what it received.
        """
        wholes = [whole for whole, *_ in everyone]
        if len(set(wholes)) > 1:
            common = max(set(wholes), key=wholes.count)
            return f"differ before slicing: other batches on {self._ranks(w != common for w in wholes)}", True
        wrong = [got != want for _, want, got, _ in everyone]
        if any(wrong):
            return f"are not those of the slice on {self._ranks(wrong)}", False
        if (sum(got for _, _, got, _ in everyone) - wholes[0]) % (1 << 64):
            return "of all ranks are not the whole batch: a rank has others' positions", False
        return "", False

    def _ranks(self, wrong: Any) -> str:
        return ", ".join(f"rank {rank}" for rank, is_wrong in zip(self._place.ranks, wrong, strict=True) if is_wrong)
