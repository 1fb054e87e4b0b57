"""Every position embedding of Megatron, with different norms and heads: one rank's numbers."""

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch
from harness import train
from nightly import one_case
from parity import check

from cp_plugin.common.versions import version_tuple
from cp_plugin.placement.layouts import get_layout
from cp_plugin.testing.launch import RankError

STRIPED = "--context-parallel-size 2 --cp-provider striped"
POSITIONS = {
    "learned": "--position-embedding-type learned_absolute --qk-layernorm",
    "none": "--position-embedding-type none",
    "RoPE in some layers": "--no-rope-freq 2 --rotary-percent 0.5 --rotary-interleaved --rotary-base 500 "
    "--rotary-seq-len-interpolation-factor 2 --use-rope-scaling --rope-scaling-factor 4 --num-query-groups 1",
    "YaRN": "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16 "
    "--qk-l2-norm",
    "RoPE in some linear layers": "--no-rope-freq 2 --rotary-percent 0.5 --num-query-groups 1 "
    "--cp-linear-attention lightning --cp-layer-pattern LN",
}
MULTIMODAL = "--position-embedding-type mrope --mrope-section 2 3 3"

pytestmark = pytest.mark.usefixtures("adapter")


@one_case
@pytest.mark.parametrize("positions", POSITIONS)
def test_position_embeddings(positions: str) -> None:
    from cp_plugin.megatron.patches.patching import megatron_version

    if positions == "YaRN" and version_tuple(megatron_version()) < (0, 19):
        pytest.skip("before 0.19 Megatron has no flags for YaRN outside of MLA")
    check(POSITIONS[positions], "--cp-layout zigzag" if "linear" in positions else "--cp-provider striped", cp=2)


def _three_ids_per_token() -> None:
    """Time, height and width of each token of the whole sequence, as scripts of multimodal models pass them."""
    from cp_plugin.megatron.models import gpt

    cut = gpt._slice

    def widened(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = batch["position_ids"]
        return cut(batch | {"position_ids": torch.stack((ids, ids // 2, ids % 7))})

    gpt._slice = widened


@one_case
@pytest.mark.skipif(harness.SCRIPT is not None, reason="Megatron's script has no position ids for multimodal RoPE")
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_multimodal_rope(layout: str) -> None:
    usp = f"--cp-provider usp --cp-layout {layout}"
    check(MULTIMODAL, usp, cp=2, prepare=_three_ids_per_token, alone=_three_ids_per_token)


def _zigzag_angles() -> None:
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    def cut(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
        return get_layout("zigzag").shard(pos_emb, seq_dim, cp_group.size(), cp_group.rank())

    rotary_pos_embedding.get_pos_emb_on_this_cp_rank = cut


def test_multimodal_angles_of_another_layout_are_noticed() -> None:
    """Planted fault."""
    with pytest.raises(RankError, match="differs from the step on one rank"):
        train(2, f"{MULTIMODAL} {STRIPED}", prepare=lambda: (_three_ids_per_token(), _zigzag_angles()))
