"""``--linear-cp-layout`` and ``--attention-cp-layout``: what Megatron's layout manager converts, and planted faults.

``cases.toml`` has the numbers of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
from rule_examples import run_of
from state_space_kernels import STATES
from training import train

from cp_plugin.megatron.rules import layout
from cp_plugin.testing.launch import RankError

pytestmark = pytest.mark.usefixtures("adapter")
with_manager = pytest.mark.skipif(
    find_spec("megatron.core.context_parallel") is None,
    reason="this megatron-core has no layout manager, which came to Megatron-LM with #6764 and #6776",
)

ZIGZAG = "ring --cp-layout zigzag"
LINEAR, ATTENTION = "--linear-cp-layout contiguous", "--attention-cp-layout contiguous"


@pytest.mark.parametrize(
    ("flags", "converted"),
    [
        ("--hybrid-layer-pattern M*-", True),
        ("--hybrid-layer-pattern M*- --tensor-model-parallel-size 2", True),
        ("--hybrid-layer-pattern M*- --tensor-model-parallel-size 3", False),
        ("--hybrid-layer-pattern M*- --sft", False),
        ("--hybrid-layer-pattern M*- --mtp-num-layers 1", False),
        ("--hybrid-layer-pattern M*/*-", False),
        ("", False),
        ("--hybrid-layer-pattern M*- --cp-layout contiguous", False),
    ],
)
def test_what_megatron_converts(flags: str, converted: bool) -> None:
    run = run_of(f"--linear-cp-layout contiguous {flags}")
    assert layout._not_converted(run) != converted


def _not_converted() -> None:
    from megatron.core.context_parallel import ContextParallelLayoutManager as Manager

    Manager._convert_cp_layout = lambda self, hidden, *layouts: hidden


def _sliced_in_zigzag() -> None:
    from cp_plugin.megatron.patches import batch

    slice_batch = batch.slice_batch

    def slice_as_attention(tensors: dict[str, Any], cp: Any) -> dict[str, Any]:
        whole = {key: value for key, value in tensors.items() if key != "tokens"}
        return slice_batch(whole, cp) | {"tokens": cp.shard(tensors["tokens"], 1)}

    batch.slice_batch = slice_as_attention


def _states_as_if_in_zigzag() -> None:
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.mixers import mamba

    mamba.orders = lambda batch, device: mamba._orders_in(
        runtime.context_parallel().layout, runtime.context_parallel().numbers, batch.tokens, device
    )


@with_manager
@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (_not_converted, "layout manager hands them to attention differs"),
        (_sliced_in_zigzag, "tokens differ"),
        (_states_as_if_in_zigzag, "the order of tokens in Mamba and gated delta net layers differs"),
    ],
)
def test_the_self_check_finds_a_planted_fault(plant: Callable[[], None], message: str) -> None:
    flags = f"--hybrid-layer-pattern G* {STATES} --context-parallel-size 2 --cp-provider {ZIGZAG} {LINEAR}"
    with pytest.raises(RankError, match=message):
        train(2, flags, prepare=plant)


def _configured_otherwise() -> None:
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    init = HybridModel.__init__

    def converting(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        config.linear_cp_layout = "contiguous"
        init(self, config, *args, **kwargs)

    HybridModel.__init__ = converting


@with_manager
def test_a_configuration_that_is_not_the_command_lines_is_refused() -> None:
    flags = f"--hybrid-layer-pattern *- --context-parallel-size 2 --cp-provider {ZIGZAG}"
    with pytest.raises(RankError, match="has linear_cp_layout 'contiguous', but the command line does not"):
        train(2, flags, prepare=_configured_otherwise)


@with_manager
def test_the_flag_of_attention_is_not_overridden() -> None:
    flags = f"--hybrid-layer-pattern *- --context-parallel-size 2 --cp-provider striped {ATTENTION}"
    with pytest.raises(RankError, match="--cp-layout sets the layout of attention"):
        train(2, flags)
