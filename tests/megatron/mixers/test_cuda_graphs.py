"""CUDA graphs: allowed captures contain no code of the plugin, refused ones do.

Megatron chooses what to capture and trains with it, on the strict model of ``strict.graphs``.
"""

from __future__ import annotations

import pytest
import support
from equipment.cuda import graphs
from nightly import one_case
from state_space_kernels import STATES
from training import assert_same_bits, train

from cp_plugin.megatron.rules import checks, cuda_graphs, layers
from cp_plugin.testing.launch import RankError

pytestmark = pytest.mark.usefixtures("adapter")

PARTS = "--cuda-graph-modules"
DIVIDED = "--context-parallel-size 2 --cp-provider striped --calculate-per-token-loss"
TE = f"--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 0 {PARTS}"
LOCAL = f"--cuda-graph-impl local {PARTS}"
STEPS = "--cuda-graph-impl full_iteration"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
PADDED = f"{EXPERTS} --moe-expert-capacity-factor 2.0 --moe-pad-expert-input-to-capacity"
DENSE = f"--hybrid-layer-pattern M*- {STATES}"
WITH_EXPERTS = "--hybrid-layer-pattern M*E"
SPARSE = f"{WITH_EXPERTS} {EXPERTS} {STATES}"
PACKED = "--dataloader-inter-document-masking"


OUTSIDE = {
    "mlp": ("", f"{TE} mlp"),
    "mlp, prediction": ("--mtp-num-layers 1", f"{TE} mlp"),
    "experts": (PADDED, f"{TE} moe"),
    "router": (EXPERTS, f"{TE} moe_router"),
    "router, shared experts, preprocessing": (
        f"{PADDED} --moe-shared-expert-intermediate-size 32",
        f"{TE} moe_router moe_preprocess",
    ),
    "nothing of a GPT model": (EXPERTS, f"{LOCAL} moe_router"),
    "hybrid": (DENSE, f"{TE} mlp"),
    "hybrid, packed": (f"{DENSE} {PACKED}", f"{TE} mlp"),
    "hybrid with experts": (SPARSE, f"{TE} moe_router"),
    "all of the experts, Megatron's own graphs": (f"{PADDED} {WITH_EXPERTS} {STATES}", f"{LOCAL} moe"),
    "hybrid with experts, packed, Megatron's own graphs": (f"{SPARSE} {PACKED}", f"{LOCAL} moe_router"),
}
"""Allowed captures: flags of the model and of the graphs."""


@one_case
@pytest.mark.parametrize("case", OUTSIDE)
def test_allowed_captures_contain_no_plugin_code_and_change_nothing(case: str) -> None:
    flags, graph = OUTSIDE[case]
    got, want = (
        train(2, f"{DIVIDED} {flags} {more}", steps=2, prepare=prepare)
        for more, prepare in ((graph, graphs.install), ("", None))
    )
    assert_same_bits(got, want)


INSIDE = {
    "attention": ("", f"{TE} attn"),
    "layers": ("", TE.removesuffix(f" {PARTS}")),
    "attention, Megatron's own graphs": ("", f"{LOCAL} attn"),
    "layers, Megatron's own graphs": ("", "--cuda-graph-impl local"),
    "Mamba": (DENSE, f"{TE} mamba"),
    "Mamba, Megatron's own graphs": (DENSE, f"{LOCAL} mamba"),
    "steps": ("--no-check-for-nan-in-loss-and-grad", STEPS),
}
"""Refused captures."""


@one_case
@pytest.mark.parametrize("case", INSIDE)
def test_refused_captures_would_contain_plugin_code(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags, graph = INSIDE[case]
    for module, name in ((checks, "TRAINING"), (layers, "LAYER")):
        kept = tuple(rule for rule in getattr(module, name) if rule is not cuda_graphs.CUDA_GRAPH)
        monkeypatch.setattr(module, name, kept)
    with pytest.raises(RankError, match="CapturedError: a CUDA graph would capture /"):
        train(2, f"{DIVIDED} {flags} {graph}", prepare=graphs.install)


def test_every_part_that_megatron_names_has_a_row() -> None:
    from megatron.core.transformer import enums

    parts = {part.name for part in enums.CudaGraphModule}
    rows = support.graphs_table()
    assert all(f"`{PARTS} {part}`" in rows for part in parts - {"full_iteration_inference"})
