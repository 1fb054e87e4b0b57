"""``--linear-cp-layout`` and ``--attention-cp-layout``: what Megatron's layout manager converts, and planted faults.

``cases.toml`` has the numbers of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
from fault_rows import instead
from rule_examples import run_of
from state_space_kernels import STATES
from training import train

from cp_plugin.megatron.rules import layout
from cp_plugin.testing.launch import RankError

pytestmark = pytest.mark.usefixtures("adapter")


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


not_converted = instead(
    "megatron.core.context_parallel:ContextParallelLayoutManager._convert_cp_layout", "not_converted"
)(lambda convert, manager, hidden, *layouts: hidden)


@instead("cp_plugin.megatron.patches.batch:slice_batch")
def sliced_in_zigzag(slice_batch: Any, tensors: dict[str, Any], cp: Any) -> dict[str, Any]:
    whole = {key: value for key, value in tensors.items() if key != "tokens"}
    return slice_batch(whole, cp) | {"tokens": cp.shard(tensors["tokens"], 1)}


@instead("cp_plugin.megatron.mixers.mamba:orders")
def states_as_if_in_zigzag(_: Any, batch: Any, device: Any) -> Any:
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.mixers import mamba

    cp = runtime.context_parallel()
    return mamba._orders_in(cp.layout, cp.numbers, batch.tokens, device)


@instead("megatron.core.models.hybrid.hybrid_model:HybridModel.__init__")
def configured_otherwise(init: Any, model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    config.linear_cp_layout = "contiguous"
    init(model, config, *args, **kwargs)


ZIGZAG = "ring --cp-layout zigzag --hybrid-layer-pattern"
DELTA_NET = f"{ZIGZAG} G* {STATES} --linear-cp-layout contiguous"


@pytest.mark.skipif(
    find_spec("megatron.core.context_parallel") is None,
    reason="this megatron-core has no layout manager, which came to Megatron-LM with #6764 and #6776",
)
@pytest.mark.parametrize(
    ("plant", "flags", "message"),
    [
        (not_converted, DELTA_NET, "layout manager hands them to attention differs"),
        (sliced_in_zigzag, DELTA_NET, "tokens differ"),
        (states_as_if_in_zigzag, DELTA_NET, "the order of tokens in Mamba and gated delta net layers differs"),
        (configured_otherwise, f"{ZIGZAG} *-", "has linear_cp_layout 'contiguous', but the command line does not"),
        (
            None,
            "striped --hybrid-layer-pattern *- --attention-cp-layout contiguous",
            "--cp-layout sets the layout of attention",
        ),
    ],
)
def test_faults_and_flags_that_contradict_the_layout_are_named(
    plant: Callable[[], None] | None, flags: str, message: str
) -> None:
    with pytest.raises(RankError, match=message):
        train(2, f"--context-parallel-size 2 --cp-provider {flags}", prepare=plant)
