"""The checked command line of ``cp-plugin bench``: contestants and cases."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import psutil
import torch

from cp_plugin.cli.bench.cases import PATTERNS, Case, make_case
from cp_plugin.cli.bench.contestants import PEERS, Entry
from cp_plugin.cli.flags import check_decay
from cp_plugin.comm import network_between
from cp_plugin.core.problem import Problem
from cp_plugin.methods import registry as providers
from cp_plugin.methods.protocol import Kind
from cp_plugin.testing.machine import refuse_too_large

TYPICAL: Mapping[str, Mapping[str, Any]] = {
    "cpu": {"heads": 8, "kv_heads": 4, "head_dim": 64, "dtype": torch.float32},
    "cuda": {"heads": 64, "kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16},
}
"""Device -> fields of a ``Problem``: LongCA-bench's on CUDA, smaller ones on the CPU."""
TOKENS = {"cpu": 256, "cuda": 8192}
"""Per rank, by default."""


def contestants(texts: Sequence[str], device: str) -> tuple[list[Entry], dict[str, str]]:
    """The named contestants, or all softmax providers and installed peers; and why peers are missing.

    Raises:
        ValueError: for unknown or repeated names, or softmax and linear attention together.
    """
    entries = [Entry.parse(text) for text in texts or (*providers.names(), *PEERS)]
    missing = {} if texts else {str(e): reason for e in entries if (reason := e.missing(device)) is not None}
    entries = [entry for entry in entries if str(entry) not in missing]
    listed = ", ".join(map(str, entries))
    if len(set(entries)) < len(entries):
        raise ValueError(f"--provider: name every contestant only once, not {listed}")
    if len({entry.kind for entry in entries}) > 1:
        raise ValueError(f"--provider: bench softmax and linear attention separately, not together: {listed}")
    return entries, missing


def typical(device: str, **given: Any) -> Problem:
    """The attention call to measure, without a length or a mask.

    Args:
        given: fields of a ``Problem``; None is the typical value, of ``kv_heads`` the given number of heads.

    Raises:
        ValueError: for heads that do not fit each other.
    """
    if given["kv_heads"] is None:
        given["kv_heads"] = given["heads"]
    chosen = {name: value for name, value in given.items() if value is not None}
    return Problem(**{"network": network_between(device), **TYPICAL[device], **chosen})


def each_length(problem: Problem, lengths: Sequence[int], device: str) -> list[Problem]:
    """The problem with each number of tokens, shortest first; ValueError for one that some layout cannot divide.

    Args:
        lengths: global tokens; empty: the default of the device.
    """
    chosen = sorted(set(lengths)) or [problem.size * TOKENS[device]]
    for length in chosen:
        _check_length(length, problem.size)
    return [replace(problem, seq_length=length) for length in chosen]


def make_cases(
    problems: Sequence[Problem],
    kind: Kind,
    masks: Sequence[str],
    *,
    window: int | None,
    distribution: str | None,
    seed: int,
) -> list[Case]:
    """Every mask on every problem.

    Args:
        masks: empty: all, without windows for linear attention, which has none.

    Raises:
        ValueError: for an unknown mask or distribution, or a flag that does nothing.
    """
    check_decay(problems[0].decay, {kind})
    known = [name for name, pattern in PATTERNS.items() if kind == "softmax" or not pattern.windowed]
    masks = list(dict.fromkeys(masks or known))
    how = {"window": window, "distribution": distribution, "seed": seed}
    found = [make_case(name, problem, **how) for problem in problems for name in masks]
    for flag, value, used in (
        ("--window", window, any(PATTERNS[name].windowed for name in masks)),
        ("--distribution", distribution, any(PATTERNS[name].packed for name in masks)),
    ):
        if value is not None and not used:
            raise ValueError(f"{flag} {value} has no effect with --mask {', '.join(masks)}: leave it out")
    return found


def check_size(found: Sequence[Case], device: str) -> None:
    """ValueError for a case that is too large for this machine's CPU ranks."""
    for case in found if device == "cpu" else ():
        if len(set(case.problem.hosts)) == 1:
            refuse_too_large(case.problem, runs=1)


def in_words(device: str) -> str:
    """The device by name."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{psutil.cpu_count(logical=False) or os.cpu_count()} CPU cores"


def _check_length(length: int, size: int) -> None:
    divisor = 2 * size if size > 1 else 1
    if length % divisor:
        below = length // divisor * divisor
        near = f"{below} or {below + divisor}" if below else f"{divisor}"
        raise ValueError(
            f"--seq-length {length} cannot be split evenly across {size} ranks in every layout: use a multiple of "
            f"{divisor}, such as {near}"
        )
