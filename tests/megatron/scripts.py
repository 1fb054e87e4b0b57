"""What training scripts may do to their batches and data: each is called on every rank (``training.stand_in``)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def three_ids_per_token() -> None:
    """Time, height and width of each token of the whole sequence, as scripts of multimodal models pass them."""
    from cp_plugin.megatron.models import gpt

    cut = gpt._slice

    def widened(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = batch["position_ids"]
        return cut(batch | {"position_ids": torch.stack((ids, ids // 2, ids % 7))})

    gpt._slice = widened


def cap_scores() -> None:
    """A Megatron with ``attn_logit_softcapping``, which its own attention has, too."""
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
    from megatron.core.transformer.transformer_config import TransformerConfig

    cap, softmax = 0.05, FusedScaleMaskSoftmax.forward

    def capped(self: Any, scores: torch.Tensor, *rest: Any) -> torch.Tensor:
        return softmax(self, cap * torch.tanh(scores / cap), *rest)

    TransformerConfig.attn_logit_softcapping, FusedScaleMaskSoftmax.forward = cap, capped


def mask_the_first_half() -> None:
    """Mask the first half of every sequence: with contiguous tokens, all of rank 0's, whose mean over none was NaN."""
    _mask(lambda n: n // 2)


def count_a_quarter() -> None:
    """Only the last tokens of a sequence count: all in the second chunk of rank 0 of the zigzag layout.

    The mean of the ranks' means gave three tokens on one rank the weight of sixteen on the other.
    """
    _mask(lambda n: 3 * n // 4 - 3)


def _mask(first: Any) -> None:
    from megatron.core.datasets.gpt_dataset import MockGPTDataset

    get = MockGPTDataset.__getitem__

    def masked(self: Any, index: int | None) -> dict[str, Any]:
        sample = get(self, index)
        sample["loss_mask"] = sample["loss_mask"].clone()
        sample["loss_mask"][: first(sample["loss_mask"].numel())] = 0
        return sample

    MockGPTDataset.__getitem__ = masked


def data_as_megatrons_scripts_build_them() -> None:
    """For the first and the last stage only, also where documents are packed."""
    from megatron.core import mpu
    from megatron.training.utils import is_first_or_last_pipeline_stage as at_an_end

    from cp_plugin.megatron.models import gpt

    gpt._builds_data = lambda vp_stage: mpu.get_tensor_model_parallel_rank() == 0 and at_an_end(vp_stage)


def pad_rows(*, everywhere: bool = True) -> None:
    """Rows end early, one after another; the script masks what follows them in the loss, and tells the routers.

    everywhere: also those of ranks on which nothing is padded.
    """
    from megatron.core.models.gpt import GPTModel

    from cp_plugin.megatron.models import gpt

    cut, get_batch, forward = gpt._slice, gpt.get_batch, GPTModel.forward
    held: dict[str, Any] = {}

    def shorter(batch: dict[str, Any]) -> dict[str, Any]:
        mask = batch["loss_mask"].clone()
        for i, row in enumerate(mask):
            row[32 + 16 * i :] = 0
        return cut(batch | {"loss_mask": mask, "padding_mask": mask == 0})

    def kept(*args: Any, **named: Any) -> dict[str, Any]:
        held.update(batch := get_batch(*args, **named))
        return batch

    def told(model: Any, *args: Any, **named: Any) -> Any:
        labels, padding = named.get("labels"), held.get("padding_mask")
        padded = labels is not None and padding is not None and (everywhere or padding.any())
        also = {"padding_mask": padding} if padded else {}
        return forward(model, *args, **named, **(also if also and labels.shape == padding.shape else {}))

    gpt._slice, gpt.get_batch, GPTModel.forward = shorter, kept, told  # type: ignore[method-assign]


def pad_rows_and_tell_where_any_is() -> None:
    """``pad_rows``, but ranks on which nothing is padded pass no mask."""
    pad_rows(everywhere=False)


def attend_once(forwards: int = 1) -> None:
    """Fail a step unless it calls the kernel's forward ``forwards`` times as often as its backward, or not at all.

    No kernel of the plugin's is called on one rank.
    """
    from megatron.training import training

    from cp_plugin.engine.kernels.backends.sdpa import Sdpa
    from cp_plugin.megatron import runtime

    calls, step = {"forward": 0, "backward": 0}, training.train_step

    def counted(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def kernel(*args: Any) -> Any:
            calls[name] += 1
            return original(*args)

        return kernel

    for name in calls:
        setattr(Sdpa, name, counted(getattr(Sdpa, name), name))

    @functools.wraps(step)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        calls.update(forward=0, backward=0)
        result = step(*args, **kwargs)
        assert calls["forward"] == forwards * calls["backward"] and bool(calls["forward"]) == runtime.settings().active
        return result

    training.train_step = train_step


def attend_twice() -> None:
    """``attend_once``, where recomputation repeats attention."""
    attend_once(2)
