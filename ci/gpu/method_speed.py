"""What a method costs on top of the kernel it distributes, on one device.

All ranks run as threads on the device (``ThreadMesh``): their kernels follow each other and their messages are copies.
The time of one big call of torch's flash attention, forward and backward, over that of all ranks together: 1 would be
tiles, merges and moves for free.
"""

from __future__ import annotations

from attend import attend
from cases import lacking
from kernel_speed import Size, random
from record import Step, in_a_line
from timing import Call, medians

from cp_plugin import ContextParallel, Options
from cp_plugin.attention.calls import Inputs
from cp_plugin.attention.setups import Setup, settled
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
    calls: dict[str, Call] = {"one": lambda: attend(ContextParallel("ring", backend="sdpa"), x, size.problem())}
    wanted = {}
    for backend in ("auto", "triton", "sdpa"):
        if reason := lacking(backend, step.device):
            step.not_run(f"efficiency of methods with backend {backend}", reason)
            continue
        for provider, layout, least in METHODS[: 1 if step.smoke else None]:
            name = f"{provider} on {layout}, backend {backend}, {ranks} ranks, {size}"
            try:
                options = Options(layout=layout, backend=backend)
                calls[name] = emulated(settled(providers.get(provider), size.problem(ranks), options), x)
                calls[name]()
            except Exception as error:  # of any library
                calls.pop(name, None)
                step.not_run(f"efficiency of {name}", in_a_line(error))
                continue
            wanted[name] = (">=", least) if backend == "auto" and least is not None else None
    times = medians(calls, 1 if step.smoke else 3, warm_up=1)
    for name in wanted:
        detail = {"ms": times[name], "one call ms": times["one"]}
        step.figure("compute efficiency of emulated ranks", name, times["one"] / times[name], wanted[name], **detail)


def emulated(setup: Setup, x: Inputs) -> Call:
    """Forward and backward of all ranks; their shards are cut beforehand."""

    def cut(mesh: Mesh) -> Inputs:
        return x.sharded(ContextParallel(setup, mesh=mesh), x.q.device)

    shards = run_threads(cut, setup.axes)

    def rank(mesh: Mesh) -> None:
        attend(ContextParallel(setup, mesh=mesh), shards[mesh.index], setup.problem)

    return lambda: run_threads(rank, setup.axes)
