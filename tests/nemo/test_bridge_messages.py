"""Refusals of ``apply`` in terms of the config, and configs that it leaves alone."""

from __future__ import annotations

import copy
from functools import reduce
from typing import Any

import pytest
from bridge_harness import recipe

from cp_plugin.testing.launch import run_ranks

STRIPED = {"provider": "striped"}


ARGUMENTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"provider": "stiped"}, "provider stiped: did you mean striped? Choose one of"),
    ({"provider": "auto", "cluster": "moon"}, "provider auto: cluster moon"),
    ({"provider": "striped", "cluster": "dgx-h100"}, "cluster dgx-h100 has no effect: only provider auto uses it"),
    ({"layer_pattern": "LN"}, "layer_pattern LN has no effect without linear_attention"),
    (
        {"linear_attention": "gla", "layer_pattern": "LLLN"},
        "4 letters, which does not divide config.model.num_layers 2",
    ),
    ({"linear_attention": "gla", "provider": "ring"}, "all layers of layer_pattern L are linear"),
    ({"provider": "attention2d", "grid": "2x3"}, "grid 2x3 does not hold 2 context-parallel ranks"),
    ({"provider": "striped", "grid": [2, 1]}, "grid 2x1 has no effect with provider striped"),
    ({"provider": "upstream", "layout": "striped"}, "layout has no effect with provider upstream"),
    ({"provider": "upstream"}, "config.model.context_parallel_size 2 on the CPU needs provider"),
    ({"provider": "striped", "selfcheck": "twice"}, "selfcheck twice: choose one of once, strict, off"),
    ({"provider": "striped", "check_every": -1}, "check_every -1: write a number of iterations"),
    ({"provider": "upstream", "check_every": 100}, "check_every has no effect with provider upstream"),
    ({"provider": "striped", "layout": "spiral"}, "spiral"),
)
FIELDS: tuple[tuple[str, Any, str], ...] = (
    ("model.attention_dropout", 0.1, "config.model.attention_dropout 0.1: all context-parallel ranks"),
    ("model.cp_comm_type", "a2a", "config.model.cp_comm_type a2a: it selects one of Transformer Engine's"),
    ("model.cuda_graph_impl", "local", "config.model.cuda_graph_impl local: it captures whole layers"),
    ("model.context_parallel_size", 1, "needs config.model.context_parallel_size 2 or more, got 1"),
    ("dataset.inter_document_masking", True, "config.dataset.inter_document_masking = True: Bridge reads"),
    ("dataset.reset_position_ids", True, "config.dataset.reset_position_ids"),
)
CASES = [
    *((arguments, "model.context_parallel_size", 2, part) for arguments, part in ARGUMENTS),
    *((STRIPED, *field) for field in FIELDS),
]
"""``tests/megatron/flags/test_refusals.py`` has the others."""


def _answer(arguments: dict[str, Any], path: str, value: Any) -> str:
    from cp_plugin import nemo

    config = recipe({"context_parallel_size": 2})
    *parents, name = path.split(".")
    setattr(reduce(getattr, parents, config), name, value)
    try:
        nemo.apply(config, **arguments)
    except ValueError as error:
        return str(error)
    return "it was accepted"


def test_arguments_and_fields_of_the_config() -> None:
    """In a process of their own."""
    answers = run_ranks(lambda: [_answer(*case) for *case, _ in CASES], 1)[0]
    for (arguments, *_, part), text in zip(CASES, answers, strict=True):
        assert part in text and (arguments == STRIPED or "--cp-" not in text), text


def test_what_apply_sets_and_leaves() -> None:
    def apply() -> list[str]:
        from cp_plugin import nemo
        from cp_plugin.megatron.patches import patching
        from cp_plugin.nemo import cpu

        config = recipe()
        cpu.prepare(config)
        before = copy.deepcopy(vars(config.model))
        nemo.apply(config)
        assert vars(config.model) == before, "upstream leaves everything"
        replaced = [target for target in patching.installed() if "bridge" in target or "get_batch" in target]
        config = recipe({"context_parallel_size": 2})
        assert nemo.apply(config, **STRIPED) is config
        assert config.model.calculate_per_token_loss and config.model.cp_comm_type is None
        assert config.dataset.skip_getting_attention_mask_from_dataset and not config.ddp.average_in_collective
        return replaced

    assert run_ranks(apply, 1)[0] == []


def test_a_release_that_was_not_tested() -> None:
    from cp_plugin.nemo import api

    with pytest.raises(
        ValueError, match=r"megatron-bridge 0\.7\.0 was not tested .*>=0\.6\.2,<0\.6\.3.*allow_untested"
    ):
        api.check_release("0.7.0", allow_untested=False)
    api.check_release("0.7.0", allow_untested=True)
    api.check_release(api.bridge_version(), allow_untested=False)
