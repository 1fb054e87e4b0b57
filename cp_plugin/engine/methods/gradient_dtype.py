"""``--cp-gradient-dtype``: the dtype in which gradient sums (dq, or dk and dv) travel between ranks.

    float32   as they are accumulated (float64 for float64 models)
    model     rounded to the model's dtype before they travel (``NarrowSums``): half the bytes
    auto      model where the table below allows it, else float32

Ranks accumulate in float32 either way. Methods need not know: they hand sums to ``reduce_scatter``, or to messages of
the group ``sums(axis)``, and count ``Problem.sum_bytes`` for an element.

The table has two sides, and ``auto`` is float32 unless both say otherwise (``docs/precision.md`` has the figures).

*Error* (``Way.ranks``): at most twice one device's. It grows with the root of the roundings that follow each other, so
it depends on the way of the sums and on the ranks that add to them.

*Gain* (``TOKENS``): where messages hide behind kernels, half the bytes save nothing. A rank's messages grow with its
tokens and key/value heads, its kernels with the square of its tokens and its query heads. Within a host they always
hide. Between hosts, with a 400 Gb/s card for each H100, a ring's call is predicted to take 1.2 times as long with
float32 up to these tokens, and as long above twice as many; with four query heads a key/value head it is a tie or
worse, as rounding takes time too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cp_plugin.engine.comm.mesh import Mesh, Over, Pending, below, sums
from cp_plugin.engine.core.dtypes import accumulation_dtype, dtype_name
from cp_plugin.engine.core.options import AUTO, Option, Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.spelling import spelled, spelled_dtypes
from cp_plugin.engine.methods.protocol import Choice, Provider, with_option


class NarrowSums(Over):
    """A mesh on another one, on which sums travel in ``dtype`` and arrive as float32.

    exchange, all_to_all_v   of a group sums(axis): rounded before each hop
    reduce_scatter           parts are rounded once; NCCL also rounds each partial sum, Gloo and threads sum in float32

    Other messages go to the mesh below, which may pack payloads; sums are never packed.
    """

    def __init__(self, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__(mesh)
        self._dtype = dtype

    send, receive, all_gather, all_to_all = map(below, ("send", "receive", "all_gather", "all_to_all"))

    def exchange(self, axis: str, tensors: Sequence[Tensor], *, to: int, source: int, group: str = "") -> Pending:
        if group != sums(axis):
            return self._mesh.exchange(axis, tensors, to=to, source=source, group=group)
        if self._place(axis) == to == source:
            return Pending.done(tuple(tensors))
        return self._widened(super().exchange(axis, self._narrow(tensors), to=to, source=source, group=group))

    def reduce_scatter(self, axis: str, tensors: Sequence[Tensor]) -> Pending:
        if self.axes[axis] == 1:
            return Pending.done(tuple(tensors))
        return self._widened(self._sum_and_scatter(axis, self._narrow(tensors)))

    def all_to_all_v(
        self, axis: str, tensors: Sequence[Tensor], sent: Sequence[int], received: Sequence[int], group: str = ""
    ) -> Pending:
        if group != sums(axis):
            return self._mesh.all_to_all_v(axis, tensors, sent, received, group)
        return self._widened(super().all_to_all_v(axis, self._narrow(tensors), sent, received, group))

    def _narrow(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t.to(self._dtype) for t in tensors]

    def _widened(self, pending: Pending) -> Pending:
        return pending.then(lambda t: t.to(accumulation_dtype(self._dtype)))


@dataclass(frozen=True, slots=True)
class Way:
    """How sums travel."""

    what: str
    """For messages."""
    ranks: int
    """The most ranks that may add to a sum: with them, errors in bfloat16 are at most twice one device's. 8 or 64."""
    along_axes: bool = False
    """Whether ranks add along one axis of the mesh, rather than all of them."""


KEY_HOPS = Way("dk and dv are rounded at each hop of a ring", 64)
QUERY_HOPS = Way("dq is rounded at each hop of a ring", 8)
REDUCE_SCATTER = Way("NCCL rounds the sums of a reduce-scatter at each rank", 8, along_axes=True)
ONE_HOP = Way("each part of dk and dv is rounded once", 64)

