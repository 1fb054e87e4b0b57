"""Refused command lines (``bad_flags.toml``) through Megatron's own parser and validation."""

from __future__ import annotations

import argparse
import functools
import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

REFUSED = tomllib.loads(Path(__file__).with_name("bad_flags.toml").read_text())
CASES = {f"{begin} {rest}".strip(): said for begin, table in REFUSED.items() for rest, said in table.items()}


@pytest.fixture
def refused(validated: Callable[..., argparse.Namespace], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """``refused(flags)``: the message; only the start-up hooks have been patched by then."""
    from cp_plugin.megatron.patches import hooks, patching

    def message(flags: str) -> str:
        of_megatron = {word for word in flags.split() if word.startswith("--") and not word.startswith("--cp-")}
        if missing := sorted(of_megatron - _known()):
            pytest.skip(f"this megatron-core has no {', '.join(missing)}")
        if "fsdp" in flags:
            monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # required by Megatron
        sizes = re.findall(r"--(?:context-parallel|tensor-model-parallel|pipeline-model-parallel)-size (\d+)", flags)
        with pytest.raises(ValueError) as raised:
            validated(flags, ranks=max(4, math.prod(map(int, sizes))), without=_instead(flags))
        assert patching.installed() == [patch.target for patch in hooks.START_UP], "nothing else was replaced"
        return str(raised.value)

    return message


@functools.cache
def _known() -> set[str]:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return {option for action in parser._actions for option in action.option_strings}


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
