"""Multi-latent attention (MLA) under context parallelism: one rank's numbers, beside other parallelism too.

Megatron's only core attention for MLA is Transformer Engine's: on one rank a textbook version takes its place.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
from harness import MODEL, train
from megatron.core.packed_seq_params import PackedSeqParams
from nightly import one_case
from parity import compare, stock
from test_masks_in_training import short_documents

from cp_plugin.common.versions import version_tuple
from cp_plugin.placement.layouts import get_layout
from cp_plugin.testing.launch import RankError

STEPS = 2
MLA = MODEL.replace("--group-query-attention --num-query-groups 2 ", "") + (
    " --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 12 --qk-pos-emb-head-dim 4 --v-head-dim 8"
)
YARN = "--rope-type yarn --rotary-scaling-factor 4 --mscale 0.7 --mscale-all-dim 0.3"

pytestmark = pytest.mark.usefixtures("adapter")


class Textbook(torch.nn.Module):
    """Causal attention under the data loader's mask; the documents of a pack one after the other."""

    def __init__(self, softmax_scale: float, **kwargs: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if packed_seq_params is not None:
            lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
            documents = zip(*(x.unsqueeze(1).split(lengths) for x in (query, key, value)), strict=True)
            return torch.cat([self.forward(*document, None).squeeze(1) for document in documents])
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * self.scale
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        hidden = hidden if attention_mask is None else hidden | attention_mask
        return torch.einsum("bhqk,kbhd->qbhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value).flatten(2)


def textbook() -> None:
    from megatron.core.models.backends import LocalSpecProvider

    LocalSpecProvider.core_attention = lambda self: Textbook


def check(provider: str, flags: str, **more: Any) -> None:
    parity.check(flags, f"--cp-provider {provider}", **{"model": MLA, "alone": textbook, "counted": True} | more)


TP = "--tensor-model-parallel-size 2"
YARN_LATENT = f"{YARN} --q-lora-rank 24 --qk-layernorm"
CASES = {
    "yarn and a latent query": (2, f"{YARN_LATENT} {TP} --sequence-parallel", "striped"),
    "rope": (1, "--rope-type rope", "striped"),
    "grid": (1, YARN_LATENT, "attention2d"),
    "contiguous": (1, YARN_LATENT, "ring --cp-layout contiguous"),
    "all-gather": (1, YARN_LATENT, "all_gather"),
    "ulysses": (1, YARN_LATENT, "ulysses"),
    "head axis": (1, YARN_LATENT, "striped --cp-head-parallel 2"),
    "pipeline parallel": (2, f"{YARN_LATENT} --pipeline-model-parallel-size 2", "striped"),
    "recomputed": (
        1,
        f"{YARN_LATENT} --recompute-granularity selective --recompute-modules core_attn mla_up_proj",
        "striped",
    ),
    "multi-token prediction": (1, f"{YARN_LATENT} --mtp-num-layers 1 --calculate-per-token-loss", "striped"),
}
"""Ranks without context parallelism, flags, provider."""


@one_case
@pytest.mark.parametrize("model", CASES)
def test_models(model: str) -> None:
    ranks, flags, provider = CASES[model]
    counted = model not in ("recomputed", "multi-token prediction")
    check(provider, flags, cp=4 if ranks == 1 else 2, ranks=ranks, counted=counted)


def _textbook_of_short_documents() -> None:
    textbook()
    short_documents()


@one_case
@pytest.mark.parametrize(("provider", "cp"), [("striped", 2), ("attention2d", 4)])
def test_packed_documents(provider: str, cp: int) -> None:
    from cp_plugin.megatron.patches.patching import megatron_version

    if version_tuple(megatron_version()) < (0, 19):
        pytest.skip("documents are packed for pretraining since 0.19")
    reset = f"{YARN_LATENT} --reset-position-ids --reset-attention-mask"
    prepare = {"prepare": short_documents, "alone": _textbook_of_short_documents}
    packed = f"{YARN_LATENT} --dataloader-inter-document-masking"
    check(provider, packed, want=reset, cp=cp, steps=1, counted=False, **prepare)


def test_a_size_that_does_not_divide_the_table_of_yarn() -> None:
    """Megatron makes a table of 4096 positions, which three ranks cannot divide."""
    model = MLA.replace("--seq-length 64", "--seq-length 60")
    check("striped", YARN, cp=3, steps=1, model=model)


def _zigzag_angles() -> None:
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding

    def cut(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
        return get_layout("zigzag").shard(pos_emb, seq_dim, cp_group.size(), cp_group.rank())

    yarn_rotary_pos_embedding.get_pos_emb_on_this_cp_rank = cut


def test_angles_of_another_layout_are_noticed() -> None:
    """Planted fault: by the self-check, and without it by the comparison with one rank."""
    flags = f"{YARN} --context-parallel-size 2 --cp-provider striped"
    with pytest.raises(RankError, match="differs from the step on one rank"):
        train(2, flags, model=MLA, prepare=_zigzag_angles)
    got = train(2, f"{flags} --cp-selfcheck off", steps=STEPS, model=MLA, prepare=_zigzag_angles)
    with pytest.raises(AssertionError, match="gradient of"):
        compare(got, stock(1, YARN, steps=STEPS, model=MLA, prepare=textbook), steps=STEPS)


GROUPS = "--group-query-attention --num-query-groups 2 "
STRIPED = "--context-parallel-size 4 --cp-provider striped"


def test_the_fused_rotation_is_switched_off(
    validated: Callable[..., argparse.Namespace], capsys: pytest.CaptureFixture[str]
) -> None:
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.rules import checks

    args = validated(f"{STRIPED} --multi-latent-attention", without=GROUPS)
    assert "--no-rope-fusion" not in capsys.readouterr().out
    args.apply_rope_fusion = True  # the default on CUDA
    checks.before(args, runtime.settings())
    assert not args.apply_rope_fusion
    assert "setting --no-rope-fusion: the fused rotation of MLA" in capsys.readouterr().out


def test_the_provider_is_told_both_head_sizes(validated: Callable[..., argparse.Namespace]) -> None:
    from cp_plugin.megatron import runtime

    validated(f"{STRIPED} --multi-latent-attention --qk-head-dim 24 --v-head-dim 16", without=GROUPS)
    problem = runtime.problem()
    assert (problem.heads, problem.kv_heads, problem.head_dim, problem.v_head_dim) == (4, 4, 24 + 64, 16)
