"""Random command lines, from the flags, choices and numbers that the parsers declare."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import training
from hypothesis import strategies as st

from cp_plugin.engine.methods import registry as providers

NUMBERS = ("1", "2", "4", "8", "64")
ODD = ("0", "-1", "1e3", "2.5", "", " ", "auto", "none", "4x", "0x2", "04", "¾", "٣", "9" * 30, "nan", "inf", "1e-300")
NAMES: Mapping[str, Sequence[str]] = {
    "provider": (*providers.names(), *providers.names("linear")),
    "linear-provider": providers.names("linear"),
    "layout": ("contiguous", "zigzag", "striped", "documents"),
    "backend": ("auto", "sdpa", "reference", "triton"),
    "grid": ("2x2", "1x4", "4x1", "2x4"),
    "cluster": ("dgx-h100", "dgx-a100", "none.toml"),
    "linear-attention": ("basic", "gla", "rebased"),
    "layer-pattern": ("L", "LLN", "N"),
    "fp8": ("off", "comm", "compute"),
    "backward": ("kv", "q"),
    "selfcheck": ("once", "off"),
    "device": ("auto", "cpu", "cuda"),
    "window-size": ("4,0", "(4,0)", "(4"),
    "spec": ("local", "x y"),
    "hybrid-layer-pattern": ("M*-M*-", "*-", "M*E/M*", "M*|GM*-"),
}
"""Usual values of flags for which no choices are declared."""
NAMED = ("moe-router-topk", "log-interval", "eval-iters", "data-path")
OFTEN = (
    *(*NAMED, "eval-interval", "train-iters", "micro-batch-size", "global-batch-size", "seq-length"),
    *("tensor-model-parallel-size", "pipeline-model-parallel-size", "bf16", "fp16"),
    *("window-size", "softmax-type", "recompute-granularity", "recompute-num-layers", "sequence-parallel", "sft"),
    *("moe-router-load-balancing-type", "attention-dropout", "mtp-num-layers", "dataloader-inter-document-masking"),
    *("eod-mask-loss", "calculate-per-token-loss", "optimizer", "use-distributed-optimizer"),
)
"""Megatron's flags that are drawn most often, and more often than all others together."""
Flags = dict[str, st.SearchStrategy[str | None]]


def value(flag: str, choices: Sequence[Any] = (), usual: Sequence[str] = NUMBERS) -> st.SearchStrategy[str]:
    """Mostly a usual one."""
    own = NAMES.get(flag.removeprefix("--").removeprefix("cp-"), usual)
    some = st.sampled_from([*map(str, choices)] or own)
    odd = (st.sampled_from(ODD), st.text(st.characters(exclude_categories=["C", "Z"]), max_size=4))
    return st.integers(0, 39).flatmap(lambda n: odd[n] if n < len(odd) else some)


def some(flags: Flags, most: int) -> st.SearchStrategy[dict[str, str | None]]:
    """Some of the flags, each with a value; None for a switch."""
    chosen = st.lists(st.sampled_from(sorted(flags)), unique=True, max_size=most)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: flags[name] for name in names}))


def spelled(values: Mapping[str, str | None]) -> list[str]:
    return [flag if text is None else f"{flag}={text}" for flag, text in values.items()]


def read_flags(parser: argparse.ArgumentParser) -> Flags:
    """What a parser declares, by the first name of each flag."""
    usual = {float: ("0.1", "1", "0"), str: ("x", "local"), None: ("x", "/none/x")}
    return {
        action.option_strings[0]: st.none()
        if action.nargs == 0
        else value(action.option_strings[0], action.choices or (), usual.get(action.type, (*NUMBERS, "0")))
        for action in parser._actions
        if action.option_strings and not isinstance(action, argparse._HelpAction)
    }


@cache
def plugin_parser() -> argparse.ArgumentParser:
    from cp_plugin.megatron.flags import args

    return args.add_arguments(argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False))


@st.composite
def plugin_flags(draw: st.DrawFn) -> tuple[list[str], int]:
    flags = read_flags(plugin_parser())
    chosen = draw(some(flags, 3))
    if draw(st.integers(0, 7)):
        chosen = {"--cp-provider": draw(flags["--cp-provider"])} | chosen
    return spelled(chosen), draw(st.integers(1, 16))


BASE = shlex.split(f"{training.MODEL} {training.DATA} {training.SGD} --train-iters 1 --attention-backend unfused")


@cache
def megatron_flags() -> tuple[Flags, Flags]:
    """Those that are drawn often, and all others."""
    from megatron.training.arguments import add_megatron_arguments

    flags = read_flags(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    flags |= read_flags(plugin_parser())
    often = {flag: flags[flag] for name in OFTEN if (flag := f"--{name}") in flags}
    often |= {flag: x for flag, x in flags.items() if flag.startswith("--cp-")}
    return often, {flag: x for flag, x in flags.items() if flag not in often}


@st.composite
def trainings(draw: st.DrawFn) -> list[str]:
    """A command line: the usual one without a flag, and with others."""
    often, rest = megatron_flags()
    words = [word for word in BASE if word.startswith("--")]
    gone = set(draw(st.lists(st.sampled_from([*words, *["--mock-data", "--eval-interval"] * 9]), max_size=1)))
    kept, skipping = [], False
    for word in BASE:
        skipping = word in gone if word.startswith("--") else skipping
        kept += [] if skipping else [word]
    experts = ["--num-experts", "4", "--moe-router-topk", "2"] if draw(st.booleans()) else []
    chosen = draw(some({f"--{name}": often[f"--{name}"] for name in NAMED}, 1)) | draw(some(often, 2))
    chosen |= draw(some(rest, 2)) if draw(st.booleans()) else {}
    chosen = {"--context-parallel-size": "2", "--cp-provider": draw(st.sampled_from(providers.names()))} | chosen
    return [*kept, *experts, *spelled(chosen)]
