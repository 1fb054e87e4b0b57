"""What training scripts may do to their batches and data: each is called on every rank (``training.stand_in``)."""

from __future__ import annotations

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
        found = get(self, index)
        found["loss_mask"] = found["loss_mask"].clone()
        found["loss_mask"][: first(found["loss_mask"].numel())] = 0
        return found

    MockGPTDataset.__getitem__ = masked


def data_as_megatrons_scripts_build_them() -> None:
    """For the first and the last stage only, also where documents are packed."""
    from megatron.core import mpu
    from megatron.training.utils import is_first_or_last_pipeline_stage as at_an_end

    from cp_plugin.megatron.models import gpt

    gpt._builds_data = lambda vp_stage: mpu.get_tensor_model_parallel_rank() == 0 and at_an_end(vp_stage)
