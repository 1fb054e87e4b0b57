"""What a method costs on top of the kernel it distributes, on one device.

All ranks run as threads on the device (``ThreadMesh``): their kernels follow each other and their messages are copies.
The time of one big call of torch's flash attention, forward and backward, over that of all ranks together: 1 would be
tiles, merges and moves for free.
"""

from __future__ import annotations

from attend import Inputs, attend
from cases import Sort, possible
from kernel_speed import Size, random
from record import Step, in_a_line
from timing import Call, medians

from cp_plugin import ContextParallel, Options, Problem
from cp_plugin.comm import Mesh, run_threads
from cp_plugin.methods import registry as providers

METHODS = (
    ("ring", "zigzag", 0.90),
    ("striped", "striped", 0.83),
    ("attention2d", "zigzag", 0.92),
    ("burst", "zigzag", None),
    ("ulysses", "contiguous", None),
    ("usp", "zigzag", None),
    ("all_gather", "zigzag", None),
)
"""Provider, layout, and the least that is wanted with ``--cp-backend auto``: what is published for rings
(ring-flash-attention), and more for attention2d."""


def methods(step: Step, size: Size, ranks: int) -> None:
    """Every method with every backend, against one call."""
    x = random(size, size.tokens, size.tokens, step.device)
    calls: dict[str, Call] = {"one": lambda: attend(ContextParallel("ring", backend="sdpa"), x, Sort())}
    wanted = {}
    usable = possible(step.device)
    for backend in ("auto", "triton", "sdpa"):
        if usable[backend]:
            step.not_run(f"efficiency of methods with backend {backend}", usable[backend])
            continue
        for provider, layout, least in METHODS[: 1 if step.smoke else None]:
            name = f"{provider} on {layout}, backend {backend}, {ranks} ranks, {size}"
            try:
                calls[name] = emulated(provider, layout, backend, x, ranks)
                calls[name]()
            except Exception as error:  # of any library
                del calls[name]
                step.not_run(f"efficiency of {name}", in_a_line(error))
                continue
            wanted[name] = (">=", least) if backend == "auto" and least is not None else None
    times = medians(calls, 1 if step.smoke else 3, warm_up=1)
    for name in wanted:
        detail = {"ms": times[name], "one call ms": times["one"]}
        step.figure("compute efficiency of emulated ranks", name, times["one"] / times[name], wanted[name], **detail)


def emulated(provider: str, layout: str, backend: str, x: Inputs, ranks: int) -> Call:
    """Forward and backward of all ranks; their shards are cut beforehand."""
    heads, head_dim = x.q.shape[2:]
    problem = Problem(size=ranks, heads=heads, kv_heads=heads, head_dim=head_dim, seq_length=x.q.size(0))
    options = {"layout": layout, "backend": backend}
    settled = providers.settle(provider, problem, Options(**options))
    axes = settled.axes

    def made(mesh: Mesh) -> tuple[ContextParallel, Inputs]:
        cp = ContextParallel(provider, mesh=mesh, problem=problem, **options)
        return cp, Inputs(*(cp.shard(y) for y in x))

    shards = {index: rank[1] for index, rank in enumerate(run_threads(made, axes))}

    def rank(mesh: Mesh) -> None:
        attend(ContextParallel(provider, mesh=mesh, problem=problem, **options), shards[mesh.index], Sort())

    return lambda: run_threads(rank, axes)
