"""BurstAttention (arXiv 2403.09347) and the double ring: two nested rings that follow the hosts.

    hosts      a: 0 1    b: 2 3       intra   0 -> 1 -> 0     2 -> 3 -> 2      every step, on the fast links
                                      inter   0 -> 2 -> 0     1 -> 3 -> 1      once per round, posted at its start

A block visits all ranks of a host before it moves on, and its hop to the next host hides behind a whole inner round;
every rank sends to the other host through its own network card. Both rings are ``Ring``, nested.

BurstAttention's backward (Algorithm 2) moves the query side: q, dout, lse, delta and, behind them, dq, where a ring
moves k, v, dk, dv. That is less for equal heads and more for grouped ones; ``auto`` takes the fewer bytes. Sums have a
process group of their own, so they do not queue behind the next block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from cp_plugin.engine.comm import Mesh, sums
from cp_plugin.engine.common.text import show_bytes
from cp_plugin.engine.core.options import Option, Options, not_a_divisor, whole_number
from cp_plugin.engine.core.problem import Problem, describe_hosts
from cp_plugin.engine.core.spelling import spelled
from cp_plugin.engine.methods.gradient_dtype import KEY_HOPS, QUERY_HOPS, with_gradient_dtype
from cp_plugin.engine.methods.protocol import Attend, Choice, Formula, Provider
from cp_plugin.engine.methods.ring import Ring, hop_bytes

INTER, INTRA = "inter", "intra"


def _axes(size: int, options: Options) -> dict[str, int]:
    intra = options.intra_size or 1
    return {INTER: size // intra, INTRA: intra}


def _build(mesh: Mesh, local: Attend, problem: Problem, options: Options) -> Attend:
    method = local
    for axis in (INTRA, INTER):
        if mesh.axes[axis] > 1:
            method = Ring(mesh, axis, method, _moves(options))
    return method


def _moves(options: Options) -> Literal["kv", "q"]:
    return "q" if options.backward == "q" else "kv"


def _choose_rings(problem: Problem, options: Options) -> Choice:
    """The inner ring as large as a host, unless the user says otherwise."""
    size, hosts = problem.size, problem.transport.hosts
    if options.intra_size is None:
        intra = problem.transport.per_host if problem.transport.per_host < size else 1
        if intra > 1:
            why = f"two nested rings, {intra} ranks on a host and {size // intra} hosts: {describe_hosts(hosts)}"
        else:
            why = f"one ring: {describe_hosts(hosts)}" + (f"; {spelled('intra_size')} nests two" if not hosts else "")
        return Choice(replace(options, intra_size=intra), (why,) if size > 1 else ())
    INTRA_SIZE.check_ranks(options.intra_size, size)
    if hosts and problem.transport.per_host % options.intra_size:
        warning = (
            f"warning: {spelled('intra_size', options.intra_size)} does not match the hosts: {describe_hosts(hosts)}"
        )
        return Choice(options, (warning,))
    return Choice(options)


def _choose_burst(problem: Problem, options: Options) -> Choice:
    options, why = _choose_rings(problem, options)
    if options.backward in ("kv", "q") or problem.size == 1:
        return Choice(options, why)
    sent: dict[Literal["kv", "q"], int] = {
        moves: (problem.size - 1) * hop_bytes(problem, moves)[1] for moves in ("q", "kv")
    }
    best = min(sent, key=lambda moves: sent[moves])
    if not sent[best]:  # a rank has no token, which is refused later
        return Choice(replace(options, backward=best), why)
    names = {"q": "q, dout, lse, delta and dq", "kv": "k, v, dk and dv"}
    other = "kv" if best == "q" else "q"
    reason = (
        f"backward: {names[best]} travel, {show_bytes(sent[best])} from each rank; {names[other]} would be "
        f"{sent[other] / sent[best]:.2f}x, with {problem.heads} query and {problem.kv_heads} key/value heads"
    )
    return Choice(replace(options, backward=best), (*why, reason))


def _traffic(problem: Problem, options: Options, index: int) -> Formula:
    """Every inner round is a ring of its own: blocks and sums make one hop less than it has ranks."""
    (forward, backward), axes = hop_bytes(problem, _moves(options)), _axes(problem.size, options)
    formula = {}
    for axis, rounds in ((INTER, 1), (INTRA, axes[INTER])):
        hops = rounds * (axes[axis] - 1)
        if hops:
            formula["forward", axis], formula["backward", axis] = hops * forward, hops * backward
    return formula


INTRA_SIZE = Option(
    "intra_size",
    metavar="N",
    meaning="ranks in the inner of two nested rings",
    default="the ranks on one host",
    read=whole_number,
    write="a number of ranks, such as 8",
    near=lambda ranks, size: [n for n in (1, (size or 1) // 2, (size or 1) * 2) if n and ranks % n == 0],
    misfit=not_a_divisor,
)
BACKWARD = Option(
    "backward",
    metavar="WHAT",
    meaning="what travels around the rings in the backward pass: kv (keys and values) or q (queries and gradients)",
    default="whichever sends fewer bytes",
    choices=("kv", "q"),
    near=lambda ranks, moves: ("kv", "q"),
)
DOUBLE_RING = Provider(
    name="double_ring",
    summary="double ring (LoongTrain, arXiv 2406.18485): keys and values travel inside hosts and between them",
    layouts=("zigzag", "striped", "contiguous", "documents"),
    options=(INTRA_SIZE,),
    axes=_axes,
    build=_build,
    traffic=_traffic,
    choose=_choose_rings,
    extra_groups=(sums(INTER), sums(INTRA)),
    asks_hosts=lambda options: True,
)
BURST = replace(
    DOUBLE_RING,
    name="burst",
    summary="BurstAttention (arXiv 2403.09347): nested rings; the smaller side travels in the backward pass",
    options=(INTRA_SIZE, BACKWARD),
    choose=_choose_burst,
)
PROVIDERS = (
    with_gradient_dtype(BURST, lambda options: QUERY_HOPS if _moves(options) == "q" else KEY_HOPS),
    with_gradient_dtype(DOUBLE_RING, lambda options: KEY_HOPS),
)
