"""The ``cp-plugin bench`` command, and its contestants and cases."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import psutil
import torch
import typer

from cp_plugin.engine.comm import network_between
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.protocol import Kind
from cp_plugin.planner.machine import hardware
from cp_plugin.testing import ranks as started
from cp_plugin.testing.ranks import refuse_too_large
from cp_plugin.tools import flags, output
from cp_plugin.tools.bench import run
from cp_plugin.tools.bench.cases import MASKS, PACKED, WINDOWED, with_mask
from cp_plugin.tools.bench.contestants import PEERS, Entry
from cp_plugin.tools.bench.report import Processors, Report
from cp_plugin.tools.output import new_console

TYPICAL: dict[str, dict[str, Any]] = {
    "cpu": {"heads": 8, "kv_heads": 4, "head_dim": 64, "dtype": torch.float32},
    "cuda": {"heads": 64, "kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16},
}
"""Device -> fields of a ``Problem``: LongCA-bench's on CUDA, smaller ones on the CPU."""
TOKENS = {"cpu": 256, "cuda": 8192}
"""Per rank, by default."""
CONVERSATIONS = 2**15
"""Tokens of conversations in the default pack, at least; on a shorter sequence all lengths shrink in proportion."""


def bench(
    provider: Annotated[
        list[str] | None,
        typer.Option(
            "--provider",
            metavar="NAME",
            help="a method, or another library's: torch-ring, te-p2p, te-all_gather, te-a2a, te-a2a+p2p; with options "
            "as in attention2d:grid=4x2; repeatable; default: all for softmax attention",
        ),
    ] = None,
    mask: Annotated[
        list[str] | None,
        typer.Option(
            "--mask", metavar="NAME", help=f"{', '.join(MASKS[:-1])} or {MASKS[-1]}; repeatable; default: all"
        ),
    ] = None,
    seq_length: Annotated[
        list[int] | None,
        typer.Option(
            "--seq-length", min=1, help="tokens of one sequence; repeatable; default: 8192 per rank, 256 on the CPU"
        ),
    ] = None,
    ranks: flags.ForkedRanks = None,
    device: flags.Devices = flags.Device.auto,
    dtype: Annotated[
        flags.Dtype | None, typer.Option(help="element type of q, k and v; default: bfloat16, float32 on the CPU")
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(min=1, help="query heads of the model per tensor-parallel rank; default: 64, 8 on the CPU"),
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="key/value heads per tensor-parallel rank; default: 8, 4 on the CPU")
    ] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="size of a head; default: 128, 64 on the CPU")] = None,
    v_head_dim: flags.ValueDim = None,
    batch: Annotated[int, typer.Option(min=1, help="sequences per batch")] = 1,
    window: Annotated[
        int | None,
        typer.Option(min=1, help="sliding window in tokens; default: 1024, at most an eighth of the sequence"),
    ] = None,
    documents: flags.Documents = None,
    decay: Annotated[flags.Decays, typer.Option(help="granularity of linear attention's decay")] = (flags.Decays.none),
    rounds: Annotated[int, typer.Option(min=1, help="timed calls per provider")] = 5,
    timeout: flags.Timeout = 3600,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="also predict the times for this cluster, packaged or a .toml file"),
    ] = None,
    as_json: output.AsJson = False,
) -> None:
    """Time providers, and the context parallelism of other libraries, on real ranks; each is checked first.

    Starts ranks on this machine. To bench several machines, start it with torchrun on each of them:

    torchrun --nproc-per-node 8 --no-python cp-plugin bench
    """
    with flags.errors_in_one_line():
        where, size = flags.device_name(device), started.number_of_ranks(ranks)
        sizes = {"heads": heads, "kv_heads": heads if kv_heads is None else kv_heads, "head_dim": head_dim}
        sizes |= {"v_head_dim": v_head_dim, "dtype": dtype and flags.torch_dtype(dtype)}
        chosen = TYPICAL[where] | {name: value for name, value in sizes.items() if value is not None}
        problem = Problem(size=size, batch=batch, decay=decay.value, **chosen)
        problem = problem.with_transport(network=network_between(where))
        profile = None if cluster is None else hardware.cluster(cluster)
        entries, left_out = _contestants(provider or (), where)
        lengths = _each_length(problem, seq_length or (), where)
        problems = _each_mask(lengths, entries[0].kind, mask or (), window, documents)
        own_device, hosts = started.start(where, size), started.hosts(size)
        problems = [problem.with_transport(hosts=hosts) for problem in problems]
        for problem in problems if where == "cpu" and len(set(hosts)) == 1 else ():
            refuse_too_large(problem, runs=1)
        plans = [run.plan(problem, entries, where, profile) for problem in problems]
        processors, cores = Processors(), psutil.cpu_count(logical=False) or os.cpu_count()
        report = Report(
            results=run.bench(plans, where, rounds, timeout, own_device),
            device=torch.cuda.get_device_name() if where == "cuda" else f"{cores} CPU cores",
            rounds=rounds,
            cluster=cluster,
            left_out=left_out,
            others=processors.others() if own_device is None and where == "cpu" else 0.0,
        )
    if started.is_first():
        output.show(as_json, report.as_json, lambda: report.print(new_console()))
        output.verdict(report.ok, report.verdict, as_json)
    elif not report.ok:
        raise typer.Exit(1)


