"""Which method should I use? The planner's answer for typical clusters and models, as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cp_plugin.planner.hardware import cluster
from cp_plugin.planner.model import model
from cp_plugin.planner.parallel import Parallel
from cp_plugin.planner.search import Plan, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A training, with the context parallelism that its length asks for."""

    model: str
    cluster: str
    devices: int
    tokens: int
    tensor: int = 1

    def plan(self) -> Plan:
        """The planner's answer."""
        shape = Parallel(
            devices=self.devices,
            tensor=self.tensor,
            sequence_parallel=self.tensor > 1,
            context=self.devices // self.tensor,
            seq_length=self.tokens,
            recompute="full",
        )
        return plan(model(self.model), [shape], cluster(self.cluster))


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
    """In Markdown: a row for each situation."""
    head = "| model | devices | tokens | fastest | flags | upstream's best | upstream `p2p` |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *_rows()])


def _rows() -> Iterator[str]:
    for situation in SITUATIONS:
        found = situation.plan()
        best = found.best
        upstream = {p.candidate.name: p.iteration.seconds for p in found.found if p.candidate.upstream}
        upstream |= {lost.name: lost.seconds for lost in found.lost if lost.name.startswith("upstream")}
        slower = {name.removeprefix("upstream "): s / best.iteration.seconds for name, s in upstream.items()}
        other = min(slower, key=lambda name: slower[name])
        tensor = f", tensor {situation.tensor}" if situation.tensor > 1 else ""
        yield (
            f"| {situation.model} | {situation.devices} x {found.cluster.device.name}, {found.cluster.per_node} a node"
            f"{tensor} | {situation.tokens // 1024}k | `{best.candidate.name}` | `{best.candidate.flags}` | "
            f"{slower[other]:.2f}x (`{other}`) | {slower['p2p']:.2f}x |"
        )
