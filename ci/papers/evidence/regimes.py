"""Comparison with stock Megatron by regime, for ``docs/wins.md`` and the README.

The answer to an example is that of ``cp-plugin plan``: the simplest of what ties, stock Megatron first, each side in
its own best shape and recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from cp_plugin.engine.core.problem import Fp8
from cp_plugin.planner import search
from cp_plugin.planner.candidates import STOCK
from cp_plugin.planner.errors import off_by, tie, typical_error
from cp_plugin.planner.explain import Gain, gain
from cp_plugin.planner.machine.hardware import cluster, override
from cp_plugin.planner.price import Priced
from cp_plugin.planner.query import Fixed, Query, from_name, keep_fitting
from cp_plugin.planner.search import Plan, simplest
from cp_plugin.planner.training.model import WINDOW
from cp_plugin.tools.flags import packed
from cp_plugin.tools.show_plan import recomputes, sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """A kind of training, represented by one example."""

    name: str
    model: str = "llama3-8b"
    cluster: str = "dgx-h100"
    devices: int = 64
    tokens: int = 2**20
    card: str = ""
    """Overrides the cluster's network cards."""
    fp8: tuple[Fp8 | None, ...] = (None,)
    """Payload formats for our methods."""
    documents: str = ""
    """Packed documents, as for ``cp-plugin plan --documents``."""
    window: int = 0
    """Visible preceding tokens in all layers; 0: all."""
    front: bool = False
    """Whether the README shows it."""

    @property
    def example(self) -> str:
        """Description of the example."""
        where = f", `{self.cluster}`" if self.cluster != "dgx-h100" else ""
        return f"{self.model}, {self.devices:,} GPUs{where}, {self.tokens >> 10:,}k tokens"

    @property
    def query(self) -> Query:
        """What ``cp-plugin plan`` asks: every division over the devices."""
        machine = override(cluster(self.cluster), **{"inter": self.card} if self.card else {})
        query = packed(from_name(self.model, self.devices, self.tokens, machine, Fixed()), self.documents or None)
        windows = {"attention_pattern": WINDOW, "window": (self.window, 0)} if self.window else {}
        return keep_fitting(replace(query, model=replace(query.model, **windows), fp8=self.fp8))


SLOW = "roce100"
"""100 instead of 400 Gb/s."""
REGIMES = (
    Regime(name="long sequence, fast links"),
    Regime(name="the same, equal heads", model="llama2-7b"),
    Regime(name="one node", cluster="h200", devices=8, tokens=2**18),
    Regime(name="1,024 GPUs, 1M tokens", devices=1024),
    Regime(name="4,096 GPUs, 1M tokens", devices=4096),
    Regime(name="4,096 GPUs, 16M tokens", devices=4096, tokens=2**24),
    Regime(name="a large model, short of memory", model="llama3-70b", devices=256, front=True),
    Regime(name="four KV heads, one GPU a node", model="qwen2.5-7b", cluster="h100-1-per-node", tokens=2**18),
    Regime(name="one GPU a node", cluster="h100-1-per-node", tokens=2**18),
    Regime(name="equal heads, one GPU a node", model="llama2-7b", cluster="h100-1-per-node", tokens=2**18),
    Regime(name="four A100 a node", model="llama2-7b", cluster="a100-4-per-node", tokens=2**17),
    Regime(name="A100 on PCIe", model="llama2-7b", cluster="a100-pcie-roce", devices=32, tokens=2**18),
    Regime(name="slow cards, equal heads", model="llama2-7b", cluster="h100-1-per-node", tokens=2**19, card=SLOW),
    Regime(
        name="slow cards, equal heads, FP8 payloads of ours",
        model="llama2-7b",
        cluster="h100-1-per-node",
        tokens=2**19,
        card=SLOW,
        fp8=(None, "comm"),
    ),
    Regime(name="slow cards, one KV head a rank", tokens=2**18, card=SLOW),
    Regime(name="packed chat, fast links", documents="chat", front=True),
    Regime(name="packed chat, slow cards", cluster="h100-1-per-node", documents="chat", card=SLOW),
    Regime(name="packed chat with long documents", documents="long"),
    Regime(name="windows of 1,024 in all layers, fast links", tokens=2**18, window=1023, front=True),
    Regime(
        name="windows of 1,024 in all layers, slow cards",
        cluster="h100-1-per-node",
        tokens=2**18,
        window=1023,
        card=SLOW,
    ),
)