def _contestants(texts: Sequence[str], device: str) -> tuple[list[Entry], dict[str, str]]:
    """The named contestants, or all softmax providers and installed peers; and why peers are missing. ValueError for
    unknown or repeated names, or softmax and linear attention together."""
    entries = [Entry.parse(text) for text in texts or (*providers.names(), *PEERS)]
    missing = {} if texts else {str(e): reason for e in entries if (reason := e.missing(device)) is not None}
    entries = [entry for entry in entries if str(entry) not in missing]
    listed = ", ".join(map(str, entries))
    if len(set(entries)) < len(entries):
        raise ValueError(f"--provider: name every contestant only once, not {listed}")
    if len({entry.kind for entry in entries}) > 1:
        raise ValueError(f"--provider: bench softmax and linear attention separately, not together: {listed}")
    return entries, missing


def _each_length(problem: Problem, lengths: Sequence[int], device: str) -> list[Problem]:
    """The problem with each number of tokens, shortest first; ValueError for one that some layout cannot divide.

    lengths: global tokens; empty: the default of the device.
    """
    chosen, size = sorted(set(lengths)) or [problem.size * TOKENS[device]], problem.size
    divisor = 2 * size if size > 1 else 1
    for length in (length for length in chosen if length % divisor):
        below = length // divisor * divisor
        near = f"{below} or {below + divisor}" if below else f"{divisor}"
        raise ValueError(
            f"--seq-length {length} cannot be split evenly across {size} ranks in every layout: use a multiple of "
            f"{divisor}, such as {near}"
        )
    return [replace(problem, seq_length=length) for length in chosen]


def _each_mask(
    problems: Sequence[Problem], kind: Kind, masks: Sequence[str], window: int | None, documents: str | None
) -> list[Problem]:
    """Every mask on every problem; ValueError for an unknown mask, wrong documents, or a flag that does nothing.

    masks: empty: all, without windows for linear attention, which has none.
    """
    flags.check_decay(problems[0].decay, {kind})
    masks = list(dict.fromkeys(masks or [name for name in MASKS if kind == "softmax" or name != WINDOWED]))
    for flag, value, mask in (("--window", window, WINDOWED), ("--documents", documents, PACKED)):
        if value is not None and mask not in masks:
            raise ValueError(f"{flag} {value} has no effect with --mask {', '.join(masks)}: leave it out")
    packed = [_bounds(documents, problem.seq_length) for problem in problems]
    each = zip(problems, packed, strict=True)
    return [with_mask(name, problem, window=window, bounds=bounds) for problem, bounds in each for name in masks]


def _bounds(documents: str | None, tokens: int) -> tuple[int, ...]:
    """Return where the documents begin, and the number of tokens."""
    if documents is not None:
        return flags.bounds(documents, tokens)
    whole = max(tokens, CONVERSATIONS)
    return tuple(dict.fromkeys(b * tokens // whole for b in flags.bounds("chat", whole)))
