"""Megatron's gated delta net by a provider (``--cp-linear-provider``): self-check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from state_space_kernels import STATES
from training import PACKED, SHORT, train

from cp_plugin.common.versions import version_tuple
from cp_plugin.megatron.patches.patching import megatron_version
from cp_plugin.testing.launch import RankError

pytestmark = pytest.mark.usefixtures("adapter")


def _train(flags: str, plant: Callable[[], None] = lambda: None) -> None:
    if PACKED in flags and version_tuple(megatron_version()) < (0, 19):
        pytest.skip("documents are packed since 0.19")
    flags = f"--hybrid-layer-pattern G* {STATES} --seq-length 32 --context-parallel-size 2 {flags}"
    train(2, flags, documents=SHORT, prepare=plant)


def test_it_is_announced_and_checked_in_half_precision(capfd: pytest.CaptureFixture[str]) -> None:
    _train(f"--cp-provider ring --cp-linear-provider lasp1 --bf16 {PACKED} --calculate-per-token-loss")
    told = capfd.readouterr().out
    assert "gated delta net" in told and "by lasp1: LASP (arXiv 2404.02882)" in told
    assert "chunked: linear attention, plain torch, because fla does not run: its Triton kernels need a CUDA" in told
    assert "self-check passed" in told


def _own_tokens_alone() -> None:
    from cp_plugin.attention import convolution

    fetch = convolution._sent
    convolution._sent = lambda *given: fetch(*given) * 0


def _gradients_as_states() -> None:
    from cp_plugin.linear import scan

    scan.transposed = lambda through: through


def _documents_run_on() -> None:
    from cp_plugin.megatron.patches import delta_net

    attend = delta_net.attend
    delta_net.attend = lambda layer, batch, projected, unit=None: attend(
        layer, batch if unit else replace(batch, documents=None), projected, unit
    )


@pytest.mark.parametrize(
    ("plant", "flags", "message"),
    [
        (_own_tokens_alone, "", r"rank 1: gated delta net's outputs are off by \d"),
        (_gradients_as_states, "--cp-layout zigzag", r"rank 0: gated delta net's gradients are off by \d"),
        (_documents_run_on, f"{PACKED} --calculate-per-token-loss", r"packed gated delta net's outputs are off by \d"),
    ],
    ids=["convolution without neighbours", "gradients not transposed", "documents run on"],
)
def test_the_self_check_finds_a_fault(plant: Callable[[], None], flags: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        _train(f"--cp-provider ring --cp-linear-provider lasp2 {flags or '--cp-layout contiguous'}", plant)


def test_a_variant_of_the_layer_is_not_trained() -> None:
    def other() -> None:
        from megatron.core.ssm.gated_delta_net import GatedDeltaNet

        GatedDeltaNet.__name__ = "GatedDeltaNet2"

    with pytest.raises(RankError, match=r"Not replaced: .*self_attention"):
        _train("--cp-provider ring --cp-layout contiguous --cp-linear-provider lasp2", other)