CANONICAL = REGIMES[0]
"""The example of the README, ``docs/choose.md`` and ``docs/wins.md``."""
CONSTRAINT = (
    "parallel sizes and recomputation chosen freely, one sequence per data-parallel rank, "
    "at most 16M tokens per iteration"
)
"""On every answer."""


@dataclass(frozen=True, slots=True)
class Apart:
    """The simplest of our methods that tie, and the fastest of stock Megatron's, each side in its own best shape."""

    ours: Priced
    stock: Priced

    @property
    def ratio(self) -> float:
        """Ratio of tokens per second."""
        return self.ours.tokens_per_s / self.stock.tokens_per_s


@cache
def answer(regime: Regime) -> Plan:
    """What ``cp-plugin plan`` says; ValueError if nothing fits the memory."""
    return search.answer(regime.query)


def apart(regime: Regime) -> Apart:
    """Each side of the answer; ValueError if nothing fits the memory."""
    plan = answer(regime)
    ours, stock = sides([p for p in plan.methods if plan.fits(p)])
    return Apart(simplest(ours), min(stock, key=lambda p: p.iteration.seconds))


def causes(regime: Regime) -> Gain | None:
    """Where the gain of the answer comes from; None: there is none, or a tie."""
    each = apart(regime)
    if each.ratio <= 1 or tie(each.ratio, 1.0, typical_error(each.ours.provider, each.stock.provider)):
        return None
    return gain(answer(regime), each.ours, each.stock)


def sides(methods: Sequence[Priced]) -> tuple[list[Priced], list[Priced]]:
    """Our methods, and stock Megatron's."""
    return [p for p in methods if not p.candidate.upstream], [p for p in methods if p.candidate.upstream]


def verdict(ratio: float, *providers: str) -> str:
    """Format upstream's time over ours; within the typical error of these providers a tie, below it a loss."""
    if tie(ratio, 1.0, typical_error(*providers)):
        return f"tie ({ratio:.2f}x)"
    return f"**{ratio:.2f}x**" if ratio > 1 else f"loss: {ratio:.2f}x"


def named(priced: Priced) -> str:
    """``stock `p2p```, or a method of ours with its options."""
    one = priced.candidate
    if one.name == STOCK:
        return "stock, without context parallelism"
    chosen = str(one.setup)
    words = f"`{one.name.removeprefix(STOCK).strip()}`" + (f" {chosen}" if chosen else "")
    return f"stock {words}" if one.upstream else words


def shaped(priced: Priced) -> str:
    """``tensor 8 x context 8, recomputes layernorm and mlp``."""
    return f"{sizes(priced.parallel)}, {recomputes(priced.parallel)}"


def sentence(regime: Regime) -> str:
    """The answer in a sentence, with its constraint."""
    plan, best = answer(regime), answer(regime).best
    other = simplest(sides(plan.methods)[not best.candidate.upstream])
    slower = other.iteration.seconds / best.iteration.seconds
    ties = tie(slower, 1.0, typical_error(other.provider, best.provider))
    word = "ties" if ties else f"takes {slower:.2f} times as long"
    return (
        f"Predicted for {regime.example} ({CONSTRAINT}): **{named(best)}**, {shaped(best)}. {named(other)}, "
        f"{shaped(other)}, {word} ({off_by(other.provider, best.provider)})."
    )
