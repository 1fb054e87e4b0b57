"""Megatron's Transformer Engine spec, built with the real package and audited: every core attention is the plugin's.

TE's modules need CUDA to run, but not to be built. So the ranks here are CPU ranks whose CPU mode does not hide TE and
takes ``--transformer-impl transformer_engine``; Megatron builds its model with its own code, the plugin audits it, and
that is where these ranks stop: no layer runs.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from training import DATA, MODEL, SGD

from cp_plugin.testing.launch import RankError, run_ranks

pytestmark = pytest.mark.usefixtures("te")

TE = "--transformer-impl transformer_engine"
STRIPED = "--context-parallel-size 2 --cp-provider striped"


class Built(BaseException):
    """Raised where a rank stops."""


def build(ranks: int, flags: str, *, planted: bool = False) -> list[tuple[Any, Counter[str]]]:
    """What the audit found on every rank, and how many modules of each class the model has."""
    importlib.import_module("transformer_engine.pytorch")
    model = MODEL.replace("--group-query-attention --num-query-groups 2 ", "") if LATENT in flags else MODEL
    words = f"{model} {DATA} {SGD} --train-iters 1 {TE} {flags}".split()
    return run_ranks(_build_rank, ranks, args=(words, planted), timeout=240.0)


def _build_rank(words: list[str], planted: bool) -> tuple[Any, Counter[str]]:
    from cp_plugin.megatron import activate
    from cp_plugin.megatron.cpu import mode as cpu

    cpu._HIDDEN = tuple(name for name in cpu._HIDDEN if not name.startswith("transformer_engine"))
    cpu.FLAGS = tuple(flag for flag in cpu.FLAGS if flag.dest != "transformer_impl")
    sys.argv = ["pretrain_gpt.py", *words]
    activate()
    from cp_plugin.megatron.patches import hooks
    from cp_plugin.megatron.selfcheck import audit

    audited: list[tuple[Any, Counter[str]]] = []
    run = audit.run

    def audit_and_stop(chunks: list[torch.nn.Module]) -> None:
        run(chunks)
        modules = Counter(type(module).__name__ for chunk in chunks for module in chunk.modules())
        audited.append((audit.coverage(chunks, 0), modules))
        raise Built

    audit.run = audit_and_stop
    if planted:
        start = hooks.start
        hooks.start = lambda *settings: (start(*settings), _stock_attention())
    try:
        runpy.run_module("cp_plugin.pretrain_gpt", run_name="__main__", alter_sys=True)
    except Built:
        return audited[0]
    raise AssertionError("the model was not audited")


def _stock_attention() -> None:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    TESpecProvider.core_attention = lambda self: TEDotProductAttention


LATENT = "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 12 --qk-pos-emb-head-dim 4 --v-head-dim 8"
MODELS = {
    "attention": (2, STRIPED, 2, 0),
    "latent attention": (2, f"{STRIPED} {LATENT}", 2, 0),
    "tensor and sequence parallel": (4, f"{STRIPED} --tensor-model-parallel-size 2 --sequence-parallel", 2, 0),
    "multi-token prediction": (2, f"{STRIPED} --mtp-num-layers 1 --calculate-per-token-loss", 3, 0),
    "linear layers between": (
        2,
        "--context-parallel-size 2 --cp-provider ring --cp-linear-attention gla --cp-layer-pattern LN",
        2,
        1,
    ),
}
"""Ranks, flags, attention layers of a rank, and how many of them are linear."""


@pytest.mark.parametrize("model", MODELS)
def test_every_core_attention_is_the_plugins(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    ranks, flags, layers, linear = MODELS[model]
    for coverage, modules in build(ranks, flags):
        assert len(coverage.replaced) == layers and len(coverage.linear) == linear and not coverage.missed
        assert modules["CoreAttention"] == layers - linear and modules["LinearCoreAttention"] == linear
        assert modules["TELinear" if LATENT in flags else "TELayerNormColumnParallelLinear"]
        assert modules["TERowParallelLinear"]
        assert "TEDotProductAttention" not in modules
    text = capfd.readouterr().out
    assert f"{layers} of {layers} replaced" in text and "TESpecProvider.core_attention" in text


def test_a_layer_with_tes_own_attention_is_refused() -> None:
    with pytest.raises(RankError, match=r"0 of 2\. Not replaced: .*core_attention \(TEDotProductAttention\)"):
        build(2, STRIPED, planted=True)