TOKENS = {1: 16384, 2: 8192}
"""Query heads that share a key/value head -> the most tokens of a rank for which ``model`` gains; others: none."""

GRADIENT_DTYPE = Option(
    "gradient_dtype",
    metavar="DTYPE",
    meaning="dtype in which partial sums of gradients (dq, or dk and dv) travel between ranks; model: the model's, "
    "with half the bytes; ranks accumulate in float32 either way",
    default="model where that is fast and accurate enough: bfloat16, several hosts, at most two query heads per "
    "key/value head; else float32",
    choices=("float32", "model"),
)


def decide_by_table(problem: Problem, way: Way, adding: int) -> tuple[bool, str]:
    """Decide whether sums to which so many ranks add travel in the model's dtype by default, and why: a phrase."""
    shared, hosts = problem.heads // problem.kv_heads, len(set(problem.transport.hosts))
    tokens, plural = problem.tokens, "s" * (shared > 1)
    enough = f"{way.what}, which is accurate enough for"
    sizes = f"{tokens:,} tokens per rank and {shared} query head{plural} per key/value head"
    reasons = (
        (
            problem.dtype != torch.bfloat16,
            f"sums in {dtype_name(problem.dtype)} can overflow even if their parts do not",
        ),
        (problem.transport.network == "gloo", "on CPU ranks there is no slow network to relieve"),
        (not hosts, "the hosts of the ranks, and so the network between them, are unknown"),
        (hosts == 1, "all ranks are on one host, where messages hide behind kernels"),
        (tokens > TOKENS.get(shared, 0), f"with {sizes}, messages hide behind kernels"),
        (adding > way.ranks, f"{enough} up to {way.ranks} ranks, but {adding} contribute to a sum"),
    )
    for so, reason in reasons:
        if so:
            return False, reason
    return True, f"{sizes} leave messages between hosts exposed; {enough} {adding} ranks"


def with_gradient_dtype(inner: Provider, way: Callable[[Options], Way] | None = None) -> Provider:
    """The provider with the option.

    way: completed options -> how its sums travel. None: they are float32 unless the user says otherwise.
    """
    made = with_option(
        inner,
        GRADIENT_DTYPE,
        as_sent=lambda problem, options: problem.with_transport(narrow_sums=options.gradient_dtype == "model"),
        over=lambda mesh, problem: NarrowSums(mesh, problem.dtype) if problem.transport.narrow_sums else mesh,
        refused=_refused,
    )
    if way is None:
        return made

    def choose(problem: Problem, options: Options) -> Choice:
        """Other options first: the table depends on what travels. In completed options, None is float32."""
        if options.gradient_dtype not in (None, AUTO):
            return made.choose(problem, options)
        options, why = made.choose(problem, replace(options, gradient_dtype=None))
        if problem.size == 1 or problem.dtype.itemsize > 2:
            return Choice(options, why)
        axes, its = inner.axes(problem.size, options), way(options)
        narrow, because = decide_by_table(problem, its, max(axes.values()) if its.along_axes else problem.size)
        said = f"sums of gradients travel in {dtype_name(problem.dtype) if narrow else 'float32'}: {because}"
        return Choice(replace(options, gradient_dtype="model" if narrow else None), (*why, said))

    return replace(
        made,
        choose=choose,
        asks_hosts=lambda options: options.gradient_dtype in (None, AUTO) or inner.asks_hosts(options),
    )


def float32_unless_told(provider: Provider, options: Options) -> Options:
    """The options for a typical problem, whose dtype, heads or tokens need not be those of the real calls."""
    if options.gradient_dtype not in (None, AUTO) or GRADIENT_DTYPE not in provider.options:
        return options
    return replace(options, gradient_dtype="float32")


def _refused(problem: Problem, options: Options) -> str | None:
    if options.gradient_dtype != "model" or problem.dtype.itemsize == 2:
        return None
    name = dtype_name(problem.dtype)
    return (
        f"{spelled(GRADIENT_DTYPE, 'model')}: gradient sums of a {name} model are {name} anyway; use "
        f"{spelled_dtypes(torch.bfloat16, torch.float16)}, or leave it out"
    )
