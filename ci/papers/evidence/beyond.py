"""Unpublished comparisons of methods for ``docs/beyond.md``.

Methods are compared by the time of a training iteration, each with the best of a few options, with the same model and
devices and one sequence over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from cp_plugin.attention.setups import settled, settled_or_reason
from cp_plugin.common.text import in_words
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.methods import registry as providers
from cp_plugin.planner.candidates import Candidate, candidates
from cp_plugin.planner.machine.events import Post
from cp_plugin.planner.machine.hardware import Cluster, cluster, override
from cp_plugin.planner.price import Priced, least, on, price, trained
from cp_plugin.planner.trace.program import program
from cp_plugin.planner.trace.timeline import Timeline, links_of, simulate
from cp_plugin.planner.training.footprint import footprint
from cp_plugin.planner.training.iteration import iteration
from cp_plugin.planner.training.model import Model, model
from cp_plugin.planner.training.parallel import Parallel, problem
from evidence.regimes import all_share_one

CLUSTERS = ("dgx-h100", "h100-1-per-node")
KV_HEADS = {"MHA 32:32": 32, "GQA 32:8": 8, "GQA 32:4": 4}
"""Query and key/value heads of a model of llama3-8b's size."""
DEVICES = 64
TOKENS = 2**18
MAP_DEVICES = (64, 256, 1024, 4096, 16384)
MAP_TOKENS = {"1M": 2**20, "3M": 3 * 2**20, "10M": 10 * 2**20, "30M": 30 * 2**20, "100M": 100 * 2**20}
MAP_TENSOR = 8
SLOW_LINKS = ("ndr400", "hdr200", "roce100")
HEAD_GROUPS = (1, 2, 4, 8)
STEPS = 512
"""Longest simulated ring; longer ones only have a lower bound."""
HOPELESS = 2.0
"""Methods of the map whose lower bound is this many times the best are not simulated."""
TRIED = 2
"""Candidates of a method simulated for the map."""
ENOUGH = 128
"""Total ring steps simulated for one method."""
GATHERED = 10 * 2**20
"""Longest sequence simulated for methods that gather all of it."""
ON_THE_MAP = ("attention2d", "burst", "upstream p2p", "upstream all_gather", "upstream a2a", "upstream a2a+p2p")
"""Our others differ little: usp from upstream's a2a+p2p, striped from burst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A method with its best options."""

    name: str
    chosen: str
    seconds: float
    """Per iteration."""
    simulated: Priced | None
    """None: ``seconds`` is a lower bound."""

    @property
    def upstream(self) -> bool:
        return self.name.startswith("upstream")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell of the map."""

    devices: int
    tokens: str
    entries: Sequence[Entry]
    """Fastest first; empty: the model does not fit."""

    @property
    def ours(self) -> Entry:
        """Our fastest method."""
        return next(e for e in self.entries if not e.upstream and e.simulated is not None)

    @property
    def upstream(self) -> Entry:
        """Megatron's fastest method."""
        return next(
            e for e in self.entries if e.upstream and (e.simulated is not None or e.seconds > self.ours.seconds)
        )

    @property
    def gain(self) -> float:
        """Upstream's time over ours; a lower bound if upstream's is not simulated."""
        return self.upstream.seconds / self.ours.seconds

    @property
    def kept(self) -> float | None:
        """The same without repeated attention; None: not simulated."""
        simulated = self.upstream.simulated
        return None if simulated is None else simulated.without_repeats / self.ours.seconds


def with_kv_heads(number: int) -> Model:
    """llama3-8b with another number of key/value heads."""
    return replace(model("llama3-8b"), name=f"llama3-8b with {number} key/value heads", kv_heads=number)


ALL_SHARE_ONE = all_share_one(DEVICES, TOKENS)


@cache
def methods(kv_heads: int, name: str) -> Sequence[Entry]:
    """Every method on 64 devices that share one sequence, fastest first."""
    return contest(with_kv_heads(kv_heads), ALL_SHARE_ONE, cluster(name))


def contest(
    of: Model,
    shape: Parallel,
    machine: Cluster,
    *,
    hopeless: float = math.inf,
    tried: int = 99,
    only: Sequence[str] = (),
) -> list[Entry]:
    """The best of each method, fastest first.

    Args:
        hopeless: methods whose lower bound is this many times the best are not simulated.
        tried: candidates simulated per method.
        only: names of methods; empty: all.
    """
    its = on(problem(of, shape), machine, shape.tensor)
    every = {name: some for name, some in candidates(its).items() if some and (not only or name in only)}
    ordered = {name: _ordered(some, of, shape, machine)[:tried] for name, some in every.items()}
    found: list[Entry] = []
    best = math.inf
    for name, some in sorted(ordered.items(), key=lambda item: item[1][0][0]):
        entry = _best(name, some, of, shape, machine, hopeless * best)
        found.append(entry)
        if entry.simulated is not None:
            best = min(best, entry.seconds)
    return sorted(found, key=lambda entry: entry.seconds)


