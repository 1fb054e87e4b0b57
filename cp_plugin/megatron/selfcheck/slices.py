"""A checked step compares one micro-batch's slices, as the model and the loss receive them, with the whole batch.

    whole batch, before slicing     digest of all tokens, and of those at this rank's positions    ``sliced``
    model                           digest of what it is given, at the end of its forward           a hook
    loss                            digest of each token's weight in it (its gradient)              ``lost``
    one exchange                    every rank's digests: each slice is right, they add up to the whole batch, and
                                    all ranks have the same batch

A digest is exact, does not depend on order or rank, and any single changed value changes it. A script may change a
tensor after it was sliced: what does not agree in the first checked micro-batch is named once, and not compared later.
Batches that differ between ranks stop the training even then.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor

from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.comm.every_rank import gather_objects, gather_ranks
from cp_plugin.megatron.selfcheck.checked_call import Drawn
from cp_plugin.megatron.state import STATE

_KEYS = {"tokens": "input_ids", "labels": "labels", "loss_mask": "loss_mask", "position_ids": "position_ids"}
"""Entry of a batch -> parameter of the model."""
_WEIGHTS = "weights in the loss"
_ALL = (*_KEYS, _WEIGHTS)
_NOT_GIVEN = "the model is not given"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD, _OTHER, _ROW = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 1 << 40


class BatchError(RuntimeError):
    """A rank computes with other tokens, labels, positions or loss weights than those of its slice."""


def watch(chunks: Sequence[torch.nn.Module], due: Callable[[], int]) -> None:
    """Follow the batches of checked steps through this process's model."""
    models = [module for chunk in chunks for module in chunk.modules() if isinstance(module, LanguageModule)]
    if models:
        STATE.slices = Slices(models, due)


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
    own = [int(digest(x, torch.arange(x.size(1), device=x.device))) for x in whole.values()]
    everyone, ranks = gather_objects(own, group), dist.get_process_group_ranks(group)
    common = max(everyone, key=everyone.count)
    others = [rank for rank, digests in zip(ranks, everyone, strict=True) if digests != common]
    if others:
        wrong = [key for place, key in enumerate(whole) if len({digests[place] for digests in everyone}) > 1]
        raise BatchError(
            f"{', '.join(wrong)} of the first batch differ before slicing: rank {', '.join(map(str, others))} has "
            f"other batches than the rest of the context-parallel ranks {ranks}. All must read the same samples: build "
            "data loaders per data-parallel rank, without context-parallel ranks"
        )


def _entries(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: x for key in _KEYS if isinstance(x := batch.get(key), Tensor) and x.dim() == 2}


