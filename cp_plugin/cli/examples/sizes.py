"""Numbers of GPUs that an example can use."""

from __future__ import annotations

from dataclasses import replace

from cp_plugin.attention.setups import settled_or_reason
from cp_plugin.cli.examples.command import CONTEXT, Changes, Command, command
from cp_plugin.cli.examples.config import Example
from cp_plugin.common.names import one_of
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.linear.variants import feature_dim, variants
from cp_plugin.methods import registry as providers

MOST = 10**6
"""GPUs or ranks: shapes are found by trying all factors."""
_OFFERED = 6
"""Sizes listed in a refusal."""


def usable(
    example: Example, variant: str | None = None, seq_length: int | None = None, changes: Changes | None = None
) -> Command:
    """As ``command``; for GPUs over which the example cannot be divided, the ValueError lists sizes that fit."""
    changes = changes or Changes()
    if changes.nodes is None and changes.per_node is None:
        return command(example, variant, seq_length, changes)
    cluster = example.experiment(variant).cluster
    nodes, per_node = changes.nodes or cluster.nodes, changes.per_node or cluster.per_node
    if nodes * per_node > MOST:
        raise ValueError(f"--nodes {nodes} --per-node {per_node}: give at most {MOST:,} GPUs")
    anywhere = replace(changes.options, grid=None, head_parallel=None, intra_size=None)
    command(example, variant, seq_length, replace(changes, nodes=None, per_node=None, options=anywhere))  # as published
    try:
        found = command(example, variant, seq_length, changes)
        reason = refusal(found)
    except ValueError as error:
        reason = str(error)
    if reason is None:
        return found
    lines = [f"  {_described(one)}" for one in _near(example, variant, seq_length, changes, nodes * per_node)]
    heading = ["sizes that fit:"] if lines else []
    raise ValueError("\n".join([f"--nodes {nodes} --per-node {per_node}: {reason}", *heading, *lines]))


def refusal(of: Command) -> str | None:
    """Why the context-parallel ranks cannot run the attention, or None."""
    ranks = of.size(CONTEXT)
    if ranks < 2 and of.value("cp-provider") not in (None, "upstream"):
        return f"--{CONTEXT} {ranks}: there is nothing to split; use 2 or more"
    heads = of.size("num-attention-heads") // of.size("tensor-model-parallel-size")
    groups = of.value("num-query-groups", None)
    dim = of.value("kv-channels") or of.size("hidden-size") // of.size("num-attention-heads")
    its = Problem(
        size=ranks,
        heads=heads,
        kv_heads=max(1, int(str(groups)) // of.size("tensor-model-parallel-size")) if groups else heads,
        head_dim=int(str(dim)),
        seq_length=of.seq_length,
    )
    kind = of.value("cp-linear-attention")
    reasons = []
    if kind:
        one_of("--cp-linear-attention", str(kind), list(variants()))
        variant = variants()[str(kind)]
        linear = replace(its, head_dim=feature_dim(variant, its.head_dim), decay=variant.decay)
        reasons.append(
            settled_or_reason(providers.get(str(of.value("cp-linear-provider", "lasp2"))), linear, Options())
        )
    softmax = of.value("cp-provider")
    if softmax not in (None, "upstream", "auto"):
        reasons.append(settled_or_reason(providers.get(str(softmax)), its, options_of(of)))
    return next((setup.reason for setup in reasons if setup.reason is not None), None)


def options_of(of: Command) -> Options:
    """The options of the method in the flags."""
    given = {option: of.value(option.flag.removeprefix("--")) for option in providers.registry().options.values()}
    return Options(**{option: option.parse(str(value)) for option, value in given.items() if value is not None})


def _near(
    example: Example, variant: str | None, seq_length: int | None, changes: Changes, devices: int
) -> list[Command]:
    """The usable sizes closest to this many GPUs, in ascending order."""
    cluster = example.experiment(variant).cluster
    found: dict[int, Command] = {}
    for per_node in dict.fromkeys([changes.per_node or cluster.per_node, cluster.per_node]):
        most = min(1024, 2 * max(cluster.nodes, changes.nodes or 1))
        for nodes in (n for n in range(1, most + 1) if n <= 16 or n % 8 == 0):
            try:
                one = command(example, variant, seq_length, replace(changes, nodes=nodes, per_node=per_node))
            except ValueError:
                continue
            if refusal(one) is None:
                found.setdefault(one.devices, one)
    nearest = sorted(found, key=lambda n: (abs(n - devices), n))[:_OFFERED]
    return [found[n] for n in sorted(nearest)]


def _described(one: Command) -> str:
    names = ("cp-grid", "cp-head-parallel", "cp-intra-size")
    shape = "".join(f", {n.removeprefix('cp-').replace('-', ' ')} {one.value(n)}" for n in names if one.value(n))
    tokens = one.seq_length // one.size(CONTEXT)
    return (
        f"--nodes {one.nodes} --per-node {one.per_node}: context {one.size(CONTEXT)}{shape}, {tokens:,} tokens per GPU"
    )
