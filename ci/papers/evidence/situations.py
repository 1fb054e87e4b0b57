"""Recommended methods for typical clusters and models: the table of ``docs/choose.md``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cp_plugin.planner.machine.hardware import cluster
from cp_plugin.planner.price import Priced
from cp_plugin.planner.search import KNOWN, KNOWN_ERROR, Plan, plan
from cp_plugin.planner.training.footprint import footprint
from cp_plugin.planner.training.model import model
from cp_plugin.planner.training.parallel import Parallel

KEPT = ("layernorm", "mlp")
"""``--recompute-modules`` with which stock Megatron drops most of a layer but keeps attention's output."""


def all_share_one(devices: int, tokens: int, tensor: int = 1) -> Parallel:
    """One sequence over all devices, full recomputation."""
    return Parallel(
        devices=devices,
        tensor=tensor,
        sequence_parallel=tensor > 1,
        context=devices // tensor,
        seq_length=tokens,
        recompute="full",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A training whose length needs context parallelism."""

    model: str
    cluster: str
    devices: int
    tokens: int
    tensor: int = 1

    @property
    def shape(self) -> Parallel:
        return all_share_one(self.devices, self.tokens, self.tensor)

    def plan(self) -> Plan:
        """The plan, with every method simulated."""
        return plan(model(self.model), [self.shape], cluster(self.cluster), hopeless=math.inf)

    @property
    def keeps(self) -> bool:
        """Whether stock Megatron has the memory to recompute without repeating attention."""
        selective = replace(self.shape, recompute="selective", recompute_modules=KEPT)
        return footprint(model(self.model), selective).total <= cluster(self.cluster).device.memory_bytes


SITUATIONS = (
    Situation(model="llama3-8b", cluster="h200", devices=8, tokens=2**18),
    Situation(model="llama3-8b", cluster="dgx-h100", devices=64, tokens=2**20),
    Situation(model="llama2-7b", cluster="dgx-h100", devices=64, tokens=2**20),
    Situation(model="llama3-70b", cluster="dgx-h100", devices=256, tensor=8, tokens=2**20),
    Situation(model="llama3-8b", cluster="h100-1-per-node", devices=64, tokens=2**18),
    Situation(model="llama2-7b", cluster="h100-1-per-node", devices=64, tokens=2**18),
    Situation(model="llama2-7b", cluster="a100-4-per-node", devices=64, tokens=2**17),
    Situation(model="llama2-7b", cluster="a100-pcie-roce", devices=32, tokens=2**18),
)


def table() -> str:
    """The table in Markdown, with a note."""
    head = "| model | devices | tokens | method | flags | upstream's best | upstream `p2p` |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *map(row, SITUATIONS), "", _NOTE])


_NOTE = f"""Predicted, ratios {KNOWN}: half of the published pairs of methods are predicted within that. Of methods
within {KNOWN_ERROR:.0%} of each other, a tie, the one that sends fewest bytes is shown. The first figure includes the
attention and messages that stock Megatron repeats under full recomputation; the second leaves them out, method against
method.
Stock Megatron keeps attention's output with `--recompute-granularity selective --recompute-modules {" ".join(KEPT)}`,
where that fits the memory; in rows with a † it does not."""


def row(situation: Situation) -> str:
    found = situation.plan()
    best = found.best
    upstream = [p for p in found.found if p.candidate.upstream]
    p2p = [p for p in upstream if p.candidate.name == "upstream p2p"]
    tensor = f", tensor {situation.tensor}" if situation.tensor > 1 else ""
    beside = (f"{_slower(some, best)}{'' if situation.keeps else ' †'}" for some in (upstream, p2p))
    return (
        f"| {situation.model} | {situation.devices} x {found.cluster.device.name}, {found.cluster.per_node} a node"
        f"{tensor} | {situation.tokens // 1024}k | `{best.candidate.name}` | `{best.candidate.flags}` | "
        f"{' | '.join(beside)} |"
    )


def _slower(some: list[Priced], best: Priced) -> str:
    """Time of the fastest over ``best``, with and without repeated attention: ``1.27x (`a2a`); 1.02x (`a2a`)``."""
    found = []
    for seconds in (lambda p: p.iteration.seconds, lambda p: p.without_repeats):
        fastest = min(some, key=seconds)
        name = f" (`{fastest.candidate.name.removeprefix('upstream ')}`)" if len(some) > 1 else ""
        found.append(f"{seconds(fastest) / best.iteration.seconds:.2f}x{name}")
    return "; ".join(found)
