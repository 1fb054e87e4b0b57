"""The table of the page on precision: errors of gradients, by the dtype in which their sums are sent.

    python docs/precision_tables.py    print it: takes minutes, on ranks that are threads

The plugin itself runs. NCCL's sums, which need GPUs, are emulated in torch on the CPU (``AsNccl``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial, reduce
from typing import Any, NamedTuple

import markdown_tables as markdown
import torch
from torch import Tensor

from cp_plugin import ContextParallel, Problem
from cp_plugin.engine.attention import calls
from cp_plugin.engine.comm import Mesh, Pending, run_threads
from cp_plugin.engine.comm.mesh import Over, Tensors
from cp_plugin.engine.core.dtypes import dtype_name
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.methods import registry as providers
from cp_plugin.testing.oracle import Case, make_case, relative_errors

GRADIENTS = ("dq", "dk", "dv")
GRIDS = {8: (4, 2), 64: (8, 8)}
"""Ranks -> rows and columns of ATTENTION2D's grid."""
DTYPES = (torch.bfloat16, torch.float16)
Errors = dict[str, float]
"""Tensor -> relative error (norm) against float64."""


class Row(NamedTuple):
    """A line of the table."""

    name: str
    sums: str
    errors: Callable[[int, torch.dtype], Errors]


class AsNccl(Over):
    """A mesh whose reduce-scatter sums as NCCL's ring does: from rank to rank, in the dtype that is sent."""

    def _reduce_scatter(self, axis: str, tensors: Tensors) -> Pending:
        n, own = self.axes[axis], self.coordinates[axis]

        def add_around(t: Tensor) -> Tensor:
            parts = t.chunk(n)
            return reduce(torch.add, (parts[(own + step) % n] for step in range(1, n + 1)))

        return self._mesh._all_to_all(axis, tensors).then(add_around)


def problem_of(ranks: int, dtype: torch.dtype, kv_heads: int = 2) -> Problem:
    """Causal, grouped heads, the same number of tokens for any number of ranks."""
    return Problem(size=ranks, heads=4, kv_heads=kv_heads, head_dim=64, seq_length=1024, dtype=dtype)


def provider_errors(
    ranks: int,
    dtype: torch.dtype,
    name: str,
    *,
    over: Callable[[Mesh], Mesh] = lambda mesh: mesh,
    kv_heads: int = 2,
    **options: Any,
) -> Errors:
    """Measure the errors of a provider."""
    problem, case = problem_of(ranks, dtype, kv_heads), _case(dtype, kv_heads)
    options |= {"grid": GRIDS[ranks]} if name == "attention2d" else {}

    def rank(mesh: Mesh) -> tuple[Tensor, ...]:
        cp = ContextParallel(name, mesh=over(mesh), problem=problem, **options)
        got = calls.call_through_autograd(cp, case.inputs.sharded(cp, torch.device("cpu")), problem)
        return tuple(cp.unshard(x) for x in got)

    axes = providers.get(name).axes(ranks, Options(**options))
    errors = relative_errors(run_threads(rank, axes, patience=600)[0], case.want)
    return {gradient: errors[gradient] for gradient in GRADIENTS}


def one_device(ranks: int, dtype: torch.dtype, kv_heads: int = 2) -> Errors:
    """Measure the errors of one kernel call: a ring of one rank."""
    return provider_errors(1, dtype, "ring", kv_heads=kv_heads)


def rows() -> Iterator[Row]:
    """One device, upstream, and each way in which a provider sums."""
    yield Row("one device", "none", one_device)
    for title, name, options in (
        ("`ring`, zigzag", "ring", {"layout": "zigzag"}),
        ("`burst`, zigzag, queries travel", "burst", {"layout": "zigzag", "backward": "q", "intra_size": 1}),
        ("`all_gather`", "all_gather", {"head_groups": 1}),
        ("`attention2d`", "attention2d", {"head_groups": 1}),
    ):
        errors: Callable[..., Errors] = partial(provider_errors, name=name, **options)
        yield Row(title, "float32", errors)
        yield Row(title, "model", partial(errors, gradient_dtype="model"))
        if "head_groups" in options:
            yield Row(title, "model, by NCCL (emulated)", partial(errors, gradient_dtype="model", over=AsNccl))


def table() -> str:
    """Return the table, in percent."""
    columns = [(dtype, ranks) for dtype in DTYPES for ranks in GRIDS]
    head = ["gradients of", "sums", *(f"{dtype_name(dtype)}, {n} ranks: dq, dk, dv" for dtype, n in columns)]
    lines = []
    for row in rows():
        cells = [row.errors(ranks, dtype).values() for dtype, ranks in columns]
        lines.append((row.name, row.sums, *(", ".join(f"{100 * e:.2g} %" for e in errors) for errors in cells)))
    return markdown.table(head, lines)


@cache
def _case(dtype: torch.dtype, kv_heads: int = 2) -> Case:
    return make_case(problem_of(1, dtype, kv_heads))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table())
