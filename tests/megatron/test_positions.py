"""Multimodal position embeddings: one rank's numbers, and a planted fault (the others are in ``cases.toml``)."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import training
from nightly import one_case
from training import check, train

from cp_plugin.placement.layouts import get_layout
from cp_plugin.testing.launch import RankError

STRIPED = "--context-parallel-size 2 --cp-provider striped"
MULTIMODAL = "--position-embedding-type mrope --mrope-section 2 3 3"

pytestmark = pytest.mark.usefixtures("adapter")


def _three_ids_per_token() -> None:
    """Time, height and width of each token of the whole sequence, as scripts of multimodal models pass them."""
    from cp_plugin.megatron.models import gpt

    cut = gpt._slice

    def widened(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = batch["position_ids"]
        return cut(batch | {"position_ids": torch.stack((ids, ids // 2, ids % 7))})

    gpt._slice = widened


@one_case
@pytest.mark.skipif(training.SCRIPT is not None, reason="Megatron's script has no position ids for multimodal RoPE")
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_multimodal_rope(layout: str) -> None:
    usp = f"--cp-provider usp --cp-layout {layout}"
    check(MULTIMODAL, usp, cp=2, prepare=_three_ids_per_token, alone=_three_ids_per_token)


def zigzag_angles(kind: str) -> None:
    """Slice the angles of a kind of embeddings as Megatron does."""

    def cut(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
        return get_layout("zigzag").shard(pos_emb, seq_dim, cp_group.size(), cp_group.rank())

    module = importlib.import_module(f"megatron.core.models.common.embeddings.{kind}_pos_embedding")
    module.get_pos_emb_on_this_cp_rank = cut  # type: ignore[attr-defined]


def test_multimodal_angles_of_another_layout_are_noticed() -> None:
    """Planted fault."""
    with pytest.raises(RankError, match="differs from the step on one rank"):
        train(
            2,
            f"{MULTIMODAL} {STRIPED}",
            prepare=lambda: (_three_ids_per_token(), zigzag_angles("rotary")),
        )