def grids(kv_heads: int, name: str) -> dict[str, Timeline]:
    """Grid such as ``8x8`` -> one attention call of ATTENTION2D, for all grids of 64 ranks."""
    shapes = [(2**i, DEVICES // 2**i) for i in range(DEVICES.bit_length())]
    return {in_words(grid): _call("attention2d", kv_heads, cluster(name), Options(grid=grid)) for grid in shapes}


def head_groups(kv_heads: int) -> dict[tuple[str, int], Timeline]:
    """(link, groups) -> one attention call on the 8x8 grid, on 64 single-device nodes with such links."""
    return {
        (link, groups): _call("attention2d", kv_heads, slow(link), Options(grid=(8, 8), head_groups=groups))
        for link in SLOW_LINKS
        for groups in HEAD_GROUPS
        if kv_heads % groups == 0
    }


def slow(link: str) -> Cluster:
    """64 single-H100 nodes with one network card of that kind each."""
    return override(cluster("h100-1-per-node"), inter=link)


def payloads(kv_heads: int, name: str) -> dict[str, tuple[Timeline, Timeline]]:
    """Our method -> one attention call with its best options, with payloads in bfloat16 and in FP8."""
    found = {}
    for entry in methods(kv_heads, name):
        if entry.simulated is not None and not entry.upstream:
            plain = entry.simulated.main
            options = replace(plain.setup.options, fp8="comm")
            its = plain.setup.problem
            setup = settled(providers.get(entry.name), its, options)
            found[entry.name] = (plain, simulate(setup, its, cluster=cluster(name), ranks="busiest"))
    return found


@cache
def cell(devices: int, tokens: str) -> Cell:
    """One cell of the map: llama3-8b, tensor parallelism 8, one sequence over all DGX H100 nodes."""
    of, machine = model("llama3-8b"), cluster("dgx-h100")
    shape = all_share_one(devices, MAP_TOKENS[tokens], MAP_TENSOR)
    if footprint(of, shape).total > machine.device.memory_bytes:
        return Cell(devices=devices, tokens=tokens, entries=())
    only = [name for name in ON_THE_MAP if name != "upstream all_gather" or shape.seq_length <= GATHERED]
    entries = [e for e in contest(of, shape, machine, hopeless=HOPELESS, tried=TRIED, only=only) if _fits(e, machine)]
    return Cell(devices=devices, tokens=tokens, entries=entries)


PAYS = 1.05
"""A method pays if it takes at most this many times the best one's time."""


def pays(found: Sequence[Cell]) -> Mapping[str, Mapping[int, str]]:
    """Method -> devices -> shortest sequence from which on it always pays; ``never``; ``-``: not simulated."""
    names = sorted({e.name for c in found for e in c.entries})
    devices = dict.fromkeys(c.devices for c in found if c.entries)
    return {name: {n: _pays_from(name, [c for c in found if c.devices == n and c.entries]) for n in devices}
            for name in names}  # fmt: skip


def _pays_from(name: str, row: Sequence[Cell]) -> str:
    """row: cells of one number of devices, shortest sequences first."""
    shortest = ""
    for one in reversed(row):
        best = min(e.seconds for e in one.entries if e.simulated is not None)
        entry = next((e for e in one.entries if e.name == name and e.simulated is not None), None)
        if entry is not None and entry.seconds > PAYS * best:
            return shortest or "never"
        shortest = one.tokens if entry is not None else shortest
    return shortest or "-"


def _fits(entry: Entry, machine: Cluster) -> bool:
    return entry.simulated is None or entry.simulated.footprint.total <= machine.device.memory_bytes


def _call(name: str, kv_heads: int, machine: Cluster, options: Options) -> Timeline:
    its = on(problem(with_kv_heads(kv_heads), ALL_SHARE_ONE), machine, 1)
    return simulate(name, its, options, cluster=machine, ranks="busiest")


def _ordered(some: Sequence[Candidate], of: Model, shape: Parallel, machine: Cluster) -> list[tuple[float, Candidate]]:
    """With lower bounds, lowest first; ties by ring steps, then by time on links."""
    bounds = [(iteration(of, trained(c, shape), machine, least(c, machine, shape.tensor)).seconds, c) for c in some]
    return sorted(bounds, key=lambda pair: (pair[0], _steps(pair[1]), _on_links(pair[1], shape, machine)))


def _on_links(candidate: Candidate, shape: Parallel, machine: Cluster) -> float:
    """Lower bound on its time on links."""
    setup = candidate.setup
    links = links_of(setup, machine, shape.tensor)
    sent = setup.provider.traffic(setup.problem, setup.options, setup.problem.size - 1)
    return sum(links.least(axis, nbytes)[1] for (_, axis), nbytes in sent.items())


def _best(
    name: str, some: Sequence[tuple[float, Candidate]], of: Model, shape: Parallel, machine: Cluster, limit: float
) -> Entry:
    """The best of a method's most promising candidates."""
    bound, first = some[0]
    found: Priced | None = None
    steps = 0
    for at_least, candidate in [pair for pair in some if _steps(pair[1]) <= STEPS]:
        best = found.iteration.seconds if found is not None else math.inf
        if at_least < min(limit, best) and (steps == 0 or steps + _steps(candidate) <= ENOUGH):
            steps += _steps(candidate)
            priced = price(candidate, {}, of, shape, machine)
            if priced.iteration.seconds < best:
                found = priced
    if found is None:
        return Entry(name=name, chosen=str(first.setup), seconds=bound, simulated=None)
    return Entry(name=name, chosen=str(found.candidate.setup), seconds=found.iteration.seconds, simulated=found)


def _steps(candidate: Candidate) -> int:
    """Ring steps; 1 without a ring."""
    setup = candidate.setup
    return setup.problem.size // (setup.options.head_parallel or 1) if _is_ring(setup.provider.name) else 1


@cache
def _is_ring(name: str) -> bool:
    small = Problem(size=4, heads=2, kv_heads=2, seq_length=512)  # too few heads for all ranks to share them
    setup = settled_or_reason(providers.get(name), small, Options())
    if setup.reason is not None:
        return False
    return any(isinstance(event, Post) and event.verb == "exchange" for event in program(setup, 0).forward)