class Slices:
    """The digests of one micro-batch of each checked step."""

    def __init__(self, models: Sequence[LanguageModule], due: Callable[[], int]) -> None:
        self._models, self._drawn = models, Drawn(due, " slices")
        self._whole: dict[str, tuple[Tensor, Tensor]] = {}  # digests of the batch, and of this rank's slice
        self._got: dict[str, Tensor] = {}
        self._armed: dict[str, bool] = {}
        for model in models:
            model.register_forward_hook(self._leave, with_kwargs=True)

    def sliced(self, batch: Mapping[str, Any], cp: ContextParallel, group: dist.ProcessGroup | None) -> None:
        """Take in a whole batch that is about to be sliced.

        Args:
            cp: in the layout of the slices.
            group: its ranks; None: Megatron's.
        """
        self._whole, self._got, whole = {}, {}, _entries(batch)
        training = cp.size > 1 and any(model.training for model in self._models)
        if not self._drawn.take(training) or not whole:
            return
        first = next(iter(whole.values()))
        self._place = self._drawn.place(cp, group or parallel_state.get_context_parallel_group())
        with self._place.booked():
            everywhere = torch.arange(first.size(1), device=first.device)
            self._positions = cp.positions(first.size(1), first.device)
            for key, x in whole.items():
                self._whole[key] = digest(x, everywhere), digest(x[:, self._positions], self._positions)
        self._mask_dtype = torch.float32
        if "loss_mask" in whole:
            self._mask_dtype, self._whole[_WEIGHTS] = whole["loss_mask"].dtype, self._whole["loss_mask"]

    def lost(self, loss: Tensor, output: Any) -> None:
        """Take in a micro-batch's loss, the sum over this rank's tokens, with the model's output; collective.

        Raises:
            BatchError: on every rank, naming ranks and entries.
        """
        if not self._whole:
            return
        if isinstance(output, Tensor) and output.requires_grad and loss.requires_grad:
            (weights,) = torch.autograd.grad(loss.sum(), output, retain_graph=True, allow_unused=True)
            if weights is not None:
                self._take(_WEIGHTS, weights.to(self._mask_dtype))
        self._judge()

    def _take(self, key: str, x: Any) -> None:
        if key in self._whole and isinstance(x, Tensor) and x.dim() == 2 and x.size(1) == self._positions.numel():
            with self._place.booked():
                self._got[key] = digest(x, self._positions)

    def _leave(self, model: Any, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        """Take in what the model was given, when it has computed with it."""
        if not self._whole:
            return
        arguments = inspect.signature(model.forward).bind_partial(*args, **named).arguments
        for key, name in _KEYS.items():
            self._take(key, arguments.get(name))
        if not getattr(model, "post_process", True):
            self._whole.pop(_WEIGHTS, None)
            self._judge()

    def _judge(self) -> None:
        place, whole, self._whole = self._place, self._whole, {}
        with place.booked():
            none = torch.zeros((), dtype=torch.int64, device=self._positions.device)
            own = [
                torch.stack((*whole.get(key, (none, none)), self._got.get(key, none), none + (key in self._got)))
                for key in _ALL
            ]
            numbers = gather_ranks(place.cp.mesh, torch.stack(own)).tolist()
        problems, left_out = [], []
        for key, *everyone in zip(_ALL, *numbers, strict=True):
            if key not in whole:
                continue
            what, certain = self._problem(everyone)
            if certain or (what not in ("", _NOT_GIVEN) and self._armed.get(key)):
                problems.append(f"{key} {what}")
            elif what and key not in self._armed:
                left_out.append(f"{key}, which in the first one {what}")
            self._armed.setdefault(key, not what)
        if left_out and dist.get_rank() == place.ranks[0]:
            said = f"{'; '.join(left_out)}: the script may change them after slicing"
            print(f"cp_plugin: --cp-check-every does not compare slices of {said}", flush=True)
        place.stop_if_any(
            problems,
            "slices",
            "are not those of the batch",
            "A device, a buffer or the data loader is at fault, or the script changes a batch after slicing at times",
            BatchError,
        )

    def _problem(self, everyone: Sequence[Sequence[int]]) -> tuple[str, bool]:
        """Return what is wrong with an entry, and whether it stops the training even where a script changes entries.

        everyone: each rank's digest of the batch, of its slice, and of what it received, and whether it did.
        """
        wholes, slices, got, seen = zip(*everyone, strict=True)
        if len(set(wholes)) > 1:
            common = max(set(wholes), key=wholes.count)
            return f"differ before slicing: other batches on {self._ranks(w != common for w in wholes)}", True
        if not all(seen):
            return _NOT_GIVEN, False
        if any(wrong := [one != want for one, want in zip(got, slices, strict=True)]):
            return f"are not those of the slice on {self._ranks(wrong)}", False
        if (sum(got) - wholes[0]) % (1 << 64):
            return "of all ranks are not the whole batch: a rank has others' positions", False
        return "", False

    def _ranks(self, wrong: Iterable[bool]) -> str:
        return ", ".join(f"rank {rank}" for rank, is_wrong in zip(self._place.ranks, wrong, strict=True) if is_wrong)
