"""Comparison with stock Megatron by regime, for ``docs/wins.md`` and the README.

Three ways: with the same recomputation; as commonly run, where stock Megatron repeats attention and its messages under
full recomputation; and with each side's own best shape and recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

from cp_plugin.cli.packs import in_sequence
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Fp8
from cp_plugin.planner.asked import Fixed, of_name
from cp_plugin.planner.candidates import Allowed, Candidate
from cp_plugin.planner.machine.hardware import Cluster, cluster, override
from cp_plugin.planner.price import Priced
from cp_plugin.planner.search import KNOWN, KNOWN_ERROR, plan, tie
from cp_plugin.planner.training.model import WINDOW, Model, model
from cp_plugin.planner.training.parallel import Parallel
from evidence.situations import KEPT, all_share_one


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """A kind of training, represented by one example."""

    name: str
    model: str = "llama3-8b"
    cluster: str = "dgx-h100"
    devices: int = 64
    tokens: int = 2**20
    tensor: int = 1
    card: str = ""
    """Overrides the cluster's network cards."""
    fp8: tuple[Fp8 | None, ...] = (None,)
    """Payload formats for our methods."""
    options: Options = field(default_factory=Options)
    """Fixed options of our methods."""
    documents: str = ""
    """Packed documents, as for ``cp-plugin plan --documents``."""
    window: int = 0
    """Visible preceding tokens in all layers; 0: all."""
    front: bool = False
    """Whether the README shows it."""

    @property
    def example(self) -> str:
        """Description of the example."""
        tensor = f", tensor {self.tensor}" if self.tensor > 1 else ""
        where = f", `{self.cluster}`" if self.cluster != "dgx-h100" else ""
        return f"{self.model}, {self.devices:,} GPUs{where}{tensor}, {self.tokens >> 10:,}k tokens"

    @property
    def trained(self) -> Model:
        found = model(self.model)
        return replace(found, attention_pattern=WINDOW, window=(self.window, 0)) if self.window else found

    @property
    def machine(self) -> Cluster:
        found = cluster(self.cluster)
        return override(found, inter=self.card) if self.card else found

    @property
    def shape(self) -> Parallel:
        """One sequence over all devices, full recomputation."""
        return replace(all_share_one(self.devices, self.tokens, self.tensor), documents=self.lengths)

    @property
    def shapes(self) -> list[Parallel]:
        """All divisions of ``BATCH`` tokens per iteration, with all recomputation modes."""
        every = of_name(self.model, self.devices, self.tokens, self.machine, Fixed()).shapes
        batch, documents = max(1, BATCH // self.tokens), self.lengths
        some = [replace(s, global_batch=batch, documents=documents) for s in every if batch % s.data == 0]
        return some + [replace(s, recompute_modules=KEPT) for s in some if s.recompute == "selective"]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of packed documents; empty: one document."""
        return in_sequence(self.documents, self.tokens) if self.documents else ()


SLOW = "roce100"
"""100 instead of 400 Gb/s."""
BATCH = 2**24
"""Tokens per iteration where each side has its own best shape."""
WORTH = KNOWN_ERROR / 2
"""Shapes closer to the best than this are equivalent."""
REGIMES = (
    Regime(name="long sequence, fast links", front=True),
    Regime(name="the same, equal heads", model="llama2-7b"),
    Regime(name="one node", cluster="h200", devices=8, tokens=2**18),
    Regime(name="1,024 GPUs, 1M tokens", devices=1024, tensor=8, front=True),
    Regime(name="4,096 GPUs, 1M tokens", devices=4096, tensor=8, front=True),
    Regime(name="4,096 GPUs, 16M tokens", devices=4096, tensor=8, tokens=2**24),
    Regime(name="fewer KV heads than an all-to-all needs", model="llama3-70b", devices=256, tensor=8, front=True),
    Regime(
        name="four KV heads, one GPU a node", model="qwen2.5-7b", cluster="h100-1-per-node", tokens=2**18, front=True
    ),
    Regime(name="one GPU a node", cluster="h100-1-per-node", tokens=2**18),
    Regime(name="slow cards, equal heads", model="llama2-7b", cluster="h100-1-per-node", tokens=2**19, card=SLOW),
    Regime(
        name="slow cards, equal heads, FP8 payloads of ours",
        model="llama2-7b",
        cluster="h100-1-per-node",
        tokens=2**19,
        card=SLOW,
        fp8=(None, "comm"),
        front=True,
    ),
    Regime(
        name="slow cards, one KV head a rank, sums of gradients in float32",
        tensor=8,
        tokens=2**18,
        card=SLOW,
        front=True,
    ),
    Regime(
        name="the same, `--cp-gradient-dtype model`",
        tensor=8,
        tokens=2**18,
        card=SLOW,
        options=Options(gradient_dtype="model"),
        front=True,
    ),
    Regime(name="packed chat, fast links", documents="chat", front=True),
    Regime(name="packed chat, slow cards", cluster="h100-1-per-node", documents="chat", card=SLOW, front=True),
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


@dataclass(frozen=True, slots=True)
class Beside:
    """Our best, and stock Megatron's best with the same recomputation and as commonly run."""

    ours: Priced
    same: Priced
    run: Priced

    @property
    def same_ratio(self) -> float:
        """Ratio of times without repeated attention."""
        return self.same.without_repeats / self.ours.without_repeats

    @property
    def run_ratio(self) -> float:
        """Ratio of times with stock Megatron repeating attention."""
        return self.run.iteration.seconds / self.ours.iteration.seconds


@dataclass(frozen=True, slots=True)
class Apart:
    """Our best and stock Megatron's best, each in its own best shape."""

    ours: Priced
    stock: Priced

    @property
    def ratio(self) -> float:
        """Ratio of tokens per second."""
        return self.ours.tokens_per_s / self.stock.tokens_per_s


@cache
def apart(regime: Regime) -> Apart:
    """Each side with its own parallelism and recomputation; ValueError if nothing fits the memory.

    Without context parallelism both sides are the same, except for repeated attention.
    """

    def best(shapes: list[Parallel], suits: Callable[[Candidate], bool]) -> Priced:
        allowed = Allowed(options=regime.options, suits=suits)
        found = plan(regime.trained, shapes, regime.machine, fp8=regime.fp8, allowed=allowed, worth=WORTH)
        return max(filter(found.fits, found.found), key=lambda p: p.tokens_per_s)

    shapes = regime.shapes
    repeating = [replace(shape, recompute_attention=True) for shape in shapes]
    return Apart(
        best(shapes, lambda one: not one.upstream),
        best(repeating, lambda one: one.upstream or one.setup.problem.size == 1),
    )


@cache
def beside(regime: Regime) -> Beside:
    """Both sides in the regime's shape, with all methods simulated; ValueError if nothing fits the memory."""
    allowed = Allowed(options=regime.options)
    found = plan(
        regime.trained, [regime.shape], regime.machine, fp8=regime.fp8, allowed=allowed, hopeless=math.inf
    ).found
    ours = min((p for p in found if not p.candidate.upstream), key=lambda p: p.iteration.seconds)
    theirs = [p for p in found if p.candidate.upstream]
    return Beside(ours, min(theirs, key=lambda p: p.without_repeats), min(theirs, key=lambda p: p.iteration.seconds))


def verdict(ratio: float) -> str:
    """Format upstream's time over ours; within the known error a tie, below it a loss."""
    if tie(ratio, 1.0):
        return f"tie ({ratio:.2f}x)"
    return f"**{ratio:.2f}x** {KNOWN}" if ratio > 1 else f"loss: {ratio:.2f}x {KNOWN}"
