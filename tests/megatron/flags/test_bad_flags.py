"""Refused command lines (``bad_flags.toml``) through Megatron's own parser and validation."""

from __future__ import annotations

import argparse
import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from rule_examples import flags_parser

from cp_plugin.megatron.flags.args import flags_of

REFUSED = tomllib.loads(Path(__file__).with_name("bad_flags.toml").read_text())
CASES = {f"{begin} {rest}".strip(): said for begin, table in REFUSED.items() for rest, said in table.items()}


@pytest.fixture
def refused(validated: Callable[..., argparse.Namespace], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """``refused(flags)``: the message; only the start-up hooks have been patched by then."""
    from cp_plugin.megatron.patches import hooks, patching

    def message(flags: str) -> str:
        of_megatron = {word for word in flags.split() if word.startswith("--") and not word.startswith("--cp-")}
        if missing := sorted(of_megatron.difference(flags_of(flags_parser()))):
            pytest.skip(f"this megatron-core has no {', '.join(missing)}")
        if "fsdp" in flags:
            monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # required by Megatron
        sizes = re.findall(r"--(?:context-parallel|tensor-model-parallel|pipeline-model-parallel)-size (\d+)", flags)
        with pytest.raises(ValueError) as raised:
            validated(flags, ranks=max(4, math.prod(map(int, sizes))), without=_instead(flags))
        assert patching.installed() == [patch.target for patch in hooks.START_UP], "nothing else was replaced"
        return str(raised.value)

    return message


def _instead(flags: str) -> str:
    """The part of the usual flags that conflicts."""
    if "--multi-latent-attention" in flags:
        return "--group-query-attention --num-query-groups 2 "
    if "auto --hybrid" in flags:
        return "--num-layers 2"
    return "--seq-length 64" if "auto" in flags and "--seq-length" in flags else ""


@pytest.mark.parametrize("flags", CASES, ids=str)
def test_bad_input(refused: Callable[[str], str], flags: str) -> None:
    assert re.search(CASES[flags], said := refused(flags)), said
